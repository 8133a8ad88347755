// HostMessenger: send and recv between ranks of one host.
#pragma once

#include "coll/control_block.hpp"
#include "coll/messenger.hpp"
#include "coll/watch.hpp"

namespace zcomm::coll {

class HostMessenger final : public Messenger {
 public:
  HostMessenger(const HostMemory& memory, Watch& watch) : memory_(memory), watch_(watch) {}
  Work send(std::span<const ConstBuffer> buffers, DType dtype, int dst, int tag, const Call& call) override;
  Work recv(std::span<const Buffer> buffers, DType dtype, int src, int tag, const Call& call, int* source) override;
  void close() noexcept override {}

 private:
  [[maybe_unused]] const HostMemory& memory_;
  [[maybe_unused]] Watch& watch_;
};

}  // namespace zcomm::coll
