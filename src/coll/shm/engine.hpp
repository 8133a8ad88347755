// ShmEngine: the ranks of one host, over symmetric memory: enter, compare signatures, choose a path, run it.
// Thread rule: as Engine's. Source: [Note: entry] in coll/shm/arrival.hpp.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "coll/engine.hpp"
#include "coll/shm/arrival.hpp"
#include "coll/shm/direct.hpp"
#include "coll/shm/liveness.hpp"
#include "coll/shm/one_shot.hpp"
#include "coll/shm/p2p/messenger.hpp"
#include "coll/shm/peer_copy.hpp"
#include "coll/shm/staged.hpp"
#include "coll/shm/staged_all_to_all.hpp"

namespace zcomm::coll {

class ShmEngine final : public Engine {
 public:
  /// Collective over `mesh`.
  ShmEngine(std::shared_ptr<net::Mesh> mesh, const CommOptions& options, SymmetricMemory& symmetric);

  OwnParts own_parts() const override { return OwnParts::read; }
  void set_callers(const Callers& callers) override { liveness_.set_callers(callers); }
  int rank() const override { return memory_.rank(); }
  int world_size() const override { return memory_.world_size(); }
  void run(Operation& operation) override;
  Messenger& messenger() override { return messenger_; }
  void fail(const std::string& why) noexcept override { liveness_.fail(why); }
  void close() noexcept override;
  void suspend_deadline(bool suspended) override { liveness_.suspend_deadline(suspended); }
  double longest_s() const override { return liveness_.longest_s(); }
  /// As Liveness::set_context.
  void set_context(std::function<std::string()> context) { liveness_.set_context(std::move(context)); }
  std::size_t nbytes() const override { return memory_.nbytes() + messenger_.nbytes(); }

 private:
  void work(Operation& operation);
  void work_by_peer_copy(const Operation& operation);

  std::shared_ptr<net::Mesh> mesh_;
  SymmetricMemory& symmetric_;
  HostMemory memory_;
  Liveness liveness_;
  Arrival arrival_;
  SlotRing slot_ring_;
  StagedPath staged_;
  StagedAllToAll staged_all_to_all_;
  DirectPath direct_;
  OneShotPath one_shot_;
  PeerCopyPath peer_copy_;
  ShmMessenger messenger_;
};

}  // namespace zcomm::coll
