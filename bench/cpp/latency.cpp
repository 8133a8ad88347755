// Latency of small collectives through the C++ API (bench/cpp/latency.hpp).
//
// In each round every variant runs its share of the calls, started by a barrier; every call is timed, one clock read a
// call (about 20 ns, not subtracted). Percentiles are over all calls of a rank, those of the slowest rank are shown.
#include "latency.hpp"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

#include "line.hpp"
#include "report.hpp"

namespace zcomm::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kLaps = 20, kRepeats = 10;  // short, so that a rank that loses its core spoils few of them

struct Variant {
  std::string name;
  std::function<void()> call;
  std::vector<double> ns;
};

void run_round(Rank& self, Variant& variant, int calls) {
  self.comm->barrier(kBlocking);
  auto before = Clock::now();
  for (int i = 0; i < calls; ++i) {
    variant.call();
    const auto now = Clock::now();
    variant.ns.push_back(std::chrono::duration<double, std::nano>(now - before).count());
    before = now;
  }
}

/// Buffers of one size, and the variants on them.
class Sized {
 public:
  Sized(Rank& self, std::size_t nbytes)
      : self_(self),
        count_(std::max<std::size_t>(1, nbytes / sizeof(float))),
        symmetric_(self.comm->allocate(count_ * sizeof(float))),
        private_(count_),
        mpi_(count_) {}

  std::vector<Variant> variants() {
    std::vector<Variant> all;
    all.push_back({"symmetric", [this] { reduce(symmetric()); }, {}});
    all.push_back({"private", [this] { reduce(private_.data()); }, {}});
    if (self_.mpi) all.push_back({"mpi", [this] { self_.mpi->all_reduce(mpi_.data(), static_cast<int>(count_)); }, {}});
    return all;
  }

  /// Elements that are not the sum of rank + 1; leaves zeros behind.
  double wrong() {
    const auto own = static_cast<float>(self_.rank + 1);
    const auto sum = static_cast<float>(self_.world_size * (self_.world_size + 1) / 2);
    double bad = 0;
    for (float* values : {symmetric(), private_.data()}) {
      std::fill_n(values, count_, own);
      self_.comm->barrier(kBlocking);
      reduce(values);
      for (std::size_t i = 0; i < count_; ++i) bad += values[i] != sum;
      self_.comm->barrier(kBlocking);
      std::fill_n(values, count_, 0.0f);
    }
    return bad;
  }

  std::size_t nbytes() const { return count_ * sizeof(float); }

 private:
  float* symmetric() { return reinterpret_cast<float*>(symmetric_->data()); }
  void reduce(float* values) {
    const Buffer buffer{values, count_};
    self_.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, kBlocking);
  }

  Rank& self_;
  std::size_t count_;
  std::shared_ptr<SymmetricBuffer> symmetric_;
  std::vector<float> private_, mpi_;
};

/// The floor: times of a cache line and a futex between the same processes in the same rounds.
class Floor {
 public:
  explicit Floor(Rank& self)
      : self_(self),
        shared_(self.comm->allocate_shared(sizeof(Word) * static_cast<std::size_t>(self.world_size + 2))) {}

  void run_round() {
    auto* words = reinterpret_cast<Word*>(shared_->data());
    self_.comm->barrier(kBlocking);
    for (int i = 0; i < kRepeats && self_.world_size > 1; ++i)
      line_.push_back(1e9 * line_round_trip_s(words[0], self_.rank, kLaps));
    hop(words + 1);
  }
  double line_ns() const { return line_.empty() ? 0 : median_of(line_); }
  double hop_ns() const { return median_of(hop_); }

 private:
  /// All ranks on rank 0's CPU: on CPUs of their own the word would have changed before a rank could sleep.
  void hop(Word* words) {
    auto& cpu = words[self_.world_size].value;
    if (self_.rank == 0) cpu.store(static_cast<std::uint32_t>(::sched_getcpu()));
    self_.comm->barrier(kBlocking);
    cpu_set_t before, one;
    ::sched_getaffinity(0, sizeof(before), &before);
    CPU_ZERO(&one);
    CPU_SET(cpu.load(), &one);
    ::sched_setaffinity(0, sizeof(one), &one);
    for (int i = 0; i < kRepeats; ++i)
      hop_.push_back(1e9 * futex_hop_s(words, self_.rank, self_.world_size, kLaps, hops_done_));
    ::sched_setaffinity(0, sizeof(before), &before);
  }

  Rank& self_;
  std::shared_ptr<SymmetricBuffer> shared_;  // the line, then a word for each rank, then a CPU's number
  std::uint32_t hops_done_ = 0;
  std::vector<double> line_, hop_;
};

