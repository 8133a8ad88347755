// Flags of zcomm_bench, named as those of nccl-tests.
#pragma once

#include <cstddef>
#include <string>

namespace zcomm::bench {

struct Options {
  std::string what = "latency";  ///< latency, guard
  int world_size = 2;            ///< -np; under mpirun: its number
  std::size_t min_nbytes = 8, max_nbytes = 64 << 10;
  double factor = 2;
  int calls = 2000;  ///< -n, per size and variant, in `rounds` rounds
  int warmup = 200;  ///< -w
  int rounds = 21;
  bool pin = false;  ///< rank r on the r-th CPU of the affinity mask (modulo their number)
  bool json_append = false;
  std::string json;  ///< file
};

/// Throws InvalidArgument naming the flag. `--help` prints and exits.
Options parse(int argc, char** argv);

}  // namespace zcomm::bench
