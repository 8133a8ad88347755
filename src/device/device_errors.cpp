// Messages (device/device_errors.hpp).
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

std::string cuda_text(int version) { return text("CUDA ", version / 1000, ".", version % 1000 / 10); }

std::string advice_on(Absence why, int cuda_driver, int cuda_build) {
  switch (why) {
    case Absence::no_driver:
      return "no NVIDIA driver is loaded: install one, or use device=\"cpu\"";
    case Absence::old_driver:
      return text("the driver is too old: it serves ", cuda_text(cuda_driver), ", and this build needs ",
                  cuda_text(cuda_build), ": update the driver, or install a build for an older CUDA");
    case Absence::none_shown:
      return "the driver shows no GPU to this process: see CUDA_VISIBLE_DEVICES and nvidia-smi, or use device=\"cpu\"";
    case Absence::forked:
      return "this process was forked from one that uses CUDA: start it by spawn, or use device=\"cpu\"";
    case Absence::other:
      break;
  }
  return "nvidia-smi shows which GPUs and driver this machine has; device=\"cpu\" needs none";
}

}  // namespace

std::string no_device_text(Absence why, int cuda_driver, int cuda_build, const std::string& said) {
  return text("no CUDA device (", said, "): ", advice_on(why, cuda_driver, cuda_build));
}

std::string out_of_memory_text(const std::string& device, std::size_t asked_nbytes, std::size_t free_nbytes,
                               std::size_t total_nbytes) {
  return text(device, ": out of memory: asked for ", size_text(asked_nbytes), ", ", size_text(free_nbytes), " of ",
              size_text(total_nbytes), " are free, ", size_text(total_nbytes - free_nbytes),
              " in use; use a smaller batch or smaller buckets, offload more (optimizer, parameters or activations to "
              "cpu or nvme), or end other processes on this GPU (nvidia-smi lists them)");
}

std::string lost_text(const std::string& device, const std::string& what) {
  return text(device, ": the GPU is lost to this process (", what,
              "): every later call on it fails, and its contents are lost; restart the process from its last "
              "checkpoint; `dmesg | grep -i xid` names the cause");
}

}  // namespace zcomm::device