struct Shown {
  Rank& self;
  JsonLines& lines;
  double line_ns, hop_ns;

  void row(const std::string& what, std::size_t nbytes, const std::string& variant, const Percentiles& ns,
           double mpi_p50) const {
    if (self.rank != 0) return;
    const std::string factor = mpi_p50 > 0 && variant != "mpi" ? std::to_string(mpi_p50 / ns.p50).substr(0, 5) : "-";
    std::printf("  %-10s %8zu  %-10s %10.0f %10.0f %10.0f | %8.0f %8.2f | %8.0f | %6s\n", what.c_str(), nbytes,
                variant.c_str(), ns.p50, ns.p95, ns.p99, line_ns, line_ns > 0 ? ns.p50 / line_ns : 0.0, hop_ns,
                factor.c_str());
    std::fflush(stdout);
    lines.write({{"kind", quoted("latency")},
                 {"api", quoted("c++")},
                 {"op", quoted(what)},
                 {"world_size", std::to_string(self.world_size)},
                 {"nbytes", std::to_string(nbytes)},
                 {"variant", quoted(variant)},
                 {"p50_ns", std::to_string(ns.p50)},
                 {"p95_ns", std::to_string(ns.p95)},
                 {"p99_ns", std::to_string(ns.p99)},
                 {"mpi_p50_ns", std::to_string(mpi_p50)},
                 {"line_round_trip_ns", std::to_string(line_ns)},
                 {"futex_hop_ns", std::to_string(hop_ns)}});
  }
};

void measure(const Options& options, Rank& self, Gather& gather, JsonLines& lines, const std::string& what,
             std::size_t nbytes, std::vector<Variant> variants) {
  const int calls = std::max(1, options.calls / options.rounds);
  Floor floor(self);
  for (Variant& variant : variants) {
    self.comm->barrier(kBlocking);
    for (int i = 0; i < options.warmup; ++i) variant.call();
    variant.ns.reserve(static_cast<std::size_t>(calls * options.rounds));
  }
  for (int round = 0; round < options.rounds; ++round) {
    for (Variant& variant : variants) run_round(self, variant, calls);
    floor.run_round();
  }
  std::vector<Percentiles> results;
  double mpi_p50 = 0;
  for (Variant& variant : variants) {
    results.push_back(gather.slowest(percentiles_of(variant.ns)));
    if (variant.name == "mpi") mpi_p50 = results.back().p50;
  }
  const Shown shown{self, lines, gather.slowest(floor.line_ns()), gather.slowest(floor.hop_ns())};
  for (std::size_t i = 0; i < variants.size(); ++i) shown.row(what, nbytes, variants[i].name, results[i], mpi_p50);
}

}  // namespace

int latency(const Options& options, Rank& self) {
  Gather gather(self);
  JsonLines lines(options, self.rank);
  if (self.rank == 0) {
    std::printf("# C++ API, %d ranks%s, peer: %s; p50, p95, p99 of single blocking calls, slowest rank\n",
                self.world_size, options.pin ? ", pinned" : "", self.mpi ? self.mpi->version().c_str() : "none");
    std::printf(
        "# line: cache-line round trip of ranks 0 and 1; hop: futex wake and switch to the next rank, all on one "
        "CPU\n");
    std::printf("# %-10s %8s  %-10s %10s %10s %10s | %8s %8s | %8s | %6s\n", "operation", "size (B)", "variant",
                "p50 (ns)", "p95 (ns)", "p99 (ns)", "line(ns)", "p50/line", "hop (ns)", "x mpi");
  }
  double wrong = 0;
  for (std::size_t nbytes = options.min_nbytes; nbytes <= options.max_nbytes;
       nbytes = static_cast<std::size_t>(static_cast<double>(nbytes) * options.factor)) {
    Sized sized(self, nbytes);
    wrong += sized.wrong();
    measure(options, self, gather, lines, "all_reduce", sized.nbytes(), sized.variants());
  }
  std::vector<Variant> barriers;
  barriers.push_back({"zcomm", [&self] { self.comm->barrier(kBlocking); }, {}});
  if (self.mpi) barriers.push_back({"mpi", [&self] { self.mpi->barrier(); }, {}});
  measure(options, self, gather, lines, "barrier", 0, std::move(barriers));
  wrong = gather.slowest(wrong);
  if (self.rank == 0) std::printf("# #wrong: %.0f\n", wrong);
  return wrong == 0 ? 0 : 1;
}

}  // namespace zcomm::bench
