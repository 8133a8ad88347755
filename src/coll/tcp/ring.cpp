// See ring.hpp.
#include "coll/tcp/ring.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

constexpr std::uint64_t kMarkMagic = 0x7a636f6d6d72696e;  // "zcommrin"
constexpr std::size_t kSegmentAlign = 64;                 // elements

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
  for (const Lane& lane : lanes_) nbytes += lane.slots.capacity() + lane.raw.capacity();
  return nbytes;
}

void TcpRing::run(const RingJob& job) {
  job_ = job;
  reduce_ = TcpReduce(*job.signature, sockets_.world_size());
  element_nbytes_ = size_of(job.signature->dtype);
  const std::size_t widest = job.reduces ? size_of(reduce_.partial()) : element_nbytes_;
  segment_count_ = std::max(segment_nbytes_ / widest / kSegmentAlign, std::size_t{1}) * kSegmentAlign;
  for (Lane& lane : lanes_) begin(lane);

  for (bool done = false; !done;) {
    done = true;
    bool moved = false;
    for (Lane& lane : lanes_) {
      moved |= advance_recv(lane);
      moved |= advance_send(lane);
      const bool all = lane.sent == lane.plan.size() && lane.received == lane.plan.size();
      done &= all && !lane.sending && !lane.receiving;
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
  const std::size_t slot_nbytes = segment_count_ * size_of(reduce_.partial());
  lane.plan = RingPlan({.rank = sockets_.rank(),
                        .world_size = sockets_.world_size(),
                        .way = lane.way,
                        .lane = lane.index,
                        .lanes = static_cast<int>(lanes_.size()),
                        .reduces = job_.reduces,
                        .gathers = job_.gathers,
                        .raw_first = reduce_.widens(),
                        .segment_count = segment_count_,
                        .slot_nbytes = slot_nbytes},
                       *job_.chunks);
  if (job_.reduces) {
    const std::size_t room = RingPlan::kSlots * slot_nbytes;
    if (lane.slots.size() < room) lane.slots.resize(room);
    if (reduce_.widens() && lane.raw.size() < segment_count_ * element_nbytes_)
      lane.raw.resize(segment_count_ * element_nbytes_);
  }
  lane.sent = lane.received = 0;
  lane.mark_sent = lane.mark_checked = false;
  lane.mark_out = {kMarkMagic, mix(job_.identity, static_cast<std::uint64_t>(lane.index))};
  lane.send.clear(), lane.recv.clear();
  lane.send.add(&lane.mark_out, sizeof lane.mark_out);
  lane.recv.add(&lane.mark_in, sizeof lane.mark_in);
  lane.sending = lane.receiving = true;
}

/// Sends as much as the plan and the socket allow now. True: bytes moved, or an action ended.
bool TcpRing::advance_send(Lane& lane) {
  bool moved = false;
  while (lane.sending || lane.plan.may_send(lane.sent, lane.received)) {
    if (!lane.sending) {
      const Action action = lane.plan.send(lane.sent);
      prepare(lane.send, lane, action, action.from);
    }
    lane.sending = true;
    if (!lane.send.done()) {
      if (!sockets_.advance(lane.send, lane.socket)) return moved;
      moved = true;
      if (!lane.send.done()) continue;
    }
    lane.sending = false;
    moved = true;  // also for an empty segment
    if (lane.mark_sent) ++lane.sent;
    lane.mark_sent = true;
  }
  return moved;
}

/// Receives as much as the plan and the socket allow now, and reduces it. True: bytes moved, or an action ended.
bool TcpRing::advance_recv(Lane& lane) {
  bool moved = false;
  while (lane.receiving || lane.plan.may_receive(lane.sent, lane.received)) {
    if (!lane.receiving) {
      const Action action = lane.plan.recv(lane.received);
      prepare(lane.recv, lane, action, action.to);
    }
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
    if (lane.plan.is_reduced(lane.received)) reduce(lane, lane.plan.reduce(lane.received));
    ++lane.received;
  }
  return moved;
}

/// Sets the source of a send, or the destination of a receive.
void TcpRing::prepare(TcpTransfer& transfer, Lane& lane, const Action& action, Action::Memory memory) {
  transfer.clear();
  if (memory == Action::Memory::slot) {
    transfer.add(lane.slots.data() + action.slot, action.count * size_of(reduce_.partial()));
  } else if (memory == Action::Memory::raw) {
    transfer.add(lane.raw.data(), action.count * element_nbytes_);
  } else {
    job_.chunks->pieces(static_cast<int>(action.buffer), action.in, action.in + action.count,
                        [&](const Item& item, std::size_t offset, std::size_t count, std::size_t) {
                          const std::byte* data = memory == Action::Memory::input ? item.in : item.out;
                          transfer.add(data + offset * element_nbytes_, count * element_nbytes_);
                        });
  }
}

void TcpRing::reduce(Lane& lane, const Action& action) {
  const bool is_raw = action.from == Action::Memory::raw, last = action.to == Action::Memory::output;
  const bool at_once = sockets_.world_size() == 2;  // there are no intermediate sums
  std::byte* const sums = lane.slots.data() + action.slot;
  const std::byte* const received = is_raw ? lane.raw.data() : sums;
  const std::size_t size = size_of(reduce_.partial()), received_size = is_raw ? element_nbytes_ : size;
  job_.chunks->pieces(static_cast<int>(action.buffer), action.in, action.in + action.count,
                      [&](const Item& item, std::size_t offset, std::size_t count, std::size_t where) {
                        const std::size_t skip = where - action.in;
                        std::byte* const sum = sums + skip * size;
                        const std::byte* const from = received + skip * received_size;
                        const std::byte* const own = item.in + offset * element_nbytes_;
                        if (at_once) {
                          const void* const both[] = {from, own};
                          return reduce_.all(result_of(item, offset, where), both, count);
                        }
                        if (is_raw)
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
  throw Error(text("the data from rank ", sockets_.name(lane.prev), " on socket ", lane.socket,
                   " is not this operation's data: the streams are out of step"));
}

}  // namespace zcomm::coll
