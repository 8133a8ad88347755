// See halving.hpp.
#include "coll/tcp/halving.hpp"

#include <cstring>

#include "coll/tcp/reduce.hpp"

namespace zcomm::coll {
namespace {

void make_room(std::vector<std::byte>& buffer, std::size_t nbytes) {
  if (buffer.size() < nbytes) buffer.resize(nbytes);
}

}  // namespace

void TcpHalving::swap(int peer, std::span<const std::byte> out, std::span<std::byte> in) {
  both_[0].peer = both_[1].peer = peer;
  both_[0].clear(), both_[1].clear();
  both_[0].add(in.data(), in.size());
  both_[1].add(out.data(), out.size());
  sockets_.move(both_);
}

void TcpHalving::all_reduce(const TcpChunks& chunks, const Signature& signature) {
  const int world = sockets_.world_size(), rank = sockets_.rank();
  TcpReduce reduce(signature, world);
  const std::size_t total = chunks.total(), size = size_of(signature.dtype), wide = size_of(reduce.partial());
  make_room(sums_, total * wide), make_room(came_, total * wide), make_room(results_, total * size);
  std::size_t at = 0;
  for (const Item& item : chunks.items()) {
    reduce.widen(sums_.data() + at * wide, item.in, item.count);
    at += item.count;
  }

  int power = 1;
  while (power * 2 <= world) power *= 2;
  const int pairs = world - power;
  const bool paired = rank < 2 * pairs, acts = !paired || rank % 2 == 1;
  const std::span<std::byte> sums(sums_.data(), total * wide), came(came_.data(), total * wide);
  const std::span<std::byte> results(results_.data(), total * size);
  if (paired && !acts) swap(rank + 1, sums, {});
  if (paired && acts) {
    swap(rank - 1, {}, came);
    reduce.combine(sums.data(), came.data(), sums.data(), total);
  }
  if (acts) {
    const int place = paired ? rank / 2 : rank - pairs;
    const auto rank_at = [&](int other) { return other < pairs ? 2 * other + 1 : other + pairs; };
    const auto part = [](std::span<std::byte> all, Range range, std::size_t element) {
      return all.subspan(range.begin * element, range.count() * element);
    };
    ranges_.clear();
    Range mine{0, total};
    for (int distance = power / 2; distance > 0; distance /= 2) {
      ranges_.push_back(mine);
      const std::size_t middle = mine.begin + mine.count() / 2;
      const Range low{mine.begin, middle}, high{middle, mine.end};
      const bool upper = (place & distance) != 0;
      mine = upper ? high : low;
      swap(rank_at(place ^ distance), part(sums, upper ? low : high, wide), part(came, mine, wide));
      std::byte* const own = sums.data() + mine.begin * wide;
      std::byte* const theirs = came.data() + mine.begin * wide;
      reduce.combine(own, upper ? theirs : own, upper ? own : theirs, mine.count());
    }
    reduce.finish(results.data() + mine.begin * size, sums.data() + mine.begin * wide, mine.count());
    for (int distance = 1; distance < power; distance *= 2) {
      const Range both = ranges_.back();
      ranges_.pop_back();
      const Range theirs = mine.begin == both.begin ? Range{mine.end, both.end} : Range{both.begin, mine.begin};
      swap(rank_at(place ^ distance), part(results, mine, size), part(results, theirs, size));
      mine = both;
    }
  }
  if (paired && acts) swap(rank - 1, results, {});
  if (paired && !acts) swap(rank + 1, {}, results);

  at = 0;
  for (const Item& item : chunks.items()) {
    if (item.count > 0) std::memcpy(item.out, results.data() + at * size, item.count * size);
    at += item.count;
  }
}

}  // namespace zcomm::coll
