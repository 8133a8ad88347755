// zcomm_testing: doubles of a device, for tests. Built only for a checkout (editable install).
#include <string>
#include <utility>

#include "doubles/simulated/device.hpp"
#include "testing/testing.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

void bind_simulated(py::module_& m) {
  m.def(
      "simulated_device",
      [](std::uint64_t seed, double max_delay_s, std::size_t memory_nbytes, std::string name, bool dry_run) {
        return device::make_simulated_device({seed, max_delay_s, memory_nbytes, std::move(name), dry_run});
      },
      py::arg("seed") = 0, py::arg("max_delay_s") = 0.0, py::arg("memory_nbytes") = 0, py::arg("name") = "simulated",
      py::arg("dry_run") = false);
}

}  // namespace
}  // namespace zcomm::bindings

PYBIND11_MODULE(zcomm_testing, m) {
  m.doc() = "Doubles of a device, for tests: simulated devices, recorded devices and their races, NCCL.";
  py::module_::import("zcomm._core");  // has the classes that these functions take and return, and the exceptions
  zcomm::bindings::bind_simulated(m);
  zcomm::bindings::bind_fake_nccl(m);
  zcomm::bindings::bind_trace(m);
}
