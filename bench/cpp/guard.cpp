// The guard's cost (bench/cpp/latency.hpp; decision D5).
//
// Pieces: the work of a call that exists only because ranks compare their calls: hash the name and seal the signature,
// publish the signature, compare P identities. All data are in the cache, as in a loop of calls; the peers' identities
// share the line of their arrival, which a rank reads anyway, so they cost no further miss. Whole: the same blocking
// all_reduce with the guard switched on and off, in turn. The switch, coll::guard_enabled, is a constant in all other
// builds.
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "coll/signature.hpp"
#include "latency.hpp"
#include "report.hpp"

namespace zcomm::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr int kRounds = 15, kCalls = 20'000;

/// Hides a value's origin from the optimiser, so that loops are neither hoisted nor dropped.
template <class T>
void touch(T& value) {
  asm volatile("" : "+m"(value) : : "memory");
}

struct Piece {
  const char* name;
  void (*call)(coll::Signature& own, coll::Signature* shared, int world_size);
  std::vector<double> ns;
};

void identify(coll::Signature& own, coll::Signature*, int) {
  set_name(own, "grad.3", "train.py:42");
  seal(own);
}
void leave(coll::Signature& own, coll::Signature* shared, int) { copy_signature(shared[0], own); }
void compare(coll::Signature&, coll::Signature* shared, int world_size) {
  bool same = true;
  for (int q = 1; q < world_size; ++q) same &= same_operation(shared[0], shared[q]);
  touch(same);
}
void nothing(coll::Signature&, coll::Signature*, int) {}

double time_ns(const Piece& piece, coll::Signature& own, std::vector<coll::Signature>& shared) {
  const auto begin = Clock::now();
  for (int i = 0; i < kCalls; ++i) {
    touch(own);
    piece.call(own, shared.data(), static_cast<int>(shared.size()));
    touch(shared.front());
  }
  return std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / kCalls;
}

void pieces(JsonLines& lines, int world_size) {
  coll::Signature own;
  own.kind = coll::OpKind::all_reduce, own.dtype = own.out_dtype = DType::float32, own.buffers = 1, own.count = 256;
  std::vector<coll::Signature> shared(static_cast<std::size_t>(world_size), own);
  std::vector<Piece> all{{"loop", nothing, {}},
                         {"name and identity", identify, {}},
                         {"leave the header", leave, {}},
                         {"compare", compare, {}}};
  for (int round = 0; round < kRounds; ++round)
    for (Piece& piece : all) piece.ns.push_back(time_ns(piece, own, shared));
  const double loop = median_of(all[0].ns);
  double sum = 0;
  for (std::size_t i = 1; i < all.size(); ++i) {
    const double ns = median_of(all[i].ns) - loop;
    sum += ns;
    std::printf("  %2d ranks  %-20s %7.1f ns\n", world_size, all[i].name, ns);
  }
  std::printf("  %2d ranks  %-20s %7.1f ns per call\n", world_size, "guard, pieces", sum);
  lines.write({{"kind", quoted("guard")},
               {"how", quoted("pieces")},
               {"world_size", std::to_string(world_size)},
               {"ns", std::to_string(sum)}});
}

/// Median ns per call of 8-byte all_reduce with the guard on and off; the difference of each round, in turn.
void whole(const Options& options, Rank& self, JsonLines& lines) {
  auto memory = self.comm->allocate(8);
  const Buffer buffer{memory->data(), 2};
  const int calls = std::max(100, options.calls / options.rounds);
  std::vector<double> on, difference;
  Gather gather(self);
  for (int round = 0; round < 2 * options.rounds; ++round) {
    double ns[2];
    for (int half = 0; half < 2; ++half) {
      const bool enabled = (half == 0) == (round % 2 == 0);  // each goes first every other round
      self.comm->barrier(kBlocking);
      coll::guard_enabled = enabled;
      const auto begin = Clock::now();
      for (int i = 0; i < calls; ++i) self.comm->all_reduce({&buffer, 1}, DType::float32, ReduceOp::sum, kBlocking);
      const double mine = std::chrono::duration<double, std::nano>(Clock::now() - begin).count() / calls;
      coll::guard_enabled = true;
      ns[enabled ? 1 : 0] = gather.slowest(mine);
    }
    on.push_back(ns[1]);
    difference.push_back(ns[1] - ns[0]);
  }
  if (self.rank != 0) return;
  std::printf("  %2d ranks  whole call %.0f ns with the guard, %+.1f ns of it the guard's (median of %zu pairs)\n",
              self.world_size, median_of(on), median_of(difference), difference.size());
  lines.write({{"kind", quoted("guard")},
               {"how", quoted("whole")},
               {"world_size", std::to_string(self.world_size)},
               {"call_ns", std::to_string(median_of(on))},
               {"ns", std::to_string(median_of(difference))}});
}

}  // namespace

int guard(const Options& options, Rank& self) {
  JsonLines lines(options, self.rank);
  if (self.rank == 0) {
    std::printf("# guard: what comparing operations costs per call; Header of %zu bytes\n", sizeof(coll::Signature));
    for (const int world_size : {2, 4, 8}) pieces(lines, world_size);
    std::fflush(stdout);
  }
  self.comm->barrier(kBlocking);
  whole(options, self, lines);
  return 0;
}

}  // namespace zcomm::bench
