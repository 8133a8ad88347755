// Engine: carries out the operations of one communicator over shared memory, over links, or both.
//
// The Communicator (communicator.cpp) checks arguments, keeps call order and remembers failures; an Engine moves bytes.
// Invariants: an operation that throws leaves the communicator unusable, and the other ranks detect it or receive the
// failure; the only exception is AllocationRefused, which the engine catches. Thread rule: run() is called by one
// thread at a time; everything else may be called concurrently with it, from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "coll/callers.hpp"
#include "coll/messenger.hpp"
#include "coll/operation.hpp"

namespace zcomm::coll {

class Engine {
 public:
  virtual ~Engine() = default;

  /// The treatment of Operation::own.
  enum class OwnParts : std::uint8_t {
    refused,  ///< buffers are on a device
    copied,   ///< to their final addresses, before run()
    read,     ///< run() reads them in place, or copies them
  };
  virtual OwnParts own_parts() const { return OwnParts::copied; }

  /// Not null: operations with a codec are refused, for this reason.
  virtual const char* codec_refusal() const { return nullptr; }
  /// The number of parts that reduce_scatter with a codec encodes.
  virtual int coded_parts() const { return world_size(); }
  /// Whether run() serves this kind with a codec; otherwise EncodedCalls (coll/encoded.hpp) makes it of bytes.
  virtual bool runs_coded(OpKind) const { return false; }

  /// Once, before any run: `callers` outlives the engine.
  virtual void set_callers(const Callers&) {}

  virtual int rank() const = 0;
  virtual int world_size() const = 0;

  /// On the caller's thread, when an operation has been called, before run(): for engines with buffers that become
  /// ready on a stream. An error is kept for run().
  virtual void prepare(Operation&, const Call&) noexcept {}
  /// Compares the operation with the other ranks' and carries it out. Throws its failure.
  virtual void run(Operation& operation) = 0;
  /// Whether ranks compare operations behind them; then verify() waits for it, in the order of operations.
  virtual bool compares_behind() const { return false; }
  /// See Communicator::verify. Throws the failure.
  virtual void verify(bool /*behind*/) {}
  /// Whether it runs Operation::split.
  virtual bool splits() const { return false; }
  /// send and recv.
  virtual Messenger& messenger() = 0;

  /// Tells the other ranks that this one cannot go on, and why, if the engine has the means; close() follows. From the
  /// thread that runs operations, outside of run().
  virtual void fail(const std::string&) noexcept {}
  /// Makes running operations end with Error, and shows the other ranks that this one has left.
  virtual void close() noexcept = 0;
  /// While suspended, no rank that waits for this one is at the deadline.
  virtual void suspend_deadline(bool suspended) = 0;
  /// The longest that an operation may wait.
  virtual double longest_s() const { return CommOptions{}.timeout_s; }
  /// Bytes that it holds for control and staging.
  virtual std::size_t nbytes() const = 0;
};

/// Makes an engine that keeps its symmetric allocations in `memory`. Collective; called again for each duplicate.
using EngineFactory = std::function<std::unique_ptr<Engine>(SymmetricMemory& memory)>;

std::unique_ptr<Communicator> make_communicator(EngineFactory factory);

}  // namespace zcomm::coll
