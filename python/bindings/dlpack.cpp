// DLPack capsules (dlpack.hpp).
#include "dlpack.hpp"

#include <cstdint>
#include <string>

#include "dlpack_tensor.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

// The layout is DLPack's ABI; names are ours.
struct ManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(ManagedTensor* self);
};
enum { kHost = 1, kCuda = 2, kUnsignedInteger = 1 };

struct Held {
  ManagedTensor managed;
  std::int64_t shape, stride;
  DeviceMemory memory;
};

void delete_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, "dltensor") == 0) return;  // a consumer renames it and deletes it itself
  auto* const managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  managed->deleter(managed);
}

}  // namespace

std::pair<int, int> dlpack_device(const DeviceMemory& memory) {
  const std::string& name = memory.device->name();
  if (name.rfind("cuda:", 0) != 0) return {kHost, 0};
  return {kCuda, std::stoi(name.substr(5))};
}

py::capsule dlpack_capsule(const DeviceMemory& memory) {
  const auto [type, index] = dlpack_device(memory);
  auto* const held = new Held{{}, static_cast<std::int64_t>(memory.nbytes), 1, memory};
  held->managed = {{memory.data.get(), type, index, 1, kUnsignedInteger, 8, 1, &held->shape, &held->stride, 0},
                   held,
                   [](ManagedTensor* self) {
                     auto* const last = static_cast<Held*>(self->context);
                     if (PyGILState_Check() == 0) return delete last;
                     const py::gil_scoped_release release;  // as for DeviceMemory
                     delete last;
                   }};
  return py::capsule(&held->managed, "dltensor", &delete_capsule);
}

}  // namespace zcomm::bindings
