// codec_bench: encode and decode_sum next to copies of as many bytes, in memory and on all threads.
//
// All cases take turns, a call each. A case's rate is bytes read and written over the median of its times; its share is
// of the faster copy's rate (memcpy, or non-temporal stores) in the same run. sign reads its elements twice, which
// counts twice. Usage: codec_bench [-n ELEMENTS] [--rounds R] [--match WORD] [--json FILE]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "base/cpu_features.hpp"
#include "base/thread_pool.hpp"
#include "device/codec.hpp"
#include "device/in_parts.hpp"
#include "device/kernels.hpp"
#include "zcomm/error.hpp"

namespace zcomm::bench {
namespace {

using Clock = std::chrono::steady_clock;
struct CodecOptions {
  std::size_t count = 64 << 20;
  int rounds = 9;
  std::string match, json;
};

CodecOptions parse(int argc, char** argv) {
  CodecOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (i + 1 == argc)
      throw InvalidArgument(flag + ": codec_bench [-n ELEMENTS] [--rounds R] [--match WORD] [--json F]");
    const std::string value = argv[++i];
    if (flag == "-n")
      options.count = std::stoull(value);
    else if (flag == "--rounds")
      options.rounds = std::stoi(value);
    else if (flag == "--match")
      options.match = value;
    else if (flag == "--json")
      options.json = value;
    else
      throw InvalidArgument(flag + ": no such flag");
  }
  return options;
}

/// Memory at a multiple of 4 KiB, written once.
class Pages {
 public:
  explicit Pages(std::size_t nbytes) : bytes_(nbytes + 4096) {}
  std::byte* data() {
    const auto at = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return bytes_.data() + (4096 - at % 4096) % 4096;
  }
  float* floats() { return reinterpret_cast<float*>(data()); }

 private:
  std::vector<std::byte> bytes_;
};

struct Case {
  std::string name;
  double nbytes;  ///< read and written
  std::function<void()> call;
  bool is_copy = false;
  std::vector<double> times_s{};
};

struct NamedCodec {
  const char* name;
  Codec codec;
};
const NamedCodec kCodecs[] = {{"int8", {}},
                              {"int4", {.bits = 4}},
                              {"fp8", {.kind = CodecKind::fp8_e4m3}},
                              {"sign", {.kind = CodecKind::sign, .bits = 1}},
                              {"int8 stochastic", {.stochastic = true}},
                              {"int4 rotate", {.bits = 4, .rotate = 32}}};

class CodecBench {
 public:
  explicit CodecBench(const CodecOptions& options)
      : options_(options),
        in_(options.count * sizeof(float)),
        error_(options.count * sizeof(float)),
        out_(options.count * sizeof(float)),
        narrow_(options.count * sizeof(std::uint16_t)) {
    for (std::size_t i = 0; i < options.count; ++i)
      in_.floats()[i] = static_cast<float>(static_cast<std::int32_t>(i * 2654435761u)) * 0x1p-31f;
    device::cast(narrow_.data(), DType::bfloat16, in_.data(), DType::float32, options.count);
    add_copies();
    for (const NamedCodec& each : kCodecs) add_codec(each);
  }

  void run() {
    for (int round = -1; round < options_.rounds; ++round)  // the first one warms up
      for (Case& each : cases_) {
        const auto begin = Clock::now();
        each.call();
        if (round >= 0) each.times_s.push_back(std::chrono::duration<double>(Clock::now() - begin).count());
      }
  }

  void report() {
    double roof = 0;
    for (Case& each : cases_)
      if (each.is_copy) roof = std::max(roof, rate_gbps(each));
    std::printf("# codec_bench: %zu elements, %d threads, %s; read and written, share of the faster copy\n",
                options_.count, ThreadPool::shared().size(), std::string(name_of(current_isa())).c_str());
    std::ofstream json(options_.json, std::ios::app);
    for (Case& each : cases_) {
      const double gbps = rate_gbps(each);
      std::printf("%-28s %8.2f GB/s  %5.2f\n", each.name.c_str(), gbps, gbps / roof);
      if (!options_.json.empty())
        json << "{\"kind\": \"codec\", \"case\": \"" << each.name << "\", \"count\": " << options_.count
             << ", \"gbps\": " << gbps << ", \"share\": " << gbps / roof << "}\n";
    }
  }

