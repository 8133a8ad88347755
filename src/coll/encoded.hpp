// Collectives with a codec: encode, move bytes by the engine's own all_to_all and all_gather, decode.
//
// [Note: encoded collectives] P ranks; E(n): bytes of n encoded elements (zcomm/codec.hpp), of all tensors of the list
// one behind the other:
//   reduce_scatter   each rank encodes P parts, sends P - 1, and adds the P parts of its own in rank order, in fp32:
//                    (P-1) E(n) sent per rank, n elements per part
//   all_gather       each rank encodes its shard, all decode all, also their own: equal bits on all ranks; (P-1) E(n)
//   all_reduce       reduce_scatter of parts (all_reduce_part) into fp32 sums, which their ranks encode once more with
//                    errors of their own (the server's), then all_gather: 2 (P-1) E(n/P)
// The rank's own part takes the same way but for the movement, so a single rank has decode(encode(x)) as well. A call
// is one operation in call order, of one or two movements; both carry the codec and the whole call in their signature
// (WholeCall), so ranks that disagree find out before bytes move. Source: ZeRO++ 2306.10209, 1-bit Adam 2102.02888.
// Invariants: memory grows to the largest call and is kept. Thread rule: as Engine::run; nbytes() from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "coll/operation.hpp"
#include "device/codec.hpp"

namespace zcomm::coll {

class Engine;

/// Memory at a multiple of kEncodedAlign, kept for the next call.
class EncodedRoom {
 public:
  /// Its content is lost if it grows.
  std::byte* at_least(std::size_t nbytes);
  void release();
  std::size_t nbytes() const { return nbytes_.load(std::memory_order_relaxed); }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  std::atomic<std::size_t> nbytes_{0};
};

/// A tensor of `count` elements in parts of `step`, one for each rank; the last ones may have fewer elements or none.
struct EncodedTensor {
  const std::byte* in;  ///< scatter: the tensor; gather: this rank's part
  std::byte* out;       ///< scatter: this rank's part; gather: the tensor
  std::size_t count, step;
  std::byte* error = nullptr;          ///< of `in`; see error_count
  const std::uint8_t* mask = nullptr;  ///< of the tensor; then `step` is a multiple of 8

  std::size_t begin(int part) const { return std::min(static_cast<std::size_t>(part) * step, count); }
  std::size_t part_count(int part) const { return begin(part + 1) - begin(part); }
  const std::uint8_t* mask_of(int part) const { return mask == nullptr ? nullptr : mask + begin(part) / 8; }
};

/// The options of a call, for all of its tensors.
struct EncodedCall {
  Codec codec;
  DType dtype, out_dtype;
  float keep = 0.0f;
  DType error_dtype = DType::float32;
  std::uint64_t seed = 0;
  float divide_by = 1.0f;    ///< scatter
  bool accumulate = false;   ///< scatter
  bool differences = false;  ///< gather
};

/// divide_by: of an average.
EncodedCall call_of(const Operation& operation, int divide_by, std::uint64_t seed);

/// The steps before and after bytes move, among `ranks` ranks; the caller moves them in between.
class EncodedParts {
 public:
  using Tensors = std::span<const EncodedTensor>;

  /// Encodes all parts of `in`; returns an all_to_all of bytes. The own part is not in it.
  std::span<const Item> scatter(const EncodedCall& call, Tensors tensors, int rank, int ranks);
  /// Adds the received parts into `out`.
  void add(const EncodedCall& call, Tensors tensors, int rank, int ranks);

  /// Encodes the own part; returns an all_gather of bytes, of one item.
  std::span<const Item> gather(const EncodedCall& call, Tensors tensors, int rank, int ranks);
  /// Decodes all parts into `out`.
  void fill(const EncodedCall& call, Tensors tensors, int rank, int ranks);

  void release() { sent_.release(), received_.release(), gathered_.release(); }
  std::size_t nbytes() const { return sent_.nbytes() + received_.nbytes() + gathered_.nbytes(); }

 private:
  EncodedRoom sent_, received_, gathered_;
  std::vector<Item> items_;
  std::vector<const std::byte*> sources_;
};

/// The calls with a codec of one communicator, on any engine.
class EncodedCalls {
 public:
  explicit EncodedCalls(Engine& engine) : engine_(engine) {}

  /// An error of its own ends the engine, so that the other ranks are told.
  void run(const Operation& operation);
  void release() { parts_.release(), sums_.release(); }
  std::size_t nbytes() const { return parts_.nbytes() + sums_.nbytes(); }

 private:
  void start(const Operation& operation);
  void take_tensors(const Operation& operation);
  void reduce_scatter(const Operation& operation);
  void all_gather(const Operation& operation);
  void all_reduce(const Operation& operation);
  void move(const Operation& whole, OpKind kind, std::span<const Item> items);

  Engine& engine_;
  int rank_ = 0, world_size_ = 1;
  std::uint64_t calls_ = 0;
  std::uint8_t step_ = 0;
  bool is_moving_ = false;
  EncodedCall call_{};
  std::vector<EncodedTensor> tensors_;
  EncodedParts parts_;
  EncodedRoom sums_;
  Operation part_{};
  SpareItems spares_;
};

}  // namespace zcomm::coll
