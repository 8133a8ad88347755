// Tensor of DLPack as its C ABI has it; names are ours. It is the same in versions 0.x and 1.x.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zcomm::bindings {

struct DlTensor {
  void* data;
  std::int32_t device_type, device_index;
  std::int32_t dimensions;
  std::uint8_t type_code, type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};
static_assert(sizeof(DlTensor) == 48 && offsetof(DlTensor, shape) == 24);

}  // namespace zcomm::bindings
