// From arguments to an Operation (coll/operation.hpp).
#include "coll/operation.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"
#include "coll/overlap.hpp"
#include "coll/split_counts.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {
namespace {

void check_pointer(const Request& request, const void* data, std::size_t count, std::size_t index) {
  if (data == nullptr && count != 0)
    throw InvalidArgument(
        text(name_of(request.kind), ": buffer ", index, " has ", count, " elements at a null pointer"));
}

/// The larger side is divided among all ranks.
void check_counts(const Request& request, std::size_t index, std::size_t whole, std::size_t part, int world_size) {
  if (whole != part * static_cast<std::size_t>(world_size) ||
      (part != 0 && whole / part != static_cast<std::size_t>(world_size)))
    throw InvalidArgument(text(name_of(request.kind), ": buffer ", index, ": count ", whole,
                               " is not world_size * count of the part = ", world_size, " * ", part));
}

void check_dtypes(const Request& request) {
  if (request.op == ReduceOp::avg && !is_floating(request.dtype))
    throw InvalidArgument(text(name_of(request.kind), ": avg of ", name_of(request.dtype),
                               ": integers have no average; use sum, or a floating dtype"));
  const bool half = request.dtype == DType::float16 || request.dtype == DType::bfloat16;
  if (request.out_dtype != request.dtype && !(half && request.out_dtype == DType::float32))
    throw InvalidArgument(text(name_of(request.kind), ": out_dtype ", name_of(request.out_dtype), " for ",
                               name_of(request.dtype), ": expected the same, or float32 for float16 and bfloat16"));
}

}  // namespace

void ItemList::add(const Item& item, SpareItems& spares) {
  if (spill_.empty() && count_ < kInline) {
    inline_[count_++] = item;
    return;
  }
  if (spill_.empty()) {
    if (spill_.capacity() == 0 && !spares.empty()) {
      spill_ = std::move(spares.back());
      spares.pop_back();
    }
    spill_.assign(inline_.begin(), inline_.end());
  }
  spill_.push_back(item);
}

void ItemList::give_back(SpareItems& spares) {
  clear();
  if (spill_.capacity() > 0) spares.push_back(std::move(spill_));
  spill_ = {};
}

