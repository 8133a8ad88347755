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

std::size_t LinkSmall::cargo_nbytes(const Operation& operation, int world_size) {
  std::size_t count = 0;
  for (const Item& item : operation.items.all()) count += item.count;
  return count * parts_of_input(operation.header.kind, world_size) * size_of(operation.header.dtype);
}

void LinkSmall::run(const Operation& operation) {
  const Header& header = operation.header;
  const auto world = static_cast<std::size_t>(net_.world_size());
  size_ = size_of(header.dtype);
  nbytes_ = cargo_nbytes(operation, net_.world_size());
  const std::size_t repeat = parts_of_input(header.kind, net_.world_size());
  guard_.reserve(nbytes_ * world);
  const bool from_root = header.kind == OpKind::broadcast || header.kind == OpKind::scatter;
  if (!from_root || header.root == net_.rank()) pack(operation.items.all(), repeat, guard_.block(net_.rank(), nbytes_));
  if (from_root)
    guard_.enter_broadcasting(header, nbytes_, header.root);
  else
    guard_.enter_gathering(header, nbytes_);
  if (reduces(header.kind))
    reduce(operation);
  else
    take(operation);
}

void LinkSmall::pack(std::span<const Item> items, std::size_t repeat, std::byte* to) const {
  for (const Item& item : items) {
    const std::size_t nbytes = item.count * repeat * size_;
    if (nbytes > 0) std::memcpy(to, item.in, nbytes);
    to += nbytes;
  }
}

void LinkSmall::reduce(const Operation& operation) {
  const Header& header = operation.header;
  if (header.kind == OpKind::reduce && header.root != net_.rank()) return;
  const int world = net_.world_size();
  const LinkReduce reduce(header, world);
  const std::size_t parts = parts_of_input(header.kind, world);
  const std::size_t part = parts > 1 ? static_cast<std::size_t>(net_.rank()) : 0;
  sources_.resize(static_cast<std::size_t>(world));
  std::size_t at = 0;
  for (const Item& item : operation.items.all()) {
    for (int q = 0; q < world; ++q)
      sources_[static_cast<std::size_t>(q)] = guard_.block(q, nbytes_) + at + part * item.count * size_;
    if (item.count > 0) reduce.all(item.out, sources_, item.count);
    at += item.count * parts * size_;
  }
}

void LinkSmall::take(const Operation& operation) {
  const Header& header = operation.header;
  const auto rank = static_cast<std::size_t>(net_.rank());
  const bool is_root = header.root == net_.rank();
  std::size_t at = 0;
  const auto copy = [](std::byte* to, const std::byte* from, std::size_t nbytes) {
    if (nbytes > 0) std::memcpy(to, from, nbytes);
  };
  for (const Item& item : operation.items.all()) {
    const std::size_t nbytes = item.count * size_;
    switch (header.kind) {
      case OpKind::broadcast:
        if (!is_root) copy(item.out, guard_.block(header.root, nbytes_) + at, nbytes);
        at += nbytes;
        break;
      case OpKind::scatter:
        copy(item.out, guard_.block(header.root, nbytes_) + at + rank * nbytes, nbytes);
        at += nbytes * static_cast<std::size_t>(net_.world_size());
        break;
      default:  // all_gather, gather
        for (int q = 0; q < net_.world_size() && (header.kind == OpKind::all_gather || is_root); ++q)
          copy(item.out + static_cast<std::size_t>(q) * nbytes, guard_.block(q, nbytes_) + at, nbytes);
        at += nbytes;
    }
  }
}

}  // namespace zcomm::coll
