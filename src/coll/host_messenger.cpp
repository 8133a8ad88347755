// send and recv on one host (coll/host_messenger.hpp).
#include "coll/host_messenger.hpp"

#include "base/error.hpp"

namespace zcomm::coll {

Work HostMessenger::send(std::span<const ConstBuffer>, DType, int, int, const Call&) {
  throw Unsupported("send: not on this backend yet");
}

Work HostMessenger::recv(std::span<const Buffer>, DType, int, int, const Call&, int*) {
  throw Unsupported("recv: not on this backend yet");
}

}  // namespace zcomm::coll
