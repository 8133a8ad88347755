#include "device/copy_list.hpp"

#include "base/error.hpp"
#include "device/kernels.hpp"

namespace zcomm::device {
namespace {

bool is_cast(DType dtype) { return dtype == DType::float32 || dtype == DType::bfloat16 || dtype == DType::float16; }
std::uint64_t chunks_of(const CopyItem& item) { return (item.count + kCopyChunk - 1) / kCopyChunk; }

}  // namespace

std::uint64_t number_chunks(std::span<CopyItem> items) {
  std::uint64_t chunks = 0;
  for (CopyItem& item : items) {
    item.first_chunk = chunks;
    chunks += chunks_of(item);
  }
  return chunks;
}

void check_copy_list(const CopyList& list) {
  if (list.dst_dtype != list.src_dtype && !(is_cast(list.dst_dtype) && is_cast(list.src_dtype)))
    throw InvalidArgument(text("copy_list: from ", name_of(list.src_dtype), " to ", name_of(list.dst_dtype),
                               " is not served; the types must be equal, or float32, bfloat16 or float16"));
  if (!list.items.empty() && list.on_device == nullptr)
    throw InvalidArgument(text("copy_list: on_device is null, ", list.items.size(), " items"));
  std::uint64_t chunks = 0;
  for (std::size_t i = 0; i < list.items.size(); ++i) {
    const CopyItem& item = list.items[i];
    if (item.count > 0 && (item.dst == nullptr || item.src == nullptr))
      throw InvalidArgument(text("copy_list: ", item.dst == nullptr ? "dst" : "src", " of item ", i, " is null"));
    if (item.first_chunk != chunks)
      throw InvalidArgument(text("copy_list: item ", i, " begins at chunk ", item.first_chunk, ", not at ", chunks,
                                 "; number_chunks numbers them"));
    chunks += chunks_of(item);
  }
}

void copy_list(const CopyItem* on_device, std::size_t count, DType dst_dtype, DType src_dtype) {
  for (const CopyItem& item : std::span(on_device, count)) {
    if (dst_dtype == src_dtype) {
      copy(item.dst, item.src, item.count * size_of(dst_dtype));
    } else {
      cast(item.dst, dst_dtype, item.src, src_dtype, item.count);
    }
  }
}

}  // namespace zcomm::device
