// Binds backend nccl over the stand-in for NCCL of the C++ tests, for ranks that are threads.
//
// Its kernels run on the streams of simulated devices. It has a copy of its own of the engine.
#include "coll/support/fake_nccl.hpp"

#include <memory>
#include <utility>

#include "bindings.hpp"
#include "coll/cuda/nccl_engine.hpp"
#include "coll/support/nccl_device.hpp"
#include "testing/testing.hpp"

namespace py = pybind11;

namespace zcomm::bindings {

void bind_fake_nccl(py::module_& m) {
  using test::FakeNccl;
  py::class_<FakeNccl, std::shared_ptr<FakeNccl>>(m, "FakeNccl")
      .def(py::init<>())
      .def("hold_kernels", &FakeNccl::hold_kernels, py::arg("rank"))
      .def("let_calls_differ", &FakeNccl::let_calls_differ)
      .def_property_readonly("made", &FakeNccl::made)
      .def_property_readonly("complaints", [](const FakeNccl&) { return test::failures().load(); })
      .def(
          "join",
          [](const FakeNccl&, Communicator& control, Communicator& guard, Communicator* messages,
             std::shared_ptr<net::Mesh> watched, std::shared_ptr<device::Device> device, double timeout_s,
             std::shared_ptr<coll::NcclComm> joined) {
            const coll::NcclHosts hosts{control, guard, messages, std::move(joined)};
            auto own = std::make_shared<test::NcclDevice>(control.rank(), std::move(device));
            return hold(coll::make_nccl_communicator(hosts, std::move(watched), std::move(own), FakeNccl::library(),
                                                     coll::NcclOptions{.timeout_s = timeout_s}));
          },
          py::arg("control"), py::arg("guard"), py::arg("messages"), py::arg("watched"), py::arg("device"),
          py::arg("timeout_s"), py::arg("joined") = nullptr, py::keep_alive<0, 1>(), py::keep_alive<0, 2>(),
          py::keep_alive<0, 3>(), py::keep_alive<0, 4>(), py::call_guard<py::gil_scoped_release>());
}

}  // namespace zcomm::bindings
