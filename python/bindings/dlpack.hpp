// Device memory for torch without a copy: the structures of DLPack that torch.from_dlpack reads.
//
// The capsule holds the memory until the tensor made from it is destroyed. Source: dmlc/dlpack, dlpack.h, version 0.x.
#pragma once

#include <memory>

#include "bindings.hpp"
#include "device/device.hpp"

namespace zcomm::bindings {

/// Memory of a device, with its owner.
struct DeviceMemory {
  std::shared_ptr<device::Device> device;  ///< dropped after the memory
  device::Memory data;
  std::size_t nbytes = 0;
};

/// A one-dimensional tensor of bytes.
pybind11::capsule dlpack_capsule(const DeviceMemory& memory);
/// (device type, index)
std::pair<int, int> dlpack_device(const DeviceMemory& memory);

}  // namespace zcomm::bindings
