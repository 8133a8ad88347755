// See reduce.hpp.
#include "coll/tcp/reduce.hpp"

#include <algorithm>
#include <cstring>

#include "device/kernels.hpp"

namespace zcomm::coll {
namespace {

constexpr std::size_t kBlock = 4096;  // elements converted at once; fits the first-level cache

void reduce(void* to, std::initializer_list<const void*> from, std::size_t count, DType in, DType out, ReduceOp op,
            bool accumulate = false) {
  void* const targets[] = {to};
  device::reduce({.dst = targets,
                  .src = {from.begin(), from.size()},
                  .count = count,
                  .in = in,
                  .out = out,
                  .op = op,
                  .accumulate = accumulate,
                  .stores = device::Stores::cached});
}

template <class T>
void divide(std::byte* data, std::size_t count, int by) {
  auto* values = reinterpret_cast<T*>(data);
  const T divisor = static_cast<T>(by);
  for (std::size_t i = 0; i < count; ++i) values[i] /= divisor;
}

}  // namespace

TcpReduce::TcpReduce(const Signature& signature, int world_size)
    : dtype_(signature.dtype),
      out_dtype_(signature.out_dtype),
      partial_(signature.dtype),
      op_(signature.op),
      accumulate_(signature.accumulate),
      world_size_(world_size) {
  const bool exact = op_ == ReduceOp::min || op_ == ReduceOp::max;
  if ((dtype_ == DType::float16 || dtype_ == DType::bfloat16) && !exact) partial_ = DType::float32;
}

void TcpReduce::add(std::byte* to, const std::byte* from, const std::byte* own, std::size_t count) {
  const ReduceOp op = op_ == ReduceOp::avg ? ReduceOp::sum : op_;
  if (!widens()) return reduce(to, {from, own}, count, dtype_, dtype_, op);
  if (op == ReduceOp::sum && to == from) return reduce(to, {own}, count, dtype_, partial_, op, true);
  const std::size_t size = size_of(dtype_);
  scratch_.resize(kBlock * sizeof(float));
  for (std::size_t i = 0; i < count; i += kBlock) {
    const std::size_t n = std::min(kBlock, count - i);
    device::cast(scratch_.data(), partial_, own + i * size, dtype_, n);
    reduce(to + i * sizeof(float), {from + i * sizeof(float), scratch_.data()}, n, partial_, partial_, op);
  }
}

void TcpReduce::add_first(std::byte* to, const std::byte* from, const std::byte* own, std::size_t count) {
  reduce(to, {from, own}, count, dtype_, partial_, op_ == ReduceOp::avg ? ReduceOp::sum : op_);
}

void TcpReduce::combine(std::byte* to, const std::byte* from, const std::byte* other, std::size_t count) const {
  reduce(to, {from, other}, count, partial_, partial_, op_ == ReduceOp::avg ? ReduceOp::sum : op_);
}

void TcpReduce::widen(std::byte* to, const std::byte* from, std::size_t count) const {
  if (count == 0) return;  // pointers may be null
  if (widens())
    device::cast(to, partial_, from, dtype_, count);
  else
    std::memcpy(to, from, count * size_of(dtype_));
}

void TcpReduce::finish(std::byte* out, std::byte* from, std::size_t count) {
  if (count == 0) return;
  if (op_ == ReduceOp::avg && world_size_ > 1) {
    if (partial_ == DType::float64)
      divide<double>(from, count, world_size_);
    else
      divide<float>(from, count, world_size_);  // f16 and bf16 are averaged as f32 too
  }
  const std::size_t size = size_of(out_dtype_);
  if (out_dtype_ == partial_) {
    if (accumulate_)
      reduce(out, {from}, count, out_dtype_, out_dtype_, ReduceOp::sum, true);
    else
      std::memcpy(out, from, count * size);
  } else if (partial_ == dtype_) {  // minimum or maximum of 2-byte floats, wanted as f32
    reduce(out, {from}, count, dtype_, out_dtype_, op_, accumulate_);
  } else if (!accumulate_) {
    device::cast(out, out_dtype_, from, partial_, count);
  } else {
    scratch_.resize(kBlock * sizeof(float));
    for (std::size_t i = 0; i < count; i += kBlock) {
      const std::size_t n = std::min(kBlock, count - i);
      device::cast(scratch_.data(), out_dtype_, from + i * size_of(partial_), partial_, n);
      reduce(out + i * size, {scratch_.data()}, n, out_dtype_, out_dtype_, ReduceOp::sum, true);
    }
  }
}

void TcpReduce::all(std::byte* out, std::span<const void* const> from, std::size_t count) const {
  void* const targets[] = {out};
  device::reduce({.dst = targets,
                  .src = from,
                  .count = count,
                  .in = dtype_,
                  .out = out_dtype_,
                  .op = op_,
                  .accumulate = accumulate_});
}

}  // namespace zcomm::coll
