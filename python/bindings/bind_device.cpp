// Binds devices (streams, events, memory) and the host's element kernels. Memory arrives as addresses.
#include <cstring>
#include <string>

#include "base/error.hpp"
#include "bindings.hpp"
#include "device/cuda/cuda.hpp"
#include "device/device.hpp"
#include "device/kernels.hpp"
#include "dlpack.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

using device::Device;
using device::Event;
using device::Stream;
using NoGil = py::call_guard<py::gil_scoped_release>;

/// Addresses as Python passes them.
struct Reduction {
  std::vector<void*> dst;
  std::vector<const void*> src;
  Reduction(const std::vector<std::uintptr_t>& to, const std::vector<std::uintptr_t>& from) {
    for (const auto address : to) dst.push_back(reinterpret_cast<void*>(address));
    for (const auto address : from) src.push_back(reinterpret_cast<const void*>(address));
  }
  device::Reduce args(std::size_t count, DType in, DType out, ReduceOp op, bool accumulate) const {
    return {.dst = dst, .src = src, .count = count, .in = in, .out = out, .op = op, .accumulate = accumulate};
  }
};

void* pointer(std::uintptr_t address) { return reinterpret_cast<void*>(address); }

py::bytes pack(const device::SharedHandle& handle) {
  std::string bytes(reinterpret_cast<const char*>(handle.bytes.data()), handle.bytes.size());
  bytes.append(reinterpret_cast<const char*>(&handle.offset), sizeof(handle.offset));
  return bytes;
}

device::SharedHandle unpack(const std::string& bytes) {
  device::SharedHandle handle;
  const std::size_t expected = handle.bytes.size() + sizeof(handle.offset);
  if (bytes.size() != expected)
    throw InvalidArgument(
        text("a handle of ", bytes.size(), " bytes; expected ", expected, ", from share() or handle()"));
  std::memcpy(handle.bytes.data(), bytes.data(), handle.bytes.size());
  std::memcpy(&handle.offset, bytes.data() + handle.bytes.size(), sizeof(handle.offset));
  return handle;
}

DeviceMemory allocate(const std::shared_ptr<Device>& self, std::size_t nbytes) {
  const py::gil_scoped_release release;
  return {self, self->allocate(nbytes), nbytes};
}

/// A simulated stream finishes its work before it is destroyed, so the interpreter lock must not be held.
std::shared_ptr<Stream> hold(std::unique_ptr<Stream> stream) {
  return {stream.release(), [](Stream* self) {
            std::unique_ptr<Stream> last(self);
            if (PyGILState_Check() == 0) return;
            const py::gil_scoped_release release;
            last.reset();
          }};
}

void bind_stream(py::module_& m) {
  py::class_<Event, std::shared_ptr<Event>>(m, "Event")
      .def("done", &Event::done, NoGil())
      .def("synchronize", &Event::synchronize, NoGil())
      .def("wait_for", &Event::wait_for, py::arg("patience_s"), NoGil())
      .def("handle", [](Event& self) {
        device::SharedHandle handle;
        {
          const py::gil_scoped_release release;
          handle = self.handle();
        }
        return pack(handle);
      });
  py::class_<Stream, std::shared_ptr<Stream>>(m, "Stream")
      .def("record", &Stream::record, py::arg("event"), NoGil())
      .def("wait", &Stream::wait, py::arg("event"), NoGil())
      .def(
          "copy",
          [](Stream& self, std::uintptr_t dst, std::uintptr_t src, std::size_t nbytes) {
            self.copy(pointer(dst), pointer(src), nbytes);
          },
          py::arg("dst"), py::arg("src"), py::arg("nbytes"), NoGil())
      .def(
          "fill",
          [](Stream& self, std::uintptr_t dst, std::uint8_t value, std::size_t nbytes) {
            self.fill(pointer(dst), value, nbytes);
          },
          py::arg("dst"), py::arg("value"), py::arg("nbytes"), NoGil())
      .def(
          "reduce",
          [](Stream& self, const std::vector<std::uintptr_t>& dst, const std::vector<std::uintptr_t>& src,
             std::size_t count, DType dtype, DType out_dtype, ReduceOp op, bool accumulate) {
            self.kernels().reduce(Reduction(dst, src).args(count, dtype, out_dtype, op, accumulate));
          },
          py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("dtype"), py::arg("out_dtype"), py::arg("op"),
          py::arg("accumulate") = false, NoGil())
      .def(
          "cast",
          [](Stream& self, std::uintptr_t dst, DType dst_dtype, std::uintptr_t src, DType src_dtype,
             std::size_t count) { self.kernels().cast(pointer(dst), dst_dtype, pointer(src), src_dtype, count); },
          py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("count"), NoGil())
      .def("done", &Stream::done, NoGil())
      .def("synchronize", &Stream::synchronize, NoGil())
      .def_property_readonly("native", &Stream::native)
      .def_property_readonly("is_host", &Stream::is_host);
}

