// Wording (device/device_errors.hpp).
#include "device/device_errors.hpp"

#include <iomanip>
#include <sstream>

#include "base/error.hpp"

namespace zcomm::device {
namespace {

std::string size_text(std::size_t nbytes) {
  const char* const units[] = {"bytes", "KiB", "MiB", "GiB"};
  double size = static_cast<double>(nbytes);
  std::size_t unit = 0;
  for (; unit < 3 && size >= 1024; ++unit) size /= 1024;
  std::ostringstream out;
  out << std::fixed << std::setprecision(unit == 0 ? 0 : 2) << size << " " << units[unit];
  return out.str();
}

}  // namespace

std::string out_of_memory_text(const std::string& device, std::size_t asked_nbytes, std::size_t free_nbytes,
                               std::size_t total_nbytes) {
  return text(device, ": out of memory: asked for ", size_text(asked_nbytes), ", ", size_text(free_nbytes), " of ",
              size_text(total_nbytes), " are free, ", size_text(total_nbytes - free_nbytes),
              " in use; use a smaller batch or smaller buckets, offload more (optimizer, parameters or activations to "
              "cpu or nvme), or end other processes on this GPU (nvidia-smi lists them)");
}

std::string lost_text(const std::string& device, const std::string& what) {
  return text(device, ": the GPU is lost to this process (", what,
              "): every later call on it fails, and what was on it is gone; restart the process from its last "
              "checkpoint; `dmesg | grep -i xid` names the cause");
}

}  // namespace zcomm::device