 private:
  void add(const std::string& name, double nbytes, std::function<void()> call, bool is_copy = false) {
    if (is_copy || name.find(options_.match) != std::string::npos)
      cases_.push_back({name, nbytes, std::move(call), is_copy});
  }

  void add_copies() {
    const std::size_t nbytes = options_.count * sizeof(float);
    for (const auto stores : {device::Stores::cached, device::Stores::streaming})
      add(
          stores == device::Stores::cached ? "memcpy" : "streaming copy", 2.0 * static_cast<double>(nbytes),
          [this, stores, nbytes] {
            device::in_parts(nbytes, 2, [this, stores](std::size_t begin, std::size_t end) {
              device::copy(out_.data() + begin, in_.data() + begin, end - begin, stores);
            });
          },
          true);
  }

  void add_codec(const NamedCodec& each) {
    const auto count = static_cast<double>(options_.count);
    const auto coded = static_cast<double>(encoded_nbytes(each.codec, options_.count));
    const double passes = each.codec.kind == CodecKind::sign ? 2 : 1;
    const std::string name = each.name;
    const Codec codec = each.codec;
    coded_.emplace_back(encoded_nbytes(codec, options_.count));
    std::byte* const part = coded_.back().data();
    const auto encode = [this, codec, part](const void* in, DType dtype, void* error) {
      device::encode_in_parts(codec, {part, in, dtype, options_.count, error});
    };
    add("encode " + name, passes * 4 * count + coded, [this, encode] { encode(in_.data(), DType::float32, nullptr); });
    add("encode bf16 " + name, passes * 2 * count + coded,
        [this, encode] { encode(narrow_.data(), DType::bfloat16, nullptr); });
    add("encode + error " + name, passes * 8 * count + 4 * count + coded,
        [this, encode] { encode(in_.data(), DType::float32, error_.data()); });
    add("encode bf16 + error " + name, passes * 6 * count + 4 * count + coded,
        [this, encode] { encode(narrow_.data(), DType::bfloat16, error_.data()); });
    const std::vector<const std::byte*> parts{part};
    add("decode " + name, 4 * count + coded, [this, codec, parts] {
      device::decode_sum_in_parts(codec, {.out = out_.data(), .in = {parts.data(), 1}, .count = options_.count});
    });
    add("decode bf16 " + name, 2 * count + coded, [this, codec, parts] {
      device::decode_sum_in_parts(
          codec, {.out = out_.data(), .in = {parts.data(), 1}, .count = options_.count, .dtype = DType::bfloat16});
    });
    add("decode + accumulate " + name, 8 * count + coded, [this, codec, parts] {
      device::decode_sum_in_parts(
          codec, {.out = out_.data(), .in = {parts.data(), 1}, .count = options_.count, .accumulate = true});
    });
  }

  static double rate_gbps(Case& each) {
    std::vector<double>& times = each.times_s;
    std::sort(times.begin(), times.end());
    return each.nbytes / times[times.size() / 2] / 1e9;
  }

  const CodecOptions options_;
  Pages in_, error_, out_, narrow_;
  std::vector<Pages> coded_;
  std::vector<Case> cases_;
};

}  // namespace
}  // namespace zcomm::bench

int main(int argc, char** argv) {
  try {
    const auto options = zcomm::bench::parse(argc, argv);
    zcomm::bench::CodecBench bench(options);
    bench.run();
    bench.report();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "codec_bench: %s\n", error.what());
    return 2;
  }
}
