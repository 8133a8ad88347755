// all_to_all over device slots: each rank's parts form one packed stream (SplitStream). The ranks exchange its table of
// offsets on the host. Part of DeviceStaged (coll/cuda/ipc_staged.hpp).
#include <algorithm>

#include "coll/cuda/ipc_staged.hpp"
#include "coll/split_counts.hpp"

namespace zcomm::coll {
namespace {

/// Bytes [begin, end) that a part of a stream and a step's slot have in common.
struct Overlap {
  std::size_t begin, end;
  Overlap(std::size_t part, std::size_t part_nbytes, std::size_t slot, std::size_t slot_nbytes)
      : begin(std::max(part, slot)), end(std::max(begin, std::min(part + part_nbytes, slot + slot_nbytes))) {}
  std::size_t nbytes() const { return end - begin; }
};

}  // namespace

void DeviceStaged::exchange(const Operation& operation, const SignatureOf& signature_of) {
  items_ = operation.items.all();
  const std::size_t element_nbytes = size_of(operation.signature.dtype), slot = slots_.slot_nbytes();
  const Item& own = items_[static_cast<std::size_t>(rank_)];
  copy(own.out, own.in, own.count * element_nbytes);
  std::size_t longest = 0;
  for (int q = 0; q < world_size_; ++q) longest = std::max(longest, stream_nbytes(signature_of(q)));
  const std::size_t total = (longest + slot - 1) / slot;
  if (total == 0) return;  // on every rank

  const SplitStream stream(rank_, items_, element_nbytes);
  table_.assign(items_.size(), 0);
  stream.for_each([&](int to, std::size_t begin, std::size_t) { table_[static_cast<std::size_t>(to)] = begin; });
  rounds_.all_gather_on_host(table_.data(), table_.size() * sizeof(table_[0]));
  for (int q = 0; q < world_size_; ++q)
    begins_[static_cast<std::size_t>(q)] =
        reinterpret_cast<const std::uint64_t*>(rounds_.gathered(q))[static_cast<std::size_t>(rank_)];

  for (std::uint32_t t = 0; t <= total; ++t) {
    if (t < total)
      stream.for_each([&](int to, std::size_t begin, std::size_t nbytes) {
        const Overlap here(begin, nbytes, t * slot, slot);
        if (here.nbytes() != 0)
          copy(slots_.slot(rank_, t) + (here.begin - t * slot),
               items_[static_cast<std::size_t>(to)].in + (here.begin - begin), here.nbytes());
      });
    for (int i = 1; t >= 1 && i < world_size_; ++i) {
      const int from = (rank_ - i + world_size_) % world_size_;  // the order in which parts arrive
      const auto q = static_cast<std::size_t>(from);
      const std::size_t at = (t - 1) * slot;
      const Overlap here(begins_[q], items_[q].out_count * element_nbytes, at, slot);
      if (here.nbytes() != 0)
        copy(items_[q].out + (here.begin - begins_[q]), slots_.slot(from, t - 1) + (here.begin - at), here.nbytes());
    }
    rounds_.barrier();
  }
}

}  // namespace zcomm::coll
