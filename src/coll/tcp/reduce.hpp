// Arithmetic of distributed reductions: 2-byte floats are summed in fp32 and rounded once, averages divided once.
//
// Thread rule: pure functions.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "coll/signature.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::coll {

/// How one operation reduces.
class TcpReduce {
 public:
  TcpReduce() = default;
  explicit TcpReduce(const Signature& signature, int world_size);

  DType dtype() const { return dtype_; }
  DType out_dtype() const { return out_dtype_; }
  /// The dtype of partial results. Minimum and maximum of 2-byte floats need no wider one.
  DType partial() const { return partial_; }
  bool widens() const { return partial_ != dtype_; }

  /// to (partial) = from (partial) op own (dtype); `to` may be `from`.
  void add(std::byte* to, const std::byte* from, const std::byte* own, std::size_t count);
  /// to (partial) = from (dtype) op own (dtype).
  void add_first(std::byte* to, const std::byte* from, const std::byte* own, std::size_t count);
  /// to (partial) = from (partial) op other (partial).
  void combine(std::byte* to, const std::byte* from, const std::byte* other, std::size_t count) const;
  /// to (partial) = from (dtype).
  void widen(std::byte* to, const std::byte* from, std::size_t count) const;
  /// out (out_dtype) (+)= the result of `from` (partial); may change `from`.
  void finish(std::byte* out, std::byte* from, std::size_t count);
  /// All at once, in the order of `from` (dtype each): out (out_dtype) (+)= result.
  void all(std::byte* out, std::span<const void* const> from, std::size_t count) const;

 private:
  DType dtype_ = DType::uint8, out_dtype_ = DType::uint8, partial_ = DType::uint8;
  ReduceOp op_ = ReduceOp::sum;
  bool accumulate_ = false;
  int world_size_ = 1;
  std::vector<std::byte> scratch_;
};

}  // namespace zcomm::coll
