// Single calls in nanoseconds, their percentiles over all ranks, and JSON lines.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include "options.hpp"
#include "world.hpp"

namespace zcomm::bench {

struct Percentiles {
  double p50, p95, p99;
};

/// Nearest rank; sorts `samples`.
Percentiles percentiles_of(std::vector<double>& samples);
double median_of(std::vector<double> samples);

/// Of the slowest rank: each number is the largest of all ranks. Collective.
class Gather {
 public:
  explicit Gather(Rank& self);
  double slowest(double mine);
  Percentiles slowest(const Percentiles& mine);

 private:
  Rank& self_;
  std::shared_ptr<SymmetricBuffer> shared_;
};

/// One JSON object a line, from pairs of a key and a JSON value. Nothing without a file name, or on another rank than
/// 0.
class JsonLines {
 public:
  JsonLines(const Options& options, int rank);
  void write(const std::vector<std::pair<std::string, std::string>>& fields);

 private:
  std::ofstream file_;
};
std::string quoted(const std::string& text);

}  // namespace zcomm::bench
