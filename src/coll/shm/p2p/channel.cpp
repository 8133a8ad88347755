// Shared memory of messages (coll/shm/p2p/channel.hpp).
#include "coll/shm/p2p/channel.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <utility>

#include "base/error.hpp"
#include "base/fault.hpp"

namespace zcomm::coll {
namespace {

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }
constexpr std::size_t kDoorbellNbytes = 4096;
constexpr std::size_t kChannelNbytes = round_up(sizeof(Channel), 4096);
constexpr char kMagic[] = "zcomm.m2";

template <std::size_t kRoom>
void fill(char (&to)[kRoom], const char* text) {
  const std::size_t length = text == nullptr ? 0 : strnlen(text, kRoom - 1);
  std::memcpy(to, text, length);
  std::memset(to + length, 0, kRoom - length);
}

}  // namespace

void set_name(MessageHeader& header, const Call& call) {
  header.element = ElementName(call.element);
  fill(header.name, call.name);
  fill(header.site, call.site);
}

std::string describe(const MessageHeader& header, bool is_send, int peer) {
  std::ostringstream out;
  out << (is_send ? "send " : "recv ") << element_of(header.dtype, header.element) << " count=" << header.count
      << " tag=" << header.tag << (is_send ? " to " : " from ");
  if (peer < 0)
    out << "any rank";
  else
    out << "rank " << peer;
  if (header.name[0] != '\0') out << " '" << header.name << '\'';
  if (header.site[0] != '\0') out << " at " << header.site;
  return out.str();
}

bool Ring::claim(std::uint32_t capacity) noexcept {
  const std::uint32_t position = written.load(std::memory_order_relaxed);
  if (position - read.load(std::memory_order_acquire) < capacity) {
    if (stuck.load(std::memory_order_relaxed) != 0) stuck.store(0, std::memory_order_relaxed);
    return true;
  }
  stuck.store(1, std::memory_order_seq_cst);
  return position - read.load(std::memory_order_seq_cst) < capacity;
}

void Ring::commit() noexcept {
  fault_point();
  written.store(written.load(std::memory_order_relaxed) + 1, std::memory_order_release);
}

bool Ring::release() noexcept {
  fault_point();
  read.store(read.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
  return stuck.load(std::memory_order_seq_cst) != 0;
}

ChannelMemory::ChannelMemory(net::Mesh& mesh, std::size_t slot_nbytes, int slot_count, double timeout_s)
    : rank_(mesh.rank()), slot_nbytes_(slot_nbytes), slot_count_(static_cast<std::uint32_t>(slot_count)) {
  const auto ranks = static_cast<std::size_t>(mesh.world_size());
  const std::size_t nbytes = kDoorbellNbytes + ranks * channel_nbytes();
  heap::Segment mine = heap::Segment::create(nbytes);
  net::Parcel parcel;
  parcel.bytes.resize(sizeof(kMagic));
  std::memcpy(parcel.bytes.data(), kMagic, sizeof(kMagic));
  parcel.fd = UniqueFd(::fcntl(mine.fd(), F_DUPFD_CLOEXEC, 0));
  if (!parcel.fd) throw_system_error(errno, "duplicating a segment's descriptor");
  std::vector<net::Parcel> parcels = mesh.exchange(std::move(parcel), timeout_s);
  segments_.resize(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    const auto& bytes = parcels[r].bytes;
    if (bytes.size() != sizeof(kMagic) || std::memcmp(bytes.data(), kMagic, sizeof(kMagic)) != 0)
      throw CollectiveMismatch(
          text("creating a communicator: rank ", r, " did something else, or runs another version of zcomm"));
    if (static_cast<int>(r) == rank_)
      segments_[r] = std::move(mine);
    else
      segments_[r] = heap::Segment::map(std::move(parcels[r].fd), nbytes);
  }
}

std::size_t ChannelMemory::channel_nbytes() const { return kChannelNbytes + slot_nbytes_ * slot_count_; }

Channel& ChannelMemory::channel(int from, int to) const {
  std::byte* const begin = segments_[static_cast<std::size_t>(from)].data() + kDoorbellNbytes;
  return *reinterpret_cast<Channel*>(begin + static_cast<std::size_t>(to) * channel_nbytes());
}

std::byte* ChannelMemory::slot(Channel& channel, std::uint32_t position) const {
  return reinterpret_cast<std::byte*>(&channel) + kChannelNbytes + (position % slot_count_) * slot_nbytes_;
}

Counter& ChannelMemory::doorbell(int rank) const {
  return *reinterpret_cast<Counter*>(segments_[static_cast<std::size_t>(rank)].data());
}

void ChannelMemory::ring(int rank) const noexcept {
  Counter& bell = doorbell(rank);
  bell.value.fetch_add(1, std::memory_order_seq_cst);
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) wake(bell);
}

}  // namespace zcomm::coll
