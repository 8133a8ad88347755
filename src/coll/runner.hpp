// Runner: what happens in one operation: enter, compare headers, choose a path, run it.
//
// [Note: entry] A rank writes its header, publishes `arrived`, and goes on once all have arrived: then all headers are
// there, inputs are ready to be read, and outputs may be written. Every rank sees the same headers, so a mismatch is
// the same error everywhere without another word.
// Thread rule: run() belongs to the progress thread; close() may be called from any.
#pragma once

#include <cstdint>
#include <memory>

#include "coll/direct.hpp"
#include "coll/operation.hpp"
#include "coll/staged.hpp"
#include "coll/watch.hpp"

namespace zcomm::coll {

class Runner {
 public:
  /// Collective over `mesh`.
  Runner(std::shared_ptr<net::Mesh> mesh, const CommOptions& options, SymmetricMemory& symmetric);

  /// Throws what went wrong; the communicator is unusable then.
  void run(Operation& operation);

  Watch& watch() { return watch_; }
  const HostMemory& memory() const { return memory_; }

 private:
  void enter(Operation& operation);
  void work(Operation& operation);

  std::shared_ptr<net::Mesh> mesh_;
  SymmetricMemory& symmetric_;
  HostMemory memory_;
  Watch watch_;
  StagedPath staged_;
  DirectPath direct_;
  std::uint32_t sequence_ = 0;
};

}  // namespace zcomm::coll
