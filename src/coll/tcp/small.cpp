// See small.hpp.
#include "coll/tcp/small.hpp"

#include <cstring>

#include "coll/tcp/reduce.hpp"

namespace zcomm::coll {
namespace {

/// How many parts an input holds.
std::size_t parts_of_input(OpKind kind, int world_size) {
  return kind == OpKind::reduce_scatter || kind == OpKind::scatter ? static_cast<std::size_t>(world_size) : 1;
}

}  // namespace

std::size_t TcpSmall::cargo_nbytes(const Operation& operation, int world_size) {
  std::size_t count = 0;
  for (const Item& item : operation.items.all()) count += item.count;
  return count * parts_of_input(operation.signature.kind, world_size) * size_of(operation.signature.dtype);
}

void TcpSmall::run(const Operation& operation) {
  const Signature& signature = operation.signature;
  const auto world = static_cast<std::size_t>(sockets_.world_size());
  size_ = size_of(signature.dtype);
  nbytes_ = cargo_nbytes(operation, sockets_.world_size());
  const std::size_t repeat = parts_of_input(signature.kind, sockets_.world_size());
  arrival_.reserve(nbytes_ * world);
  const bool from_root = signature.kind == OpKind::broadcast || signature.kind == OpKind::scatter;
  if (!from_root || signature.root == sockets_.rank())
    pack(operation.items.all(), repeat, arrival_.block(sockets_.rank(), nbytes_));
  if (from_root)
    arrival_.enter_broadcasting(signature, nbytes_, signature.root);
  else
    arrival_.enter_gathering(signature, nbytes_);
  if (reduces(signature.kind))
    reduce(operation);
  else
    take(operation);
}

void TcpSmall::pack(std::span<const Item> items, std::size_t repeat, std::byte* to) const {
  for (const Item& item : items) {
    const std::size_t nbytes = item.count * repeat * size_;
    if (nbytes > 0) std::memcpy(to, item.in, nbytes);
    to += nbytes;
  }
}

void TcpSmall::reduce(const Operation& operation) {
  const Signature& signature = operation.signature;
  if (signature.kind == OpKind::reduce && signature.root != sockets_.rank()) return;
  const int world = sockets_.world_size();
  const TcpReduce reduce(signature, world);
  const std::size_t parts = parts_of_input(signature.kind, world);
  const std::size_t part = parts > 1 ? static_cast<std::size_t>(sockets_.rank()) : 0;
  sources_.resize(static_cast<std::size_t>(world));
  std::size_t at = 0;
  for (const Item& item : operation.items.all()) {
    for (int q = 0; q < world; ++q)
      sources_[static_cast<std::size_t>(q)] = arrival_.block(q, nbytes_) + at + part * item.count * size_;
    if (item.count > 0) reduce.all(item.out, sources_, item.count);
    at += item.count * parts * size_;
  }
}

void TcpSmall::take(const Operation& operation) {
  const Signature& signature = operation.signature;
  const auto rank = static_cast<std::size_t>(sockets_.rank());
  const bool is_root = signature.root == sockets_.rank();
  std::size_t at = 0;
  const auto copy = [](std::byte* to, const std::byte* from, std::size_t nbytes) {
    if (nbytes > 0) std::memcpy(to, from, nbytes);
  };
  for (const Item& item : operation.items.all()) {
    const std::size_t nbytes = item.count * size_;
    switch (signature.kind) {
      case OpKind::broadcast:
        if (!is_root) copy(item.out, arrival_.block(signature.root, nbytes_) + at, nbytes);
        at += nbytes;
        break;
      case OpKind::scatter:
        copy(item.out, arrival_.block(signature.root, nbytes_) + at + rank * nbytes, nbytes);
        at += nbytes * static_cast<std::size_t>(sockets_.world_size());
        break;
      default:  // all_gather, gather
        for (int q = 0; q < sockets_.world_size() && (signature.kind == OpKind::all_gather || is_root); ++q)
          copy(item.out + static_cast<std::size_t>(q) * nbytes, arrival_.block(q, nbytes_) + at, nbytes);
        at += nbytes;
    }
  }
}

}  // namespace zcomm::coll
