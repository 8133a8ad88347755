// Binds the communicator over the devices of one host, and its symmetric memory.
#include "bindings.hpp"
#include "coll/cuda/ipc_engine.hpp"
#include "dlpack.hpp"

namespace py = pybind11;

namespace zcomm::bindings {

void bind_cuda_ipc(py::module_& m) {
  m.def(
      "make_cuda_ipc_communicator",
      [](std::shared_ptr<net::Mesh> mesh, std::shared_ptr<device::Device> device, double timeout_s,
         std::size_t slot_nbytes, double limit_s, double warn_s) {
        return hold(coll::make_cuda_ipc_communicator(std::move(mesh), std::move(device),
                                                     {timeout_s, slot_nbytes, limit_s, warn_s}));
      },
      py::arg("mesh"), py::arg("device"), py::arg("timeout_s"),
      py::arg("slot_nbytes") = coll::CudaIpcOptions{}.slot_nbytes, py::arg("limit_s") = coll::CudaIpcOptions{}.limit_s,
      py::arg("warn_s") = coll::CudaIpcOptions{}.warn_s, py::call_guard<BlockingCall>());
  m.def(
      "allocate_on",
      [](Communicator& comm, std::shared_ptr<device::Device> device, std::size_t nbytes) {
        const BlockingCall blocking;
        std::shared_ptr<SymmetricBuffer> buffer = comm.allocate(nbytes);
        void* const data = buffer->data();
        return DeviceMemory{std::move(device), {std::move(buffer), data}, nbytes};
      },
      py::arg("communicator"), py::arg("device"), py::arg("nbytes"));
}

}  // namespace zcomm::bindings
