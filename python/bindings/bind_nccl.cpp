// Binds the communicator over NCCL.
#include "bindings.hpp"
#include "coll/cuda/nccl_engine.hpp"
#include "coll/cuda/nccl_library.hpp"

namespace py = pybind11;

namespace zcomm::bindings {

void bind_nccl(py::module_& m) {
  py::class_<coll::NcclComm, std::shared_ptr<coll::NcclComm>>(m, "NcclPart");
  m.def(
      "nccl_version", [](const std::string& library) { return coll::NcclLibrary::load(library).version(); },
      py::arg("library") = "");
  m.def(
      "make_nccl_communicator",
      [](Communicator& control, Communicator& guard, Communicator* messages, std::shared_ptr<net::Mesh> watched,
         int device, const std::string& library, double timeout_s, std::shared_ptr<coll::NcclComm> joined) {
        const coll::NcclHosts hosts{control, guard, messages, std::move(joined)};
        const coll::NcclOptions options{.timeout_s = timeout_s};
        return hold(coll::make_nccl_communicator(hosts, std::move(watched), device, library, options));
      },
      py::arg("control"), py::arg("guard"), py::arg("messages"), py::arg("watched"), py::arg("device"),
      py::arg("library"), py::arg("timeout_s"), py::arg("joined") = nullptr, py::keep_alive<0, 1>(),
      py::keep_alive<0, 2>(), py::keep_alive<0, 3>(), py::call_guard<BlockingCall>());
}

}  // namespace zcomm::bindings