namespace {

void check_list(const Request& request, std::size_t in, std::size_t out, int world_size) {
  const std::size_t ranks = static_cast<std::size_t>(world_size);
  if (request.kind == OpKind::all_to_all) {
    if (in == ranks && out == ranks) return;
    throw InvalidArgument(
        text("all_to_all: ", in, " inputs and ", out, " outputs: expected one for each of ", ranks, " ranks"));
  }
  if (in != out) throw InvalidArgument(text(name_of(request.kind), ": ", in, " inputs and ", out, " outputs"));
}

/// Checks the side that only the root has.
template <class Buffers>
void check_none(const Request& request, const Buffers& buffers, const char* side) {
  if (!buffers.empty())
    throw InvalidArgument(text(name_of(request.kind), ": ", buffers.size(), " ", side,
                               "s on a rank that is not root=", request.root, ": expected none"));
}

void check_shared(const Request& request, std::size_t index, int world_size, const SymmetricMemory& memory) {
  const Buffer& out = request.out[index];
  const Allocation* home = memory.find(out.data, out.count * size_of(request.dtype));
  if (home != nullptr && home->shared && world_size > 1)
    throw InvalidArgument(text(name_of(request.kind), ": buffer ", index,
                               " lies in memory that all ranks share: reducing in place would count partial "
                               "results again; use a buffer per rank"));
}

void check_buffer(const Request& request, std::size_t i, int rank, int world_size, const SymmetricMemory& memory) {
  const bool has_in = i < request.in.size(), has_out = i < request.out.size();
  if (has_in) check_pointer(request, request.in[i].data, request.in[i].count, i);
  if (has_out) check_pointer(request, request.out[i].data, request.out[i].count, i);
  switch (request.kind) {
    case OpKind::all_reduce:
    case OpKind::reduce:
      return check_shared(request, i, world_size, memory);
    case OpKind::reduce_scatter:
      return check_counts(request, i, request.in[i].count, request.out[i].count, world_size);
    case OpKind::all_gather:
      return check_counts(request, i, request.out[i].count, request.in[i].count, world_size);
    case OpKind::gather:
      if (rank == request.root) check_counts(request, i, request.out[i].count, request.in[i].count, world_size);
      return;
    case OpKind::scatter:
      if (rank == request.root) check_counts(request, i, request.in[i].count, request.out[i].count, world_size);
      return;
    default:
      return;
  }
}

/// The elements that count as the item's; see Item::count.
std::size_t item_count(OpKind kind, const ConstBuffer& in, const Buffer& out) {
  switch (kind) {
    case OpKind::all_gather:
    case OpKind::gather:
    case OpKind::all_to_all:
      return in.count;
    default:
      return out.count;
  }
}

bool overlap(const void* a, std::size_t a_nbytes, const void* b, std::size_t b_nbytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(a), second = reinterpret_cast<std::uintptr_t>(b);
  return first < second + b_nbytes && second < first + a_nbytes;
}

void check_own(const Request& request) {
  if (request.own.empty()) return;
  if (request.out.size() != 1)
    throw InvalidArgument(
        text(name_of(request.kind), ": own parts of a list of ", request.out.size(), " buffers: expected one buffer"));
  const ConstBuffer& in = request.in[0];
  const Buffer& out = request.out[0];
  const std::size_t in_size = size_of(request.dtype), out_nbytes = out.count * size_of(request.out_dtype);
  const auto require_apart = [&](const void* data, std::size_t count) {
    if (overlap(out.data, out_nbytes, data, count * in_size))
      throw InvalidArgument(text(name_of(request.kind), ": with own parts, out must lie outside of in and of them"));
  };
  require_apart(in.data, in.count);
  std::size_t end = 0;
  for (std::size_t i = 0; i < request.own.size(); ++i) {
    const OwnPart& part = request.own[i];
    if (part.data == nullptr && part.count != 0)
      throw InvalidArgument(
          text(name_of(request.kind), ": own part ", i, " has ", part.count, " elements at a null pointer"));
    require_apart(part.data, part.count);
    if (part.begin < end || part.begin > out.count || part.count > out.count - part.begin)
      throw InvalidArgument(text(name_of(request.kind), ": own part ", i, ": elements [", part.begin, ", ",
                                 part.begin + part.count, "): expected parts of [", end, ", ", out.count,
                                 "), in order"));
    end = part.begin + part.count;
  }
}

}  // namespace

void check(const Request& request, int rank, int world_size, const SymmetricMemory& memory) {
  if (reduces(request.kind)) check_dtypes(request);
  if (has_root(request.kind) && (request.root < 0 || request.root >= world_size))
    throw InvalidArgument(
        text(name_of(request.kind), ": root=", request.root, ": expected a rank in [0, ", world_size, ")"));
  const bool not_root = rank != request.root;
  if (request.kind == OpKind::gather && not_root)
    check_none(request, request.out, "output");
  else if (request.kind == OpKind::scatter && not_root)
    check_none(request, request.in, "input");
  else if (!in_place(request.kind))
    check_list(request, request.in.size(), request.out.size(), world_size);
  const std::size_t buffers = std::max(request.in.size(), request.out.size());
  for (std::size_t i = 0; i < buffers; ++i) check_buffer(request, i, rank, world_size, memory);
  check_own(request);
  check_overlap({.what = name_of(request.kind),
                 .kind = request.kind,
                 .in = request.in,
                 .out = request.out,
                 .in_size = size_of(request.dtype),
                 .out_size = size_of(request.out_dtype),
                 .rank = rank,
                 .accumulate = request.accumulate});
}

namespace {

void fill_coding(Operation& operation, const Coding& coding, std::size_t buffers) {
  operation.signature.coding = coding_word(coding);
  OperationCoding& own = operation.coding;
  own.keep = coding.keep, own.error_dtype = coding.error_dtype, own.differences = coding.differences;
  own.items.assign(buffers, {});
  for (std::size_t i = 0; i < buffers; ++i) {
    CodingItem& item = own.items[i];
    if (!coding.errors.empty()) item.error = static_cast<std::byte*>(coding.errors[i].data);
    if (!coding.server_errors.empty()) item.server_error = static_cast<std::byte*>(coding.server_errors[i].data);
    if (!coding.masks.empty()) item.mask = coding.masks[i];
  }
}

}  // namespace

