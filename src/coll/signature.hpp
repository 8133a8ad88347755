// Signature: the identity of one operation, which ranks compare before bytes move (decision D5).
//
// A plain block of bytes in shared memory: written by its rank before it enters the operation, read by others only to
// report a difference. They compare `identity`, a hash of all fields except the buffers' offsets (`place_in`,
// `place_out`, which only choose the path), the call site, and the cut name.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "zcomm/codec.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {
struct Coding;
}

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
  duplicate,
  send,  // messages are no collectives: these two name them in errors
  recv
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

/// The call with a codec that an operation is a movement of.
struct WholeCall {
  static constexpr std::size_t kShownCounts = 4;

  OpKind kind = OpKind::barrier;
  DType dtype = DType::uint8, out_dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  bool accumulate = false;
  std::uint8_t step = 0;  ///< 1, 2, ...: the operation's number within its call; 0: it is no part
  std::uint32_t buffers = 0;
  std::uint64_t count = 0, counts_hash = 0, counts[kShownCounts] = {};
};

struct Signature {
  static constexpr std::size_t kShownCounts = WholeCall::kShownCounts;

  OpKind kind = OpKind::barrier;
  DType dtype = DType::uint8, out_dtype = DType::uint8;
  ReduceOp op = ReduceOp::sum;
  bool accumulate = false;
  ReduceOrder order = ReduceOrder::any;
  std::int32_t root = -1;
  std::uint32_t sequence = 0;
  std::uint32_t buffers = 0;                  ///< length of the list
  std::uint32_t coding = 0;                   ///< see coding_word; 0: elements travel as they are
  std::uint64_t count = 0;                    ///< elements in all; bytes for allocate
  std::uint64_t counts[kShownCounts] = {};    ///< of the first buffers, for messages; all_to_all: set_splits
  std::uint64_t counts_hash = 0;              ///< of all
  std::uint64_t name_hash = 0;                ///< of the whole name
  std::uint64_t identity = 0;                 ///< of all above; 64 bits: chance equality is not a concern
  std::uint64_t place_in = 0, place_out = 0;  ///< hash of (allocation, offset) of all buffers; 0: some are private
  WholeCall whole{};                          ///< with a coding, if the operation is a part
  char name[48] = {};                         ///< cut to fit
  char site[48] = {};                         ///< call site; not compared
};

/// False only in the bench build (ZCOMM_BENCH): bench/cpp/guard.cpp times calls without the comparison.
#ifdef ZCOMM_BENCH
extern bool guard_enabled;
#else
inline constexpr bool guard_enabled = true;
#endif

/// Copies all non-empty fields.
void copy_signature(Signature& to, const Signature& from);

/// A codec, `differences` and the presence of masks in one number, which is not 0.
std::uint32_t coding_word(const Coding& coding);
Codec codec_of_word(std::uint32_t coding);

/// Order-dependent mixing of `value` into `hash`.
std::uint64_t mix(std::uint64_t hash, std::uint64_t value);

void set_name(Signature& signature, const char* name, const char* site);

/// Sets `identity` from all fields that ranks must agree on. The sequence number is excluded, because ranks meet by it.
void seal(Signature& signature);

/// Whether both describe the same operation.
bool same_operation(const Signature& a, const Signature& b);

/// "all_reduce float32 sum count=1024 'grad.3'".
std::string describe(const Signature& signature);

/// Throws CollectiveMismatch, the same on every rank, unless all signatures agree. names: the ranks' numbers in the
/// message.
void require_same(int world_size, const std::function<const Signature&(int rank)>& signature_of,
                  std::span<const int> names = {});

}  // namespace zcomm::coll
