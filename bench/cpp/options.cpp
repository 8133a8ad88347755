// Parsing flags (bench/cpp/options.hpp).
#include "options.hpp"

#include <cstdlib>
#include <iostream>

#include "zcomm/error.hpp"

namespace zcomm::bench {
namespace {

constexpr const char* kHelp =
    "zcomm_bench latency|guard [-np RANKS] [-b SIZE] [-e SIZE] [-f FACTOR] [-n CALLS] [-w WARMUP] [--rounds R] "
    "[--pin]\n"
    "            [--json FILE [--append]]\n"
    "mpirun -n 2 zcomm_bench latency      (beside MPI_Allreduce of the MPI that it was built with)\n"
    "latency: p50, p95, p99 of blocking all_reduce and barrier beside the cache line's round trip and the futex's hop\n"
    "guard:   what comparing headers costs per call\n";

std::size_t parse_size(const std::string& flag, const std::string& word) {
  char* end = nullptr;
  const double number = std::strtod(word.c_str(), &end);
  const std::string unit = end;
  const double scale = unit.empty() ? 1 : unit == "K" ? 1 << 10 : unit == "M" ? 1 << 20 : unit == "G" ? 1 << 30 : 0;
  if (end == word.c_str() || scale == 0 || number * scale < 1)
    throw InvalidArgument(flag + " " + word + ": write for example 8, 64K, 1M");
  return static_cast<std::size_t>(number * scale);
}

}  // namespace

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    const auto next = [&]() -> std::string {
      if (i + 1 == argc) throw InvalidArgument(flag + ": its value is missing");
      return argv[++i];
    };
    const auto number = [&] { return static_cast<int>(parse_size(flag, next())); };
    if (flag == "latency" || flag == "guard")
      options.what = flag;
    else if (flag == "-np")
      options.world_size = number();
    else if (flag == "-b")
      options.min_nbytes = parse_size(flag, next());
    else if (flag == "-e")
      options.max_nbytes = parse_size(flag, next());
    else if (flag == "-f")
      options.factor = static_cast<double>(number());
    else if (flag == "-n")
      options.calls = number();
    else if (flag == "-w")
      options.warmup = number();
    else if (flag == "--rounds")
      options.rounds = number();
    else if (flag == "--pin")
      options.pin = true;
    else if (flag == "--json")
      options.json = next();
    else if (flag == "--append")
      options.json_append = true;
    else if (flag == "--help" || flag == "-h") {
      std::cout << kHelp;
      std::exit(0);
    } else
      throw InvalidArgument(flag + ": no such flag\n" + kHelp);
  }
  if (options.factor < 2) throw InvalidArgument("-f: the factor is an integer from 2");
  return options;
}

}  // namespace zcomm::bench