void fill(Operation& operation, SpareItems& spares, const Request& request, int rank, int world_size,
          const SymmetricMemory& memory) {
  const std::size_t ranks = static_cast<std::size_t>(world_size);
  operation.items.clear();
  operation.own.assign(request.own.begin(), request.own.end());
  operation.allocate = request.allocate;
  operation.split = request.split;
  operation.after = nullptr;
  operation.awaited = nullptr;
  operation.verify = Verify::no;
  Signature& signature = operation.signature;
  signature = Signature{};
  signature.kind = request.kind;
  signature.dtype = request.dtype;
  signature.out_dtype = request.out_dtype;
  signature.op = request.op;
  signature.accumulate = request.accumulate;
  if (reduces(request.kind)) signature.order = request.call.order;
  signature.root = request.root;
  const std::size_t buffers = std::max(request.in.size(), request.out.size());
  signature.buffers = static_cast<std::uint32_t>(buffers);
  signature.count = request.nbytes;
  if (request.coding != nullptr) fill_coding(operation, *request.coding, buffers);
  set_name(signature, request.call.name, request.call.site);

  const std::size_t in_size = size_of(request.dtype), out_size = size_of(request.out_dtype);
  const bool same = in_place(request.kind), uneven = request.kind == OpKind::all_to_all;
  bool in_symmetric = true, out_symmetric = true;
  std::uint64_t in_place_hash = 1, out_place_hash = 1;
  const auto locate = [&](const void* data, std::size_t nbytes, bool& symmetric, std::uint64_t& hash) {
    if (nbytes == 0) return static_cast<const Allocation*>(nullptr);  // lies anywhere
    const Allocation* home = memory.find(data, nbytes);
    if (home != nullptr && home->shared) home = nullptr;
    symmetric &= home != nullptr;
    if (home != nullptr) hash = mix(mix(hash, home->id), home->offset_of(data));
    return home;
  };
  for (std::size_t i = 0; i < buffers; ++i) {
    const Buffer out = i < request.out.size() ? request.out[i] : Buffer{nullptr, 0};
    const ConstBuffer in = same                    ? ConstBuffer{out.data, out.count}
                           : i < request.in.size() ? request.in[i]
                                                   : ConstBuffer{nullptr, 0};
    Item item;
    item.in = static_cast<const std::byte*>(in.data);
    item.out = static_cast<std::byte*>(out.data);
    item.count = item_count(request.kind, in, out);
    item.out_count = out.count;
    item.in_home = locate(in.data, in.count * in_size, in_symmetric, in_place_hash);
    item.out_home = same ? item.in_home : locate(out.data, out.count * out_size, out_symmetric, out_place_hash);
    operation.items.add(item, spares);
    if (uneven) continue;  // counts are between two ranks: see set_splits
    const std::size_t count = same ? item.count : item.count * ranks;
    if (i < Signature::kShownCounts) signature.counts[i] = count;
    signature.counts_hash = mix(signature.counts_hash, count);
    signature.count += count;
  }
  if (uneven) set_splits(signature, rank, operation.items.all());
  signature.place_in = in_symmetric ? in_place_hash | 1 : 0;
  signature.place_out = same ? signature.place_in : out_symmetric ? out_place_hash | 1 : 0;
  seal(signature);
}

void count_items(Signature& signature, std::span<const Item> items, int rank, int world_size) {
  if (signature.kind == OpKind::all_to_all) {
    signature.buffers = static_cast<std::uint32_t>(world_size);
    set_splits(signature, rank, items);
  } else {
    for (const Item& item : items) {
      const std::size_t count =
          in_place(signature.kind) ? item.count : item.count * static_cast<std::size_t>(world_size);
      if (signature.buffers < Signature::kShownCounts) signature.counts[signature.buffers] = count;
      signature.counts_hash = mix(signature.counts_hash, count);
      signature.count += count;
      ++signature.buffers;
    }
  }
  seal(signature);
}

void bring_home(Operation& operation, int rank) {
  if (operation.own.empty()) return;
  const Item& item = operation.items.all()[0];
  const std::size_t element_nbytes = size_of(operation.signature.dtype);
  std::byte* chunk = const_cast<std::byte*>(item.in) + static_cast<std::size_t>(rank) * item.count * element_nbytes;
  for (const OwnPart& part : operation.own)
    device::copy(chunk + part.begin * element_nbytes, part.data, part.count * element_nbytes);
  operation.own.clear();
}

}  // namespace zcomm::coll
