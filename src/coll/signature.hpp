// Signature: the identity of one operation, which ranks compare before bytes move (decision D5).
//
// A plain block of bytes in shared memory: written by its rank before it enters the operation, read by others only to
// say what differs. What they compare is `identity`, a hash of all but where buffers lie (`place_in`, `place_out`,
// which only choose the path), where the program called from, and how the name was cut.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "zcomm/dtype.hpp"

namespace zcomm::coll {

enum class OpKind : std::uint8_t {
  all_reduce,
  reduce,
  reduce_scatter,
  all_gather,
  broadcast,
  gather,
  scatter,
  all_to_all,
  barrier,
  allocate,
  allocate_shared,
  duplicate
};
const char* name_of(OpKind kind);
constexpr bool moves_data(OpKind kind) { return kind < OpKind::barrier; }
constexpr bool reduces(OpKind kind) { return kind <= OpKind::reduce_scatter; }
/// Inputs are outputs.
constexpr bool in_place(OpKind kind) {
  return kind == OpKind::all_reduce || kind == OpKind::reduce || kind == OpKind::broadcast;
}
constexpr bool has_root(OpKind kind) {
  return kind == OpKind::reduce || kind == OpKind::broadcast || kind == OpKind::gather || kind == OpKind::scatter;
}

struct Signature {
  static constexpr std::size_t kShownCounts = 4;

  OpKind kind = OpKind::barrier;
  DType dtype = DType::uint8, out_dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  bool accumulate = false;
  std::int32_t root = -1;
  std::uint32_t sequence = 0;
  std::uint32_t buffers = 0;                  ///< length of the list
  std::uint64_t count = 0;                    ///< elements in all; bytes for allocate
  std::uint64_t counts[kShownCounts] = {};    ///< of the first buffers, for messages; all_to_all: set_splits
  std::uint64_t counts_hash = 0;              ///< of all
  std::uint64_t name_hash = 0;                ///< of the whole name
  std::uint64_t identity = 0;                 ///< of all above; 64 bits: chance equality is not a concern
  std::uint64_t place_in = 0, place_out = 0;  ///< hash of (allocation, offset) of all buffers; 0: some are private
  char name[48] = {};                         ///< cut to fit
  char site[48] = {};                         ///< where it was called; not compared
};

/// False only in the bench build (ZCOMM_BENCH), where bench/cpp/guard.cpp times calls that compare nothing.
#ifdef ZCOMM_BENCH
extern bool guard_enabled;
#else
inline constexpr bool guard_enabled = true;
#endif

/// Copies what is not empty.
void copy_signature(Signature& to, const Signature& from);

/// Order-dependent mixing of `value` into `hash`.
std::uint64_t mix(std::uint64_t hash, std::uint64_t value);

void set_name(Signature& signature, const char* name, const char* site);

/// Sets `identity` from everything that ranks must agree on but the sequence number, by which they meet.
void seal(Signature& signature);

/// Whether both describe the same operation.
bool same_operation(const Signature& a, const Signature& b);

/// "all_reduce float32 sum count=1024 'grad.3'".
std::string describe(const Signature& signature);

/// Throws CollectiveMismatch, the same on every rank, unless all signatures agree. names: what the message calls the
/// ranks.
void require_same(int world_size, const std::function<const Signature&(int rank)>& signature_of,
                  std::span<const int> names = {});

}  // namespace zcomm::coll
