// See chunks.hpp.
#include "coll/tcp/chunks.hpp"

namespace zcomm::coll {

void TcpChunks::set(std::span<const Item> items, Shape shape, int world_size) {
  items_ = items;
  shape_ = shape;
  world_size_ = world_size;
  starts_.assign(1, 0);
  for (const Item& item : items) starts_.push_back(starts_.back() + item.count);
}

std::size_t TcpChunks::count(int chunk) const {
  return shape_ == Shape::parts ? total() : chunk_of(total(), world_size_, chunk, kAlign).count();
}

}  // namespace zcomm::coll
