// See direct.hpp.
#include "coll/tcp/direct.hpp"

#include <algorithm>
#include <cstring>

#include "coll/tcp/reduce.hpp"

namespace zcomm::coll {

TcpTransfer& TcpDirect::transfer(int peer, bool out) {
  if (used_ == transfers_.size()) transfers_.push_back({peer, out});
  TcpTransfer& transfer = transfers_[used_++];
  transfer.peer = peer, transfer.out = out;
  transfer.clear();
  return transfer;
}

void TcpDirect::move() {
  sockets_.move(std::span(transfers_).first(used_));
  used_ = 0;
}

void TcpDirect::reduce_scatter(const TcpChunks& chunks, const Signature& signature, std::byte* result) {
  const std::size_t piece = kPieceNbytes / size_of(signature.dtype);
  for (std::size_t begin = 0; begin < chunks.largest(); begin += piece)
    reduce_piece(chunks, signature, result, begin, std::min(begin + piece, chunks.largest()));
}

/// Elements [begin, end) of each chunk; a chunk may end before.
void TcpDirect::reduce_piece(const TcpChunks& chunks, const Signature& signature, std::byte* result, std::size_t begin,
                             std::size_t end) {
  const int world = sockets_.world_size(), rank = sockets_.rank();
  const std::size_t size = size_of(signature.dtype), out_size = size_of(signature.out_dtype);
  const auto end_in = [&](int chunk) { return std::min(end, chunks.count(chunk)); };
  const std::size_t own_nbytes = (std::max(begin, end_in(rank)) - begin) * size;
  scratch_.resize(std::max(scratch_.size(), own_nbytes * static_cast<std::size_t>(world)));
  used_ = 0;
  for (int peer = 0; peer < world; ++peer) {
    if (peer == rank) continue;
    transfer(peer, false).add(scratch_.data() + static_cast<std::size_t>(peer) * own_nbytes, own_nbytes);
    TcpTransfer& out = transfer(peer, true);
    chunks.pieces(peer, begin, end_in(peer), [&](const Item& item, std::size_t offset, std::size_t count, std::size_t) {
      out.add(item.in + offset * size, count * size);
    });
  }
  move();

  const TcpReduce reduce(signature, world);
  const bool parts = signature.kind == OpKind::reduce_scatter;
  sources_.resize(static_cast<std::size_t>(world));
  chunks.pieces(rank, begin, end_in(rank),
                [&](const Item& item, std::size_t offset, std::size_t count, std::size_t at) {
                  for (int q = 0; q < world; ++q)
                    sources_[static_cast<std::size_t>(q)] =
                        q == rank ? item.in + offset * size
                                  : scratch_.data() + static_cast<std::size_t>(q) * own_nbytes + (at - begin) * size;
                  const std::size_t skip = parts ? static_cast<std::size_t>(rank) * item.count : 0;
                  std::byte* out = result != nullptr ? result + at * out_size : item.out + (offset - skip) * out_size;
                  reduce.all(out, sources_, count);
                });
}

void TcpDirect::all_gather(const TcpChunks& chunks, std::size_t size) {
  const int world = sockets_.world_size(), rank = sockets_.rank();
  const auto add = [&](TcpTransfer& to, int chunk) {
    chunks.pieces(chunk, 0, chunks.count(chunk),
                  [&](const Item& item, std::size_t offset, std::size_t count, std::size_t) {
                    to.add(item.out + offset * size, count * size);
                  });
  };
  used_ = 0;
  for (int peer = 0; peer < world; ++peer) {
    if (peer == rank) continue;
    add(transfer(peer, false), peer);
    add(transfer(peer, true), rank);
  }
  move();
}

void TcpDirect::gather(const TcpChunks& chunks, std::size_t size, int root, const std::byte* chunk) {
  const int world = sockets_.world_size(), rank = sockets_.rank();
  used_ = 0;
  if (rank != root) {
    TcpTransfer& out = transfer(root, true);
    if (chunk != nullptr)
      out.add(chunk, chunks.count(rank) * size);
    else
      for (const Item& item : chunks.items()) out.add(item.in, item.count * size);
  }
  for (int peer = 0; rank == root && peer < world; ++peer) {
    if (peer == rank) continue;
    TcpTransfer& in = transfer(peer, false);
    chunks.pieces(peer, 0, chunks.count(peer),
                  [&](const Item& item, std::size_t offset, std::size_t count, std::size_t) {
                    in.add(item.out + offset * size, count * size);
                  });
  }
  move();
}

void TcpDirect::scatter(const TcpChunks& chunks, std::size_t size, int root, TcpChunks::Shape shape) {
  const int world = sockets_.world_size(), rank = sockets_.rank();
  const bool parts = shape == TcpChunks::Shape::parts;
  used_ = 0;
  for (int peer = 0; rank == root && peer < world; ++peer) {
    TcpTransfer* out = peer == rank ? nullptr : &transfer(peer, true);
    chunks.pieces(peer, 0, chunks.count(peer),
                  [&](const Item& item, std::size_t offset, std::size_t count, std::size_t) {
                    const std::byte* from = item.in + offset * size;
                    if (out != nullptr)
                      out->add(from, count * size);
                    else if (parts && from != item.out)
                      std::memmove(item.out, from, count * size);
                  });
  }
  if (rank != root) {
    TcpTransfer& in = transfer(root, false);
    chunks.pieces(rank, 0, chunks.count(rank),
                  [&](const Item& item, std::size_t offset, std::size_t count, std::size_t) {
                    in.add(parts ? item.out : item.out + offset * size, count * size);
                  });
  }
  move();
}

void TcpDirect::broadcast(const TcpChunks& chunks, std::size_t size, int root) {
  const int world = sockets_.world_size();
  const int place = (sockets_.rank() - root + world) % world;
  const auto add = [&](TcpTransfer& to) {
    for (const Item& item : chunks.items()) to.add(item.out, item.count * size);
  };
  used_ = 0;
  int distance = 1;
  while (distance < world && (place & distance) == 0) distance *= 2;
  if (place != 0) {
    add(transfer((place - distance + root) % world, false));
    move();
  }
  for (distance /= 2; distance > 0; distance /= 2)
    if (place + distance < world) add(transfer((place + distance + root) % world, true));
  move();
}

void TcpDirect::all_to_all(std::span<const Item> items, std::size_t size) {
  const int world = sockets_.world_size(), rank = sockets_.rank();
  const Item& own = items[static_cast<std::size_t>(rank)];
  if (own.count > 0 && own.in != own.out) std::memmove(own.out, own.in, own.count * size);
  for (int distance = 1; distance < world; ++distance) {
    const int to = (rank + distance) % world, from = (rank - distance + world) % world;
    const Item& out = items[static_cast<std::size_t>(to)];
    const Item& in = items[static_cast<std::size_t>(from)];
    used_ = 0;
    transfer(from, false).add(in.out, in.out_count * size);
    transfer(to, true).add(out.in, out.count * size);
    move();
  }
}

void TcpDirect::place_own(const TcpChunks& chunks, std::size_t size) {
  for (const Item& item : chunks.items()) {
    std::byte* to = item.out + static_cast<std::size_t>(sockets_.rank()) * item.count * size;
    if (item.count > 0 && item.in != to) std::memmove(to, item.in, item.count * size);
  }
}

}  // namespace zcomm::coll
