// NcclMessage: one side of a send or recv of device memory by NCCL; MessageFailures: why messages on a device are lost.
//
// A message has a Ticket, as a collective has: `ready` precedes it on its caller's stream, `end` is its end on the
// channel's. Thread rule: NcclMessage none of its own; MessageFailures free-threaded.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "coll/cuda/ticket.hpp"
#include "coll/failure_source.hpp"
#include "coll/late_clock.hpp"
#include "coll/messenger.hpp"
#include "device/device.hpp"

namespace zcomm::coll {

struct NcclMessage {
  bool is_send;
  int peer;  ///< -1: any rank, until it is matched
  int tag;
  DType dtype;
  ElementName element;
  std::uint64_t count;
  std::vector<Buffer> pieces;  ///< those that have elements; of a send they are only read
  const char* site;
  int* source = nullptr;
  std::uint64_t id = 0;      ///< the sender's number of it
  std::uint32_t number = 0;  ///< this rank's number of it
  bool is_eager = false;     ///< a send that has ended for its caller, from a copy
  bool is_launched = false;  ///< all of it is on the channel's stream
  device::Memory copy{};     ///< memory of the message's own
  LateClock clock{};
  std::shared_ptr<Ticket> ticket{};
  std::shared_ptr<Completion> completion{};  ///< null once it is finished, and of an eager one
};

/// "send to rank 1, tag 0, float32 count=5 at train.py:3".
std::string describe(const NcclMessage& message);

class MessageFailures final : public FailureSource {
 public:
  void add(const NcclMessage& message, const std::exception_ptr& error);
  void throw_if_failed(const Signature& during) const override;
  void throw_if_spoiled(const Signature& during) const override { throw_if_failed(during); }

 private:
  mutable std::mutex mutex_;
  std::map<std::uint32_t, std::exception_ptr> by_number_;
};

}  // namespace zcomm::coll
