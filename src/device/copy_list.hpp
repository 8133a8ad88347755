// CopyList: many small tensors to or from one flat buffer as one operation: packing, unpacking, either with a cast.
//
// The items lie in device memory, so that thousands need one launch; the caller makes them once and copies them there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "zcomm/dtype.hpp"

namespace zcomm::device {

inline constexpr std::size_t kCopyChunk = 4096;  ///< elements of an item that one block of threads copies

/// first_chunk: of number_chunks.
struct CopyItem {
  void* dst;
  const void* src;
  std::uint64_t count;
  std::uint64_t first_chunk = 0;
};

/// Numbers the chunks of all items consecutively and returns their count.
std::uint64_t number_chunks(std::span<CopyItem> items);

/// dst[i] = convert(src[i]) for each item. items: the host's copy of on_device, numbered; read only during the call.
/// on_device: in device memory, read when the operation runs. Equal types (any) are copied as bytes; otherwise any pair
/// of f32, bf16, f16.
struct CopyList {
  std::span<const CopyItem> items;
  const CopyItem* on_device;
  DType dst_dtype, src_dtype;
};

/// Throws InvalidArgument: dtypes, null, chunks without numbers.
void check_copy_list(const CopyList& list);

/// On host memory; takes the items on_device.
void copy_list(const CopyItem* on_device, std::size_t count, DType dst_dtype, DType src_dtype);

}  // namespace zcomm::device
