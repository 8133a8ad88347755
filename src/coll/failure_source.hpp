// FailureSource: the failure of a communicator, for threads that wait for one of its operations on a device.
//
// Thread rule: free-threaded.
#pragma once

#include "coll/signature.hpp"

namespace zcomm::coll {

class FailureSource {
 public:
  virtual ~FailureSource() = default;
  /// Throws the failure of any rank, naming `during`. The device may then never finish that operation.
  virtual void throw_if_failed(const Signature& during) const = 0;
  /// The same, if the results of `during` are not valid although the device has passed it.
  virtual void throw_if_spoiled(const Signature& /*during*/) const {}
};

}  // namespace zcomm::coll
