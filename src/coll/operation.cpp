// From arguments to an Operation (coll/operation.hpp).
#include "coll/operation.hpp"

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

bool in_place(OpKind kind) { return kind == OpKind::all_reduce || kind == OpKind::broadcast; }
bool reduces(OpKind kind) { return kind == OpKind::all_reduce || kind == OpKind::reduce_scatter; }

void check_pointer(const Request& request, const void* data, std::size_t count, std::size_t index) {
  if (data == nullptr && count != 0)
    throw InvalidArgument(
        text(name_of(request.kind), ": buffer ", index, " has ", count, " elements at a null pointer"));
}

/// The larger side is dealt to all ranks.
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
  const bool half = request.dtype == DType::f16 || request.dtype == DType::bf16;
  if (request.out_dtype != request.dtype && !(half && request.out_dtype == DType::f32))
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

void check(const Request& request, int world_size, const SymmetricMemory& memory) {
  if (reduces(request.kind)) check_dtypes(request);
  if (request.kind == OpKind::broadcast && (request.root < 0 || request.root >= world_size))
    throw InvalidArgument(text("broadcast: root=", request.root, ": expected a rank in [0, ", world_size, ")"));
  if (!in_place(request.kind) && request.in.size() != request.out.size())
    throw InvalidArgument(
        text(name_of(request.kind), ": ", request.in.size(), " inputs and ", request.out.size(), " outputs"));
  for (std::size_t i = 0; i < request.out.size(); ++i) {
    const Buffer& out = request.out[i];
    check_pointer(request, out.data, out.count, i);
    if (request.kind == OpKind::all_reduce) {
      const Allocation* home = memory.find(out.data, out.count * size_of(request.dtype));
      if (home != nullptr && home->shared && world_size > 1)
        throw InvalidArgument(text("all_reduce: buffer ", i,
                                   " lies in memory that all ranks share, where reducing in "
                                   "place would count partial results again; use a buffer per rank"));
    }
    if (in_place(request.kind)) continue;
    const ConstBuffer& in = request.in[i];
    check_pointer(request, in.data, in.count, i);
    if (request.kind == OpKind::reduce_scatter)
      check_counts(request, i, in.count, out.count, world_size);
    else
      check_counts(request, i, out.count, in.count, world_size);
  }
}

void fill(Operation& operation, SpareItems& spares, const Request& request, int world_size,
          const SymmetricMemory& memory) {
  const std::size_t ranks = static_cast<std::size_t>(world_size);
  operation.items.clear();
  operation.allocate = request.allocate;
  Header& header = operation.header;
  header = Header{};
  header.kind = request.kind;
  header.dtype = request.dtype;
  header.out_dtype = request.out_dtype;
  header.op = request.op;
  header.accumulate = request.accumulate;
  header.root = request.root;
  header.buffers = static_cast<std::uint32_t>(request.out.size());
  header.count = request.nbytes;
  set_name(header, request.name);

  const std::size_t in_size = size_of(request.dtype), out_size = size_of(request.out_dtype);
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
  for (std::size_t i = 0; i < request.out.size(); ++i) {
    const bool same = in_place(request.kind);
    const ConstBuffer in = same ? ConstBuffer{request.out[i].data, request.out[i].count} : request.in[i];
    const Buffer& out = request.out[i];
    Item item;
    item.in = static_cast<const std::byte*>(in.data);
    item.out = static_cast<std::byte*>(out.data);
    item.count = request.kind == OpKind::all_gather       ? out.count / ranks
                 : request.kind == OpKind::reduce_scatter ? in.count / ranks
                                                          : in.count;
    item.in_home = locate(in.data, in.count * in_size, in_symmetric, in_place_hash);
    item.out_home = same ? item.in_home : locate(out.data, out.count * out_size, out_symmetric, out_place_hash);
    operation.items.add(item, spares);
    const std::size_t count = std::max(in.count, out.count);
    if (i < Header::kShownCounts) header.counts[i] = count;
    header.counts_hash = mix(header.counts_hash, count);
    header.count += count;
  }
  header.place_in = in_symmetric ? in_place_hash | 1 : 0;
  header.place_out = in_place(request.kind) ? header.place_in : out_symmetric ? out_place_hash | 1 : 0;
}

}  // namespace zcomm::coll
