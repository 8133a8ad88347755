// Ring: a FIFO of fixed capacity, which allocates nothing after construction.
//
// Thread rule: the owner's lock. push() on a full ring is a programming error.
#pragma once

#include <cstddef>
#include <vector>

namespace zcomm::mem {

template <class T>
class Ring {
 public:
  explicit Ring(std::size_t capacity) : items_(capacity) {}
  std::size_t size() const { return size_; }
  std::size_t capacity() const { return items_.size(); }
  void push(const T& item) { items_[(first_ + size_++) % items_.size()] = item; }
  T pop() {
    const T item = items_[first_];
    first_ = (first_ + 1) % items_.size();
    --size_;
    return item;
  }

 private:
  std::vector<T> items_;
  std::size_t first_ = 0, size_ = 0;
};

}  // namespace zcomm::mem
