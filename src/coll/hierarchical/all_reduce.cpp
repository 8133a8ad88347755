// all_reduce and reduce of [Note: two levels] (engine.hpp).
//
// [Note: pieces of an all_reduce] A large one is cut into pieces, each reduced in three hops: reduce_scatter on the
// host, all_reduce between hosts, all_gather on the host. A second thread makes the middle hops, so that the links
// carry piece k while the host sums piece k + 1 and spreads piece k - 1. Each level has its own engine, and each its
// pieces in order, so no wait goes back: piece k waits for piece k - 1, or for its own hop before. Bits: as of one
// piece, because it is done only if the sum of an element between hosts has one order, whatever the chunk: two hosts,
// or rank order.
#include <algorithm>
#include <cstring>

#include "coll/hierarchical/ops.hpp"
#include "coll/tcp/reduce.hpp"

namespace zcomm::coll {
namespace {

constexpr std::size_t kMostPieces = 8;
constexpr std::size_t kAlign = 64;  // elements of a rank's part of a piece, but for the end of a tensor

ReduceOp without_division(ReduceOp op) { return op == ReduceOp::avg ? ReduceOp::sum : op; }

}  // namespace

/// visit(end of a tensor, its copy, bytes)
template <class Visit>
void HierarchicalEngine::each_tail(ReducePiece& piece, std::size_t size, const Visit& visit) {
  std::byte* tail = piece.tails.room(0);
  for (const Item& item : piece.items) {
    const std::size_t count = item.count % local_world_size_;
    visit(item.out + (item.count - count) * size, tail, count * size);
    tail += count * size;
  }
}

/// visit(begin of all parts, own part's results, elements of a part, home)
template <class Visit>
void HierarchicalEngine::each_part(ReducePiece& piece, std::size_t wide_size, const Visit& visit) {
  std::byte* own = piece.sums.room(0);
  for (const Item& item : piece.items) {
    visit(item.out, own, item.count / local_world_size_, item.out_home);
    own += item.count / local_world_size_ * wide_size;
  }
  if (piece.rest > 0) visit(piece.tails.room(0), own, piece.rest_part, nullptr);
}

void HierarchicalEngine::all_reduce(const Signature& signature, std::span<const Item> items) {
  const bool one_order = hosts_ == 2 || signature.order == ReduceOrder::rank;
  const std::size_t nbytes = total_of(items) * size_of(signature.dtype);
  const std::size_t pieces = one_order && hosts_ > 1 && local_world_size_ > 1 ? nbytes / piece_nbytes_ : 1;
  cut(items, size_of(signature.dtype), std::clamp<std::size_t>(pieces, 1, kMostPieces));
  if (used_ == 1) {
    sum_on_host(signature, pieces_[0]);
    sum_between_hosts(signature, pieces_[0]);
    return spread_on_host(signature, pieces_[0]);
  }
  pieces_of_ = &signature;
  links_thread_.begin();
  for (std::size_t k = 0; k <= used_; ++k) {
    if (k < used_) {
      sum_on_host(signature, pieces_[k]);
      links_thread_.give();
    }
    if (k == 0) continue;
    links_thread_.wait(k);
    spread_on_host(signature, pieces_[k - 1]);
  }
}

/// Tensors in order, whatever piece a cut falls in; all ranks cut alike.
void HierarchicalEngine::cut(std::span<const Item> items, std::size_t size, std::size_t count) {
  const std::size_t unit = kAlign * local_world_size_, total = total_of(items);
  const std::size_t most = (total / count / unit + 1) * unit;
  used_ = 0;
  std::size_t room = 0;
  const auto next = [&] {
    if (used_ == pieces_.size()) pieces_.emplace_back();
    pieces_[used_++].items.clear();
    room = count == 1 ? total : most;
  };
  next();
  for (const Item& item : items) {
    for (std::size_t begin = 0; begin < item.count;) {
      const std::size_t left = item.count - begin;
      const std::size_t take = left <= room ? left : room / unit * unit;
      if (take == 0) {
        next();
        continue;
      }
      Item part = item;
      part.out = item.out + begin * size;
      part.count = take;
      pieces_[used_ - 1].items.push_back(part);
      begin += take;
      room -= take;
    }
  }
}

/// Elements that do not divide by the ranks of a host (fewer than that number, of each tensor) form one more tensor.
void HierarchicalEngine::sum_on_host(const Signature& signature, ReducePiece& piece) {
  const std::size_t size = size_of(signature.dtype), ranks = local_world_size_;
  const DType wide = TcpReduce(signature, world_size()).partial();
  piece.parts = piece.rest = 0;
  for (const Item& item : piece.items) piece.parts += item.count / ranks, piece.rest += item.count % ranks;
  piece.rest_part = (piece.rest + ranks - 1) / ranks;
  piece.sums.room((piece.parts + piece.rest_part) * size_of(wide));
  std::byte* const tails = piece.tails.room(piece.rest_part * ranks * size);
  std::memset(tails, 0, piece.rest_part * ranks * size);
  each_tail(piece, size,
            [](std::byte* tensor, std::byte* tail, std::size_t nbytes) { copy_bytes(tail, tensor, nbytes); });
  topology_.begin(OpKind::reduce_scatter, signature.dtype, wide, without_division(signature.op));
  each_part(piece, size_of(wide), [&](std::byte* whole, std::byte* part, std::size_t count, const Allocation* home) {
    topology_.add({.in = whole, .out = part, .count = count, .in_home = home});
  });
  topology_.keep_buffers(piece.rest == 0, false);
  topology_.run_on_host();
}

void HierarchicalEngine::sum_between_hosts(const Signature& signature, ReducePiece& piece) {
  const DType wide = TcpReduce(signature, world_size()).partial();
  std::byte* const sums = piece.sums.room(0);
  topology_.all_reduce_between_hosts({.in = sums, .out = sums, .count = piece.parts + piece.rest_part}, wide,
                                     without_division(signature.op));
}

void HierarchicalEngine::spread_on_host(const Signature& signature, ReducePiece& piece) {
  TcpReduce reduce(signature, world_size());
  const std::size_t size = size_of(signature.dtype), wide_size = size_of(reduce.partial()),
                    me = static_cast<std::size_t>(topology_.local_rank());
  topology_.begin(OpKind::all_gather, signature.dtype);
  each_part(piece, wide_size, [&](std::byte* whole, std::byte* part, std::size_t count, const Allocation* home) {
    if (count > 0) reduce.finish(whole + me * count * size, part, count);
    topology_.add({.in = whole + me * count * size, .out = whole, .count = count, .in_home = home, .out_home = home});
  });
  topology_.keep_buffers(false, piece.rest == 0);
  topology_.run_on_host();
  each_tail(piece, size,
            [](std::byte* tensor, std::byte* tail, std::size_t nbytes) { copy_bytes(tensor, tail, nbytes); });
}

void HierarchicalEngine::reduce(const Signature& signature, std::span<const Item> items) {
  const std::size_t size = size_of(signature.dtype), total = total_of(items);
  std::byte* const sums = second_.room(total * size);
  std::size_t at = 0;
  for (const Item& item : items) copy_bytes(sums + at * size, item.in, item.count * size), at += item.count;
  const Item whole{.in = sums, .out = sums, .count = total};
  all_reduce(signature, {&whole, 1});
  if (signature.root != rank()) return;
  at = 0;
  for (const Item& item : items) copy_bytes(item.out, sums + at * size, item.count * size), at += item.count;
}

}  // namespace zcomm::coll
