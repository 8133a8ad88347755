// See ring.hpp.
#include "coll/tcp/ring.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

constexpr std::uint64_t kMarkMagic = 0x7a636f6d6d72696e;  // "zcommrin"
constexpr std::size_t kLaneAlign = 64;                    // elements

}  // namespace

TcpRing::TcpRing(TcpSockets& sockets, std::size_t segment_nbytes, int sockets_per_neighbour)
    : sockets_(sockets), segment_nbytes_(segment_nbytes) {
  if (sockets.world_size() > 1) make_lanes(sockets_per_neighbour);
}

void TcpRing::make_lanes(int sockets_per_neighbour) {
  const int world = sockets_.world_size(), rank = sockets_.rank();
  const int after = (rank + 1) % world, before = (rank + world - 1) % world;
  for (int way = 0; way < (world == 2 ? 1 : 2); ++way) {
    for (int socket = 0; socket < sockets_per_neighbour; ++socket) {
      Lane lane{};
      lane.way = way;
      lane.index = static_cast<int>(lanes_.size());
      lane.next = way == 0 ? after : before;
      lane.prev = way == 0 ? before : after;
      lane.socket = socket;
      lane.send = {lane.next, true};
      lane.recv = {lane.prev, false};
      lanes_.push_back(std::move(lane));
    }
  }
}

std::size_t TcpRing::nbytes() const {
  std::size_t nbytes = 0;
  for (const Lane& lane : lanes_) nbytes += lane.slots.capacity() + lane.landing.capacity();
  return nbytes;
}

void TcpRing::run(const RingJob& job) {
  job_ = job;
  const auto world = static_cast<std::size_t>(sockets_.world_size());
  reduce_ = TcpReduce(*job.signature, sockets_.world_size());
  element_nbytes_ = size_of(job.signature->dtype);
  const std::size_t widest = job.reduces ? size_of(reduce_.partial()) : element_nbytes_;
  segment_count_ = std::max(segment_nbytes_ / widest / kLaneAlign, std::size_t{1}) * kLaneAlign;
  reduce_steps_ = job.reduces ? world - 1 : 0;
  steps_ = reduce_steps_ + (job.gathers ? world - 1 : 0);
  const std::size_t longest = chunk_of(job.chunks->largest(), static_cast<int>(lanes_.size()), 0, kLaneAlign).count();
  const std::size_t group_count = kWindow * segment_count_;
  groups_ = (longest + group_count - 1) / group_count;
  for (Lane& lane : lanes_) begin(lane);

  for (bool done = false; !done;) {
    done = true;
    bool moved = false;
    for (Lane& lane : lanes_) {
      moved |= pull(lane);
      moved |= push(lane);
      done &= at_end(lane.in) && at_end(lane.out) && !lane.sending && !lane.receiving;
    }
    if (done || moved) continue;
    for (const Lane& lane : lanes_) {
      if (lane.receiving) sockets_.expect(lane.prev, lane.socket, POLLIN);
      if (lane.sending) sockets_.expect(lane.next, lane.socket, POLLOUT);
    }
    sockets_.wait();
  }
}

void TcpRing::begin(Lane& lane) {
  if (job_.reduces) {
    const std::size_t room = kSlots * segment_count_ * size_of(reduce_.partial());
    if (lane.slots.size() < room) lane.slots.resize(room);
    if (reduce_.widens() && lane.landing.size() < segment_count_ * element_nbytes_)
      lane.landing.resize(segment_count_ * element_nbytes_);
  }
  lane.in = lane.out = {};
  lane.mark_sent = lane.mark_checked = false;
  lane.mark_out = {kMarkMagic, mix(job_.identity, static_cast<std::uint64_t>(lane.index))};
  lane.send.clear(), lane.recv.clear();
  lane.send.add(&lane.mark_out, sizeof lane.mark_out);
  lane.recv.add(&lane.mark_in, sizeof lane.mark_in);
  lane.sending = lane.receiving = true;
}

bool TcpRing::may_send(const Lane& lane) const {
  return !at_end(lane.out) && (lane.out.step == 0 || lane.out.index < lane.in.index + kWindow);
}

bool TcpRing::may_receive(const Lane& lane) const {
  return !at_end(lane.in) && (!is_reduce(lane.in.step) || lane.in.reduced < lane.out.reduced + kSlots);
}

/// Sends what can go now; whether it came any further.
bool TcpRing::push(Lane& lane) {
  bool moved = false;
  while (lane.sending || may_send(lane)) {
    if (!lane.sending) prepare_send(lane);
    lane.sending = true;
    if (!lane.send.done()) {
      if (!sockets_.advance(lane.send, lane.socket)) return moved;
      moved = true;
      if (!lane.send.done()) continue;
    }
    lane.sending = false;
    moved = true;  // an empty segment too
    if (lane.mark_sent) step(lane.out, is_reduce(lane.out.step) && lane.out.step > 0);
    lane.mark_sent = true;
  }
  return moved;
}

/// Receives what is there and may come in; whether it came any further.
bool TcpRing::pull(Lane& lane) {
  bool moved = false;
  while (lane.receiving || may_receive(lane)) {
    if (!lane.receiving) prepare_recv(lane);
    lane.receiving = true;
    if (!lane.recv.done()) {
      if (!sockets_.advance(lane.recv, lane.socket)) return moved;
      moved = true;
      if (!lane.recv.done()) continue;
    }
    lane.receiving = false;
    moved = true;
    if (!lane.mark_checked) {
      check_mark(lane);
      lane.mark_checked = true;
      continue;
    }
    const std::size_t at = lane.in.step;
    if (is_reduce(at)) received(lane);
    step(lane.in, at + 1 < reduce_steps_);
  }
  return moved;
}

