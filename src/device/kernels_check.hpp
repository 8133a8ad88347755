// Argument checks that the kernels of host and device share; they throw InvalidArgument.
#pragma once

#include "device/kernels.hpp"

namespace zcomm::device {

void check_reduce(const Reduce& args);
/// With the limit of stream_kernels.hpp on the number of buffers.
void check_device_reduce(const Reduce& args);
void check_cast(const void* dst, DType dst_dtype, const void* src, DType src_dtype, std::size_t count);

/// Checks a copy or fill on a stream.
void check_pointers(const char* what, const void* dst, const void* src, std::size_t nbytes);

}  // namespace zcomm::device
