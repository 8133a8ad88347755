// Messages of a device that cannot continue: the same text from CUDA and from the simulated device.
#pragma once

#include <cstddef>
#include <string>

namespace zcomm::device {

/// "cuda:0: out of memory: asked for 2.00 GiB, 1.00 GiB of 80.00 GiB are free; ..." with a remedy.
std::string out_of_memory_text(const std::string& device, std::size_t asked_nbytes, std::size_t free_nbytes,
                               std::size_t total_nbytes);
enum class Absence { no_driver, old_driver, none_shown, forked, other };
/// Why no GPU was found, with a remedy. cuda_driver, cuda_build: the CUDA version of the driver, and of the build, as
/// 1000 major + 10 minor. said: the runtime's message.
std::string no_device_text(Absence why, int cuda_driver, int cuda_build, const std::string& said);
/// The GPU, or this process's context on it, is lost. The second argument: the call that found out, and its error.
std::string lost_text(const std::string& device, const std::string& what);

}  // namespace zcomm::device
