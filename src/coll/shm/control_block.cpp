// Host-wide memory of a communicator (coll/shm/control_block.hpp).
#include "coll/shm/control_block.hpp"

#include <fcntl.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

constexpr std::size_t round_up(std::size_t value, std::size_t unit) { return (value + unit - 1) / unit * unit; }
constexpr std::size_t kMailBegin = round_up(sizeof(ControlBlock), 4096);
constexpr std::size_t kSlotsBegin = kMailBegin + 2 * HostMemory::kMailNbytes;

/// First exchange between ranks: they must agree before any of them maps a segment.
struct Hello {
  std::uint64_t magic = 0x7a636f6d6d2e6334;  // "zcomm.c4"
  std::uint64_t slot_nbytes = 0;
  std::uint64_t slot_count = 0;
  std::uint64_t one_shot_nbytes = 0;
  double timeout_s = 0;
  CpuMask cpus{};
};

std::string describe(const Hello& hello) {
  return text("slot_nbytes=", hello.slot_nbytes, " slot_count=", hello.slot_count,
              " one_shot_nbytes=", hello.one_shot_nbytes, " timeout_s=", hello.timeout_s);
}

Hello read_hello(const net::Parcel& parcel, int rank) {
  Hello hello;
  const std::uint64_t magic = hello.magic;
  if (parcel.bytes.size() == sizeof(hello)) std::memcpy(&hello, parcel.bytes.data(), sizeof(hello));
  if (parcel.bytes.size() != sizeof(hello) || hello.magic != magic)
    throw CollectiveMismatch(
        text("creating a communicator: rank ", rank, " did something else, or runs another version of zcomm"));
  return hello;
}

void check(const CommOptions& options) {
  if (!(options.timeout_s > 0)) throw InvalidArgument(text("timeout_s=", options.timeout_s, ": expected more than 0"));
  if (options.slot_count < 1) throw InvalidArgument(text("slot_count=", options.slot_count, ": expected at least 1"));
  if (options.slot_count > 1024) throw InvalidArgument(text("slot_count=", options.slot_count, ": at most 1024"));
  if (options.slot_nbytes < 1) throw InvalidArgument("slot_nbytes=0: expected at least 1");
}

}  // namespace

HostMemory::HostMemory(net::Mesh& mesh, const CommOptions& options)
    : rank_(mesh.rank()), slot_count_(0), slot_nbytes_(0) {
  check(options);
  const auto ranks = static_cast<std::size_t>(mesh.world_size());
  // A slot must hold a piece for each rank, each on a cache line of its own.
  slot_nbytes_ = round_up(std::max(options.slot_nbytes, ranks * 512), 4096);
  // A power of two divides 2^32, so slots still take turns when the step counter wraps.
  slot_count_ = static_cast<int>(std::bit_ceil(static_cast<unsigned>(options.slot_count)));
  const std::size_t nbytes = kSlotsBegin + slot_nbytes_ * static_cast<std::size_t>(slot_count_);
  heap::Segment mine = heap::Segment::create(nbytes);
  new (mine.data()) ControlBlock;

  Hello hello;
  hello.slot_nbytes = options.slot_nbytes;
  hello.slot_count = static_cast<std::uint64_t>(options.slot_count);
  hello.one_shot_nbytes = options.one_shot_nbytes;
  hello.timeout_s = options.timeout_s;
  hello.cpus = usable_cpus();
  net::Parcel parcel;
  parcel.bytes.resize(sizeof(hello));
  std::memcpy(parcel.bytes.data(), &hello, sizeof(hello));
  parcel.fd = UniqueFd(::fcntl(mine.fd(), F_DUPFD_CLOEXEC, 0));
  if (!parcel.fd) throw_system_error(errno, "duplicating a segment's descriptor");
  std::vector<net::Parcel> parcels = mesh.exchange(std::move(parcel), options.timeout_s);

  const std::string first = describe(read_hello(parcels[0], 0));
  for (int rank = 1; rank < mesh.world_size(); ++rank) {
    const std::string other = describe(read_hello(parcels[static_cast<std::size_t>(rank)], rank));
    if (other != first)
      throw CollectiveMismatch(text("communicator options differ: rank 0: ", first, "; rank ", rank, ": ", other));
  }
  CpuMask cpus{};
  for (int rank = 0; rank < mesh.world_size(); ++rank) {
    const CpuMask theirs = read_hello(parcels[static_cast<std::size_t>(rank)], rank).cpus;
    for (std::size_t i = 0; i < cpus.size(); ++i) cpus[i] |= theirs[i];
  }
  for (const std::uint64_t word : cpus) cpu_count_ += std::popcount(word);
  segments_.resize(ranks);
  for (std::size_t r = 0; r < ranks; ++r) {
    if (static_cast<int>(r) == rank_)
      segments_[r] = std::move(mine);
    else
      segments_[r] = heap::Segment::map(std::move(parcels[r].fd), nbytes);
    blocks_.push_back(std::launder(reinterpret_cast<ControlBlock*>(segments_[r].data())));
  }
}

std::byte* HostMemory::mail(int rank, std::uint32_t sequence) const {
  return segments_[static_cast<std::size_t>(rank)].data() + kMailBegin + (sequence & 1) * kMailNbytes;
}

std::byte* HostMemory::slot(int rank, std::uint32_t step) const {
  const std::size_t index = step % static_cast<std::uint32_t>(slot_count_);
  return segments_[static_cast<std::size_t>(rank)].data() + kSlotsBegin + index * slot_nbytes_;
}

void HostMemory::wake_all() const noexcept {
  for (int rank = 0; rank < world_size(); ++rank) {
    for (Entry& entry : block(rank).entries) wake(entry);
    for (Counter& counter : block(rank).counters) wake(counter);
  }
}

}  // namespace zcomm::coll
