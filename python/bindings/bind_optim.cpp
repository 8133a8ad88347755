// Binds the fused optimizer steps and the order-independent sum of squares.
#include "bindings.hpp"
#include "zcomm/adagrad.hpp"
#include "zcomm/adam.hpp"
#include "zcomm/exact_sum.hpp"
#include "zcomm/lion.hpp"
#include "zcomm/optim_batch.hpp"
#include "zcomm/sgd.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

OptimShard shard_of(std::uintptr_t weight, DType weight_dtype, std::uintptr_t grad, DType grad_dtype,
                    std::uintptr_t state, std::size_t count, std::size_t tile_count, std::size_t begin, std::size_t end,
                    DType state_dtype, std::uint64_t first_index, std::uintptr_t addend, DType addend_dtype) {
  return {reinterpret_cast<void*>(weight),
          weight_dtype,
          reinterpret_cast<const void*>(grad),
          grad_dtype,
          reinterpret_cast<std::byte*>(state),
          count,
          tile_count,
          begin,
          end,
          state_dtype,
          first_index,
          reinterpret_cast<const void*>(addend),
          addend_dtype};
}

template <class Params>
void bind_step(py::module_& m, const char* name, void (*step)(const OptimShard&, const Params&, int, ExactSum*)) {
  m.def(name, step, py::arg("shard"), py::arg("params"), py::arg("threads") = 0, py::arg("squares") = nullptr,
        py::call_guard<py::gil_scoped_release>());
}

template <class Params>
void bind_batch(py::module_& m, const char* name) {
  using Batch = OptimBatch<Params>;
  py::class_<Batch>(m, name)
      .def(py::init<>())
      .def("__len__", &Batch::size)
      .def(
          "add",
          [](Batch& self, const OptimShard& shard, std::size_t group, std::uintptr_t counter, bool buffer, bool first) {
            self.add({shard, group, reinterpret_cast<float*>(counter), buffer, first});
          },
          py::arg("shard"), py::arg("group"), py::arg("counter") = 0, py::arg("buffer") = false,
          py::arg("first") = false)
      .def(
          "step",
          [](Batch& self, const std::vector<Params>& groups, const std::vector<std::uintptr_t>& grads, int threads,
             ExactSum* squares) {
            std::vector<const void*> pointers;
            pointers.reserve(grads.size());
            for (const std::uintptr_t grad : grads) pointers.push_back(reinterpret_cast<const void*>(grad));
            self.step(groups, pointers, threads, squares);
          },
          py::arg("groups"), py::arg("grads"), py::arg("threads") = 0, py::arg("squares") = nullptr,
          py::call_guard<py::gil_scoped_release>());
}

void bind_params(py::module_& m) {
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
  py::class_<SgdParams>(m, "SgdParams")
      .def(py::init<>())
      .def_readwrite("lr", &SgdParams::lr)
      .def_readwrite("momentum", &SgdParams::momentum)
      .def_readwrite("dampening", &SgdParams::dampening)
      .def_readwrite("weight_decay", &SgdParams::weight_decay)
      .def_readwrite("nesterov", &SgdParams::nesterov)
      .def_readwrite("maximize", &SgdParams::maximize)
      .def_readwrite("buffer", &SgdParams::buffer)
      .def_readwrite("first", &SgdParams::first)
      .def_readwrite("grad_scale", &SgdParams::grad_scale);
  py::class_<LionParams>(m, "LionParams")
      .def(py::init<>())
      .def_readwrite("lr", &LionParams::lr)
      .def_readwrite("beta1", &LionParams::beta1)
      .def_readwrite("beta2", &LionParams::beta2)
      .def_readwrite("weight_decay", &LionParams::weight_decay)
      .def_readwrite("maximize", &LionParams::maximize)
      .def_readwrite("grad_scale", &LionParams::grad_scale);
  py::class_<AdagradParams>(m, "AdagradParams")
      .def(py::init<>())
      .def_readwrite("lr", &AdagradParams::lr)
      .def_readwrite("lr_decay", &AdagradParams::lr_decay)
      .def_readwrite("weight_decay", &AdagradParams::weight_decay)
      .def_readwrite("eps", &AdagradParams::eps)
      .def_readwrite("maximize", &AdagradParams::maximize)
      .def_readwrite("step", &AdagradParams::step)
      .def_readwrite("grad_scale", &AdagradParams::grad_scale);
}

void bind_steps(py::module_& m) {
  py::class_<OptimShard>(m, "OptimShard")
      .def(py::init(&shard_of), py::arg("weight"), py::arg("weight_dtype"), py::arg("grad"), py::arg("grad_dtype"),
           py::arg("state"), py::arg("count"), py::arg("tile_count"), py::arg("begin"), py::arg("end"),
           py::arg("state_dtype") = DType::float32, py::arg("first_index") = 0, py::arg("addend") = 0,
           py::arg("addend_dtype") = DType::float32);
  bind_step(m, "adam_step", &adam_step);
  m.def(
      "adam_encode_state",
      [](const OptimShard& shard, std::uintptr_t first, std::uintptr_t second) {
        adam_encode_state(shard, reinterpret_cast<const float*>(first), reinterpret_cast<const float*>(second));
      },
      py::arg("shard"), py::arg("m"), py::arg("v"), py::call_guard<py::gil_scoped_release>());
  m.def(
      "adam_decode_state",
      [](const OptimShard& shard, std::uintptr_t first, std::uintptr_t second) {
        adam_decode_state(shard, reinterpret_cast<float*>(first), reinterpret_cast<float*>(second));
      },
      py::arg("shard"), py::arg("m"), py::arg("v"), py::call_guard<py::gil_scoped_release>());
  bind_step(m, "sgd_step", &sgd_step);
  bind_step(m, "lion_step", &lion_step);
  bind_step(m, "adagrad_step", &adagrad_step);
  bind_batch<AdamParams>(m, "AdamBatch");
  bind_batch<SgdParams>(m, "SgdBatch");
  bind_batch<LionParams>(m, "LionBatch");
  bind_batch<AdagradParams>(m, "AdagradBatch");
  m.def(
      "split_master",
      [](const OptimShard& shard, std::uintptr_t master, int arrays) {
        split_master(shard, reinterpret_cast<const float*>(master), arrays);
      },
      py::arg("shard"), py::arg("master"), py::arg("arrays") = 2, py::call_guard<py::gil_scoped_release>());
  m.def(
      "join_master",
      [](const OptimShard& shard, std::uintptr_t master, int arrays) {
        join_master(shard, reinterpret_cast<float*>(master), arrays);
      },
      py::arg("shard"), py::arg("master"), py::arg("arrays") = 2, py::call_guard<py::gil_scoped_release>());
}

void bind_exact_sum(py::module_& m) {
  py::class_<ExactSum>(m, "ExactSum", py::buffer_protocol())
      .def(py::init<>())
      .def("clear", &ExactSum::clear)
      .def("add", py::overload_cast<double>(&ExactSum::add), py::arg("term"))
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

}  // namespace

void bind_optim(py::module_& m) {
  bind_params(m);
  bind_steps(m);
  bind_exact_sum(m);
}

}  // namespace zcomm::bindings
