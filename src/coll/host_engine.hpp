// HostEngine: the ranks of one host, over symmetric memory: enter, compare headers, choose a path, run it.
//
// [Note: entry] A rank writes its header, publishes `arrived`, and goes on once all have arrived: then all headers are
// there, inputs are ready to be read, and outputs may be written. Every rank sees the same headers, so a mismatch is
// the same error everywhere without another word.
// Thread rule: as Engine's.
#pragma once

#include <cstdint>
#include <memory>

#include "coll/direct.hpp"
#include "coll/engine.hpp"
#include "coll/host_messenger.hpp"
#include "coll/staged.hpp"
#include "coll/watch.hpp"

namespace zcomm::coll {

class HostEngine final : public Engine {
 public:
  /// Collective over `mesh`.
  HostEngine(std::shared_ptr<net::Mesh> mesh, const CommOptions& options, SymmetricMemory& symmetric);

  int rank() const override { return memory_.rank(); }
  int world_size() const override { return memory_.world_size(); }
  void run(Operation& operation) override;
  Messenger& messenger() override { return messenger_; }
  void close() noexcept override;
  void suspend_deadline(bool suspended) override { watch_.suspend_deadline(suspended); }
  std::size_t nbytes() const override { return memory_.nbytes(); }

 private:
  void enter(Operation& operation);
  void work(Operation& operation);

  std::shared_ptr<net::Mesh> mesh_;
  SymmetricMemory& symmetric_;
  HostMemory memory_;
  Watch watch_;
  StagedPath staged_;
  DirectPath direct_;
  HostMessenger messenger_;
  std::uint32_t sequence_ = 0;
};

}  // namespace zcomm::coll
