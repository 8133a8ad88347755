// Binds the fused Adam step and the order-independent sum of squares.
#include "bindings.hpp"
#include "zcomm/adam.hpp"
#include "zcomm/exact_sum.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

AdamShard shard_of(std::uintptr_t weight, DType weight_dtype, std::uintptr_t grad, DType grad_dtype,
                   std::uintptr_t state, std::size_t count, std::size_t tile_count, std::size_t begin,
                   std::size_t end) {
  return {reinterpret_cast<void*>(weight),
          weight_dtype,
          reinterpret_cast<const void*>(grad),
          grad_dtype,
          reinterpret_cast<std::byte*>(state),
          count,
          tile_count,
          begin,
          end};
}

}  // namespace

void bind_optim(py::module_& m) {
  py::class_<AdamParams>(m, "AdamParams")
      .def(py::init<>())
      .def_readwrite("lr", &AdamParams::lr)
      .def_readwrite("beta1", &AdamParams::beta1)
      .def_readwrite("beta2", &AdamParams::beta2)
      .def_readwrite("eps", &AdamParams::eps)
      .def_readwrite("weight_decay", &AdamParams::weight_decay)
      .def_readwrite("adamw", &AdamParams::adamw)
      .def_readwrite("maximize", &AdamParams::maximize)
      .def_readwrite("step", &AdamParams::step)
      .def_readwrite("grad_scale", &AdamParams::grad_scale);
  py::class_<AdamShard>(m, "AdamShard")
      .def(py::init(&shard_of), py::arg("weight"), py::arg("weight_dtype"), py::arg("grad"), py::arg("grad_dtype"),
           py::arg("state"), py::arg("count"), py::arg("tile_count"), py::arg("begin"), py::arg("end"));
  m.def("adam_state_nbytes", &adam_state_nbytes, py::arg("weight"), py::arg("count"));
  m.def("adam_step", &adam_step, py::arg("shard"), py::arg("params"), py::arg("threads") = 0,
        py::call_guard<py::gil_scoped_release>());
  m.def(
      "split_master",
      [](const AdamShard& shard, std::uintptr_t master) {
        split_master(shard, reinterpret_cast<const float*>(master));
      },
      py::call_guard<py::gil_scoped_release>());
  m.def(
      "join_master",
      [](const AdamShard& shard, std::uintptr_t master) { join_master(shard, reinterpret_cast<float*>(master)); },
      py::call_guard<py::gil_scoped_release>());

  py::class_<ExactSum>(m, "ExactSum", py::buffer_protocol())
      .def(py::init<>())
      .def("clear", &ExactSum::clear)
      .def("add", &ExactSum::add, py::arg("term"))
      .def("value", &ExactSum::value)
      .def("normalize", &ExactSum::normalize)
      .def(
          "add_squares",
          [](ExactSum& self, std::uintptr_t grad, DType dtype, std::size_t count) {
            add_squares(self, reinterpret_cast<const void*>(grad), dtype, count);
          },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("address",
                             [](ExactSum& self) { return reinterpret_cast<std::uintptr_t>(self.words().data()); })
      .def_buffer([](ExactSum& self) {
        return py::buffer_info(self.words().data(), static_cast<py::ssize_t>(self.words().size()));
      });
}

}  // namespace zcomm::bindings
