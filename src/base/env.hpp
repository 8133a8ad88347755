// Every environment variable that the core reads, as a documented field of one struct (listed by `zcomm doctor`).
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace zcomm {

struct Env {
  std::optional<std::string> isa;            ///< ZCOMM_ISA: plain | avx2 | avx512 | avx512_bf16
  std::optional<int> threads;                ///< ZCOMM_THREADS: size of the core's thread pool
  std::optional<std::string> io;             ///< ZCOMM_IO: io_uring | threads
  std::optional<std::size_t> pinned_budget;  ///< ZCOMM_PINNED_BUDGET: bytes, or with K, M, G
  std::optional<std::string> link_algo;      ///< ZCOMM_LINK_ALGO: ring | halving
  std::optional<std::string> nccl_lib;       ///< ZCOMM_NCCL_LIB: path of libnccl.so.2
};

/// Read afresh; throws InvalidArgument naming variable and value.
Env read_env();

struct EnvVariable {
  const char* name;
  const char* meaning;
};
const std::vector<EnvVariable>& env_variables();

}  // namespace zcomm