void TcpRing::step(Cursor& cursor, bool through_slot) const {
  ++cursor.index;
  cursor.reduced += through_slot ? 1 : 0;
  if (++cursor.segment < kWindow) return;
  cursor.segment = 0;
  if (++cursor.step < steps_) return;
  cursor.step = 0;
  ++cursor.group;
}

int TcpRing::chunk_sent(const Lane& lane, std::size_t at) const {
  const int world = sockets_.world_size();
  const int behind = is_reduce(at) ? static_cast<int>(at) + 1 : static_cast<int>(at - reduce_steps_);
  return (sockets_.rank() + (lane.way == 0 ? -behind : behind) + world) % world;
}

int TcpRing::chunk_received(const Lane& lane, std::size_t at) const {
  const int world = sockets_.world_size();
  return (chunk_sent(lane, at) + (lane.way == 0 ? -1 : 1) + world) % world;
}

Range TcpRing::segment(const Lane& lane, const Cursor& cursor, int chunk) const {
  const Range mine = chunk_of(job_.chunks->count(chunk), static_cast<int>(lanes_.size()), lane.index, kLaneAlign);
  const std::size_t first = (cursor.group * kWindow + cursor.segment) * segment_count_;
  return {std::min(mine.begin + first, mine.end), std::min(mine.begin + first + segment_count_, mine.end)};
}

void TcpRing::prepare_send(Lane& lane) {
  const std::size_t at = lane.out.step;
  const int chunk = chunk_sent(lane, at);
  const Range range = segment(lane, lane.out, chunk);
  lane.send.clear();
  if (is_reduce(at) && at > 0) {
    lane.send.add(slot(lane, lane.out.reduced), range.count() * size_of(reduce_.partial()));
    return;
  }
  job_.chunks->pieces(chunk, range.begin, range.end,
                      [&](const Item& item, std::size_t offset, std::size_t count, std::size_t) {
                        const std::byte* from = is_reduce(at) ? item.in : item.out;
                        lane.send.add(from + offset * element_nbytes_, count * element_nbytes_);
                      });
}

void TcpRing::prepare_recv(Lane& lane) {
  const std::size_t at = lane.in.step;
  const int chunk = chunk_received(lane, at);
  const Range range = segment(lane, lane.in, chunk);
  lane.recv.clear();
  if (lands(at)) {
    lane.recv.add(lane.landing.data(), range.count() * element_nbytes_);
  } else if (is_reduce(at)) {
    lane.recv.add(slot(lane, lane.in.reduced), range.count() * size_of(reduce_.partial()));
  } else {
    job_.chunks->pieces(chunk, range.begin, range.end,
                        [&](const Item& item, std::size_t offset, std::size_t count, std::size_t) {
                          lane.recv.add(item.out + offset * element_nbytes_, count * element_nbytes_);
                        });
  }
}

/// Adds the own part to the partial sums that have come.
void TcpRing::received(Lane& lane) {
  const std::size_t at = lane.in.step;
  const int chunk = chunk_received(lane, at);
  const Range range = segment(lane, lane.in, chunk);
  const bool raw = lands(at), last = at + 1 == reduce_steps_;
  std::byte* const sums = slot(lane, lane.in.reduced);
  const std::byte* const came = raw ? lane.landing.data() : sums;
  const std::size_t size = size_of(reduce_.partial()), came_size = raw ? element_nbytes_ : size;
  job_.chunks->pieces(chunk, range.begin, range.end,
                      [&](const Item& item, std::size_t offset, std::size_t count, std::size_t where) {
                        const std::size_t skip = where - range.begin;
                        std::byte* const sum = sums + skip * size;
                        const std::byte* const from = came + skip * came_size;
                        const std::byte* const own = item.in + offset * element_nbytes_;
                        if (last && reduce_steps_ == 1) {
                          const void* const both[] = {from, own};
                          return reduce_.all(result_of(item, offset, where), both, count);
                        }
                        if (raw)
                          reduce_.add_first(sum, from, own, count);
                        else
                          reduce_.add(sum, from, own, count);
                        if (last) reduce_.finish(result_of(item, offset, where), sum, count);
                      });
}

std::byte* TcpRing::result_of(const Item& item, std::size_t offset, std::size_t at) const {
  const std::size_t size = size_of(job_.signature->out_dtype);
  if (job_.result != nullptr) return job_.result + at * size;
  const bool scatter = job_.signature->kind == OpKind::reduce_scatter;
  return item.out + (offset - (scatter ? static_cast<std::size_t>(sockets_.rank()) * item.count : 0)) * size;
}

void TcpRing::check_mark(Lane& lane) const {
  const std::uint64_t wanted = mix(job_.identity, static_cast<std::uint64_t>(lane.index));
  if (lane.mark_in.magic == kMarkMagic && lane.mark_in.identity == wanted) return;
  throw Error(text("what came from rank ", sockets_.name(lane.prev), " on socket ", lane.socket,
                   " is not this operation's data: the streams are out of step"));
}

}  // namespace zcomm::coll
