// See encoded.hpp.
#include "coll/encoded.hpp"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/error.hpp"
#include "coll/engine.hpp"

namespace zcomm {

TensorPart all_reduce_part(std::size_t count, int rank, int world_size) {
  constexpr std::size_t kStep = kCodecBlock;  // so that no part cuts a block
  const auto ranks = static_cast<std::size_t>(world_size), index = static_cast<std::size_t>(rank);
  const std::size_t step = ((count + ranks - 1) / ranks + kStep - 1) / kStep * kStep;
  const std::size_t begin = std::min(index * step, count);
  return {begin, std::min(begin + step, count) - begin};
}

std::size_t error_count(DType error_dtype, std::size_t count, std::size_t step) {
  if (error_dtype != DType::int8 || count == 0) return count;
  return count / step * encoded_nbytes(Codec{}, step) + encoded_nbytes(Codec{}, count % step);
}

namespace coll {
namespace {

std::size_t encoded_part_nbytes(const Codec& codec, EncodedParts::Tensors tensors, int part) {
  std::size_t nbytes = 0;
  for (const EncodedTensor& tensor : tensors) nbytes += encoded_nbytes(codec, tensor.part_count(part));
  return nbytes;
}

/// A multiple of the codec's block lies between the numbers of two parts, so each has chances of its own.
std::uint64_t seed_of(const EncodedCall& call, int rank, std::size_t tensor, int part) {
  return mix(mix(call.seed, static_cast<std::uint64_t>(rank)), tensor << 32 | static_cast<std::uint64_t>(part));
}

/// The error of a part that has elements; null: there is none.
std::byte* error_of(const EncodedCall& call, const EncodedTensor& tensor, int part) {
  if (tensor.error == nullptr || tensor.part_count(part) == 0) return nullptr;
  const auto whole = static_cast<std::size_t>(part);  // the parts before it are complete
  return call.error_dtype == DType::int8 ? tensor.error + whole * encoded_nbytes(Codec{}, tensor.step)
                                         : tensor.error + tensor.begin(part) * size_of(call.error_dtype);
}

/// visit(tensor, its number, offset of its encoded part), for all tensors.
template <class Visit>
void each(const Codec& codec, EncodedParts::Tensors tensors, int part, const Visit& visit) {
  std::size_t at = 0;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    visit(tensors[i], i, at);
    at += encoded_nbytes(codec, tensors[i].part_count(part));
  }
}

}  // namespace

std::byte* EncodedRoom::at_least(std::size_t nbytes) {
  if (!data_ || nbytes > this->nbytes()) {
    release();
    const std::size_t room = std::max(nbytes, kEncodedAlign);
    data_.reset(static_cast<std::byte*>(::operator new(room, std::align_val_t(kEncodedAlign))));
    nbytes_ = room;
  }
  return data_.get();
}

void EncodedRoom::release() {
  data_.reset();
  nbytes_ = 0;
}

void EncodedRoom::Free::operator()(std::byte* data) const { ::operator delete(data, std::align_val_t(kEncodedAlign)); }

std::span<const Item> EncodedParts::scatter(const EncodedCall& call, Tensors tensors, int rank, int ranks) {
  std::size_t sent = 0;
  for (int q = 0; q < ranks; ++q) sent += encoded_part_nbytes(call.codec, tensors, q);
  const std::size_t own = encoded_part_nbytes(call.codec, tensors, rank);
  std::byte* out = sent_.at_least(sent);
  std::byte* in = received_.at_least(own * static_cast<std::size_t>(ranks));
  items_.clear();
  const std::size_t size = size_of(call.dtype);
  for (int q = 0; q < ranks; ++q) {
    each(call.codec, tensors, q, [&](const EncodedTensor& tensor, std::size_t i, std::size_t at) {
      const std::size_t begin = tensor.begin(q);
      device::encode_in_parts(call.codec, {.out = out + at,
                                           .in = tensor.in + begin * size,
                                           .dtype = call.dtype,
                                           .count = tensor.part_count(q),
                                           .error = error_of(call, tensor, q),
                                           .error_dtype = call.error_dtype,
                                           .keep = call.keep,
                                           .mask = tensor.mask_of(q),
                                           .seed = seed_of(call, rank, i, q)});
    });
    const std::size_t nbytes = encoded_part_nbytes(call.codec, tensors, q);
    Item item{.in = out, .out = in};
    if (q != rank) item.count = nbytes, item.out_count = own;
    items_.push_back(item);
    out += nbytes, in += own;
  }
  return items_;
}

void EncodedParts::add(const EncodedCall& call, Tensors tensors, int rank, int ranks) {
  const auto own = static_cast<std::size_t>(rank);
  each(call.codec, tensors, rank, [&](const EncodedTensor& tensor, std::size_t, std::size_t at) {
    sources_.clear();
    for (std::size_t r = 0; r < static_cast<std::size_t>(ranks); ++r)
      sources_.push_back((r == own ? items_[r].in : items_[r].out) + at);
    device::decode_sum_in_parts(call.codec, {.out = tensor.out,
                                             .in = sources_,
                                             .count = tensor.part_count(rank),
                                             .dtype = call.out_dtype,
                                             .accumulate = call.accumulate,
                                             .divide_by = call.divide_by,
                                             .mask = tensor.mask_of(rank)});
  });
}

/// Rank 0 has the largest part of each tensor; shorter ones are filled up with zeros.
std::span<const Item> EncodedParts::gather(const EncodedCall& call, Tensors tensors, int rank, int ranks) {
  const std::size_t slot = encoded_part_nbytes(call.codec, tensors, 0),
                    own = encoded_part_nbytes(call.codec, tensors, rank);
  std::byte* const all = gathered_.at_least(slot * static_cast<std::size_t>(ranks));
  std::byte* const mine = all + slot * static_cast<std::size_t>(rank);
  each(call.codec, tensors, rank, [&](const EncodedTensor& tensor, std::size_t i, std::size_t at) {
    std::byte* const base = tensor.out + tensor.begin(rank) * size_of(call.out_dtype);
    device::encode_in_parts(call.codec, {.out = mine + at,
                                         .in = tensor.in,
                                         .dtype = call.dtype,
                                         .count = tensor.part_count(rank),
                                         .error = tensor.error,
                                         .error_dtype = call.error_dtype,
                                         .keep = call.keep,
                                         .base = call.differences ? base : nullptr,
                                         .base_dtype = call.out_dtype,
                                         .mask = tensor.mask_of(rank),
                                         .seed = seed_of(call, rank, i, ranks)});
  });
  std::memset(mine + own, 0, slot - own);
  items_.assign(1, {.in = mine, .out = all, .count = slot, .out_count = slot * static_cast<std::size_t>(ranks)});
  return items_;
}

void EncodedParts::fill(const EncodedCall& call, Tensors tensors, int rank, int ranks) {
  const std::size_t slot = items_[0].count, size = size_of(call.out_dtype);
  for (int q = 0; q < ranks; ++q) {
    if (call.differences && q == rank) continue;  // encode() has updated the base
    const std::byte* const from = items_[0].out + static_cast<std::size_t>(q) * slot;
    each(call.codec, tensors, q, [&](const EncodedTensor& tensor, std::size_t, std::size_t at) {
      const std::byte* const source = from + at;
      device::decode_sum_in_parts(call.codec, {.out = tensor.out + tensor.begin(q) * size,
                                               .in = {&source, 1},
                                               .count = tensor.part_count(q),
                                               .dtype = call.out_dtype,
                                               .accumulate = call.differences,
                                               .mask = tensor.mask_of(q)});
    });
  }
}

void EncodedCalls::run(const Operation& operation) {
  is_moving_ = false;
  try {
    start(operation);
    switch (operation.signature.kind) {
      case OpKind::reduce_scatter:
        return reduce_scatter(operation);
      case OpKind::all_gather:
        return all_gather(operation);
      default:
        return all_reduce(operation);
    }
  } catch (...) {
    if (!is_moving_) engine_.close();  // an engine's own failure is known to the other ranks
    throw;
  }
}

void EncodedCalls::start(const Operation& operation) {
  rank_ = engine_.rank(), world_size_ = engine_.world_size();
  step_ = 0;
  call_ = call_of(operation, world_size_, ++calls_);
  tensors_.clear();
}

/// The tensors of a call in which each rank has one of equal parts.
void EncodedCalls::take_tensors(const Operation& operation) {
  const std::span<const Item> items = operation.items.all();
  for (std::size_t i = 0; i < items.size(); ++i)
    tensors_.push_back({.in = items[i].in,
                        .out = items[i].out,
                        .count = items[i].count * static_cast<std::size_t>(world_size_),
                        .step = items[i].count,
                        .error = operation.coding.items[i].error});
}

void EncodedCalls::reduce_scatter(const Operation& operation) {
  take_tensors(operation);
  move(operation, OpKind::all_to_all, parts_.scatter(call_, tensors_, rank_, world_size_));
  parts_.add(call_, tensors_, rank_, world_size_);
}

void EncodedCalls::all_gather(const Operation& operation) {
  take_tensors(operation);
  move(operation, OpKind::all_gather, parts_.gather(call_, tensors_, rank_, world_size_));
  parts_.fill(call_, tensors_, rank_, world_size_);
}

void EncodedCalls::all_reduce(const Operation& operation) {
  const std::span<const Item> items = operation.items.all();
  const DType dtype = call_.dtype;
  std::size_t own = 0;
  for (const Item& item : items) own += all_reduce_part(item.count, rank_, world_size_).count;
  std::byte* const sums = sums_.at_least(own * sizeof(float));
  std::size_t at = 0;
  for (std::size_t i = 0; i < items.size(); ++i) {
    tensors_.push_back({.in = items[i].in,
                        .out = sums + at * sizeof(float),
                        .count = items[i].count,
                        .step = all_reduce_part(items[i].count, 0, world_size_).count,
                        .error = operation.coding.items[i].error,
                        .mask = operation.coding.items[i].mask});
    at += all_reduce_part(items[i].count, rank_, world_size_).count;
  }
  call_.out_dtype = DType::float32;
  move(operation, OpKind::all_to_all, parts_.scatter(call_, tensors_, rank_, world_size_));
  parts_.add(call_, tensors_, rank_, world_size_);

  for (std::size_t i = 0; i < items.size(); ++i) {
    EncodedTensor& tensor = tensors_[i];
    tensor.in = tensor.out, tensor.out = items[i].out;
    tensor.error = operation.coding.items[i].server_error;
  }
  call_.dtype = DType::float32, call_.out_dtype = dtype;
  move(operation, OpKind::all_gather, parts_.gather(call_, tensors_, rank_, world_size_));
  parts_.fill(call_, tensors_, rank_, world_size_);
}

/// One movement of bytes by the engine. Its signature names the whole call.
void EncodedCalls::move(const Operation& whole, OpKind kind, std::span<const Item> items) {
  const Signature& given = whole.signature;
  Signature& signature = part_.signature;
  signature = Signature{};
  signature.kind = kind;
  signature.coding = given.coding;
  signature.whole = {given.kind, given.dtype,   given.out_dtype, given.op,         given.accumulate,
                     ++step_,    given.buffers, given.count,     given.counts_hash};
  std::copy_n(given.counts, Signature::kShownCounts, signature.whole.counts);
  std::copy_n(given.name, sizeof given.name, signature.name);
  std::copy_n(given.site, sizeof given.site, signature.site);
  signature.name_hash = given.name_hash;
  part_.items.clear();
  for (const Item& item : items) part_.items.add(item, spares_);
  count_items(signature, items, rank_, world_size_);
  is_moving_ = true;
  engine_.run(part_);
  is_moving_ = false;
}

EncodedCall call_of(const Operation& operation, int divide_by, std::uint64_t seed) {
  const Signature& signature = operation.signature;
  return {.codec = codec_of_word(signature.coding),
          .dtype = signature.dtype,
          .out_dtype = signature.out_dtype,
          .keep = operation.coding.keep,
          .error_dtype = operation.coding.error_dtype,
          .seed = seed,
          .divide_by = signature.op == ReduceOp::avg ? static_cast<float>(divide_by) : 1.0f,
          .accumulate = signature.accumulate,
          .differences = operation.coding.differences};
}

}  // namespace coll
}  // namespace zcomm