void bind_devices(py::module_& m) {
  // Freeing waits for the device, which may wait for work that another thread of the program has yet to start.
  py::class_<DeviceMemory, std::unique_ptr<DeviceMemory, DeleteWithoutGil<DeviceMemory>>>(m, "DeviceMemory")
      .def_readonly("nbytes", &DeviceMemory::nbytes)
      .def_property_readonly("address",
                             [](const DeviceMemory& self) { return reinterpret_cast<std::uintptr_t>(self.data.get()); })
      .def("__dlpack__", [](const DeviceMemory& self, const py::kwargs&) { return dlpack_capsule(self); })
      .def("__dlpack_device__", &dlpack_device);
  py::class_<Device, std::shared_ptr<Device>>(m, "Device")
      .def_property_readonly("name", &Device::name)
      .def(
          "make_stream", [](Device& self, bool urgent) { return hold(self.make_stream(urgent)); },
          py::arg("urgent") = false, NoGil())
      .def(
          "adopt_stream", [](Device& self, std::uintptr_t native) { return hold(self.adopt_stream(native)); },
          py::arg("native"), NoGil())
      .def(
          "make_event", [](Device& self, bool shared) { return std::shared_ptr<Event>(self.make_event(shared)); },
          py::arg("shared") = false, NoGil())
      .def("allocate", &allocate, py::arg("nbytes"))
      .def("memory",
           [](Device& self) {
             const auto memory = [&] {
               const py::gil_scoped_release release;
               return self.memory();
             }();
             return std::pair(memory.free_nbytes, memory.total_nbytes);
           })
      .def(
          "share", [](Device& self, std::uintptr_t address) { return pack(self.share(pointer(address))); },
          py::arg("address"))
      .def(
          "open_memory",
          [](const std::shared_ptr<Device>& self, const std::string& handle, std::size_t nbytes) {
            return DeviceMemory{self, self->open_memory(unpack(handle)), nbytes};
          },
          py::arg("handle"), py::arg("nbytes"), NoGil())
      .def(
          "open_event",
          [](Device& self, const std::string& handle) {
            return std::shared_ptr<Event>(self.open_event(unpack(handle)));
          },
          py::arg("handle"), NoGil())
      .def("lose_after", &Device::lose_after, py::arg("n"));
  m.def("cuda_device", &device::make_cuda_device, py::arg("index"), NoGil());
}

}  // namespace

void bind_device(py::module_& m) {
  m.def(
      "reduce",
      [](const std::vector<std::uintptr_t>& dst, const std::vector<std::uintptr_t>& src, std::size_t count, DType dtype,
         DType out_dtype, ReduceOp op,
         bool accumulate) { device::reduce(Reduction(dst, src).args(count, dtype, out_dtype, op, accumulate)); },
      py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("dtype"), py::arg("out_dtype"), py::arg("op"),
      py::arg("accumulate") = false, NoGil());
  m.def(
      "page_lock",
      [](std::uintptr_t address, std::size_t nbytes) { return device::cuda::page_lock(pointer(address), nbytes); },
      py::arg("address"), py::arg("nbytes"), NoGil());
  m.def(
      "page_unlock", [](std::uintptr_t address) { device::cuda::page_unlock(pointer(address)); }, py::arg("address"),
      NoGil());
  bind_stream(m);
  bind_devices(m);
}

}  // namespace zcomm::bindings
