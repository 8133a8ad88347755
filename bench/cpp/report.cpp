// Percentiles and JSON (bench/cpp/report.hpp).
#include "report.hpp"

#include <algorithm>
#include <cmath>

namespace zcomm::bench {

Percentiles percentiles_of(std::vector<double>& samples) {
  std::sort(samples.begin(), samples.end());
  const auto at = [&](double share) {
    const auto place = static_cast<std::size_t>(std::ceil(share * static_cast<double>(samples.size())));
    return samples[std::max<std::size_t>(place, 1) - 1];
  };
  return {at(0.50), at(0.95), at(0.99)};
}

double median_of(std::vector<double> samples) { return percentiles_of(samples).p50; }

Gather::Gather(Rank& self)
    : self_(self), shared_(self.comm->allocate_shared(static_cast<std::size_t>(self.world_size) * sizeof(double))) {}

double Gather::slowest(double mine) {
  auto* values = reinterpret_cast<double*>(shared_->data());
  values[self_.rank] = mine;
  self_.comm->barrier(kBlocking);
  const double worst = *std::max_element(values, values + self_.world_size);
  self_.comm->barrier(kBlocking);
  return worst;
}

Percentiles Gather::slowest(const Percentiles& mine) {
  return {slowest(mine.p50), slowest(mine.p95), slowest(mine.p99)};
}

JsonLines::JsonLines(const Options& options, int rank) {
  if (rank == 0 && !options.json.empty())
    file_.open(options.json, options.json_append ? std::ios::app : std::ios::trunc);
}

void JsonLines::write(const std::vector<std::pair<std::string, std::string>>& fields) {
  if (!file_.is_open()) return;
  const char* separator = "{";
  for (const auto& [key, value] : fields) {
    file_ << separator << quoted(key) << ": " << value;
    separator = ", ";
  }
  file_ << "}" << std::endl;
}

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + '"';
}

}  // namespace zcomm::bench
