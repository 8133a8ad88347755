// See private_memory.hpp.
#include "coll/tcp/private_memory.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/error.hpp"

namespace zcomm::coll {
namespace {

class PrivateBuffer final : public SymmetricBuffer {
 public:
  PrivateBuffer(std::size_t nbytes, int rank, SymmetricMemory& memory)
      : nbytes_(nbytes), rank_(rank), accounted_(memory.account(nbytes)) {
    // Shared, though no other process maps it: AddressRange::alias makes second mappings of it.
    void* const at = ::mmap(nullptr, mapped(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw_system_error(errno, text("cannot allocate ", nbytes, " bytes"));
    data_ = static_cast<std::byte*>(at);
  }
  ~PrivateBuffer() override { ::munmap(data_, mapped()); }

  std::byte* data() override { return data_; }
  std::byte* peer(int rank) override {
    if (rank != rank_)
      throw Unsupported(text("peer(", rank, "): rank ", rank_, " sees no memory of a rank that it has only links to"));
    return data_;
  }
  std::size_t nbytes() const override { return nbytes_; }

 private:
  std::size_t mapped() const { return std::max<std::size_t>(nbytes_, 1); }

  const std::size_t nbytes_;
  const int rank_;
  const std::shared_ptr<void> accounted_;
  std::byte* data_ = nullptr;
};

}  // namespace

std::shared_ptr<SymmetricBuffer> make_private_buffer(std::size_t nbytes, int rank, SymmetricMemory& memory) {
  return std::make_shared<PrivateBuffer>(nbytes, rank, memory);
}

void check_links(const std::vector<PeerSockets>& links, const std::vector<bool>& wanted, int rank, bool allow_one) {
  if (links.size() != wanted.size())
    throw InvalidArgument(text("links to ", links.size(), " ranks; the mesh has ", wanted.size()));
  for (std::size_t r = 0; r < links.size(); ++r) {
    const std::size_t most = allow_one && static_cast<int>(r) != rank ? 1 : 0;
    if (!wanted[r] && links[r].size() > most)
      throw InvalidArgument(text("rank ", rank, " was given ", links[r].size(), " links to rank ", r, ", which needs ",
                                 most, " at most"));
    if (wanted[r] && links[r].size() < 2)
      throw InvalidArgument(text("rank ", rank, " was given ", links[r].size(), " links to rank ", r,
                                 "; at least two are needed (collectives, messages)"));
    for (const UniqueFd& socket : links[r])
      if (!socket) throw InvalidArgument(text("a link of rank ", rank, " to rank ", r, " is not an open descriptor"));
  }
}

EngineFactory once(std::function<std::unique_ptr<Engine>(SymmetricMemory&)> make) {
  return [make = std::move(make), used = false](SymmetricMemory& memory) mutable {
    if (std::exchange(used, true))
      throw Unsupported("duplicate: a second communicator between hosts needs sockets of its own; make it by split()");
    return make(memory);
  };
}

}  // namespace zcomm::coll
