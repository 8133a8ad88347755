#include "base/env.hpp"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/error.hpp"

namespace zcomm {
namespace {

std::optional<std::string> get(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return std::string(value);
}

std::optional<std::string> get_one_of(const char* name, std::initializer_list<const char*> allowed) {
  auto value = get(name);
  if (!value) return value;
  std::string list;
  for (const char* choice : allowed) {
    if (*value == choice) return value;
    list += list.empty() ? choice : text(", ", choice);
  }
  throw InvalidArgument(text(name, "=", *value, ": expected one of ", list));
}

/// Bytes, or with a suffix K, M or G (powers of 1024).
std::optional<std::size_t> get_nbytes(const char* name) {
  const auto value = get(name);
  if (!value) return std::nullopt;
  std::size_t nbytes = 0;
  const char* last = value->data() + value->size();
  const auto [end, error] = std::from_chars(value->data(), last, nbytes);
  const std::string unit(end, last);
  const int shift = unit.empty() ? 0 : unit == "K" ? 10 : unit == "M" ? 20 : unit == "G" ? 30 : -1;
  if (error != std::errc() || shift < 0 || nbytes > (std::size_t{1} << 62 >> shift))
    throw InvalidArgument(text(name, "=", *value, ": expected bytes, or a number with K, M or G"));
  return nbytes << shift;
}

}  // namespace

Env read_env() {
  Env env;
  env.isa = get_one_of("ZCOMM_ISA", {"plain", "avx2", "avx512", "avx512_bf16"});
  env.io = get_one_of("ZCOMM_IO", {"io_uring", "threads"});
  env.pinned_budget = get_nbytes("ZCOMM_PINNED_BUDGET");
  env.link_algo = get_one_of("ZCOMM_LINK_ALGO", {"ring", "halving"});
  env.nccl_lib = get("ZCOMM_NCCL_LIB");
  if (const auto value = get("ZCOMM_THREADS")) {
    int threads = 0;
    const auto [end, error] = std::from_chars(value->data(), value->data() + value->size(), threads);
    if (error != std::errc() || end != value->data() + value->size() || threads < 1)
      throw InvalidArgument(text("ZCOMM_THREADS=", *value, ": expected a number of threads >= 1"));
    env.threads = threads;
  }
  return env;
}

const std::vector<EnvVariable>& env_variables() {
  static const std::vector<EnvVariable> all = {
      {"ZCOMM_ISA", "instruction set of the CPU kernels at most: plain, avx2, avx512, avx512_bf16"},
      {"ZCOMM_THREADS", "size of the core's thread pool (default: usable CPUs / local ranks)"},
      {"ZCOMM_IO", "engine of the swap files: io_uring, threads (default: io_uring if it works)"},
      {"ZCOMM_PINNED_BUDGET",
       "bytes of pinned memory that this process may use: a number, or with K, M, G (default: all)"},
      {"ZCOMM_LINK_ALGO", "algorithm of collectives over sockets: ring, halving (default: by size and world)"},
      {"ZCOMM_NCCL_LIB", "path of libnccl.so.2 for backend nccl (default: that of the nvidia-nccl wheel)"},
  };
  return all;
}

}  // namespace zcomm
