// Binds the element kernels, for engines that bring their own transport (python/zcomm/backends).
#include "bindings.hpp"
#include "device/kernels.hpp"

namespace py = pybind11;

namespace zcomm::bindings {

void bind_device(py::module_& m) {
  m.def(
      "reduce",
      [](const std::vector<std::uintptr_t>& dst, const std::vector<std::uintptr_t>& src, std::size_t count, DType dtype,
         DType out_dtype, ReduceOp op, bool accumulate) {
        std::vector<void*> to;
        std::vector<const void*> from;
        for (const auto address : dst) to.push_back(reinterpret_cast<void*>(address));
        for (const auto address : src) from.push_back(reinterpret_cast<const void*>(address));
        const py::gil_scoped_release release;
        device::reduce({.dst = to,
                        .src = from,
                        .count = count,
                        .in = dtype,
                        .out = out_dtype,
                        .op = op,
                        .accumulate = accumulate});
      },
      py::arg("dst"), py::arg("src"), py::arg("count"), py::arg("dtype"), py::arg("out_dtype"), py::arg("op"),
      py::arg("accumulate") = false);
}

}  // namespace zcomm::bindings
