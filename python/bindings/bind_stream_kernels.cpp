// Binds the other operations of a device's stream: optimizer steps, block squares, checksums; see
// optim/stream_optim.hpp. Memory arrives as addresses.
#include "base/error.hpp"
#include "bindings.hpp"
#include "device/device.hpp"
#include "optim/stream_optim.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

using optim::OnDevice;
using NoGil = py::call_guard<py::gil_scoped_release>;

template <class T>
T* pointer(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

/// Parameters of one fused step; only their gradients' memory moves.
struct StreamAdamBatch {
  std::vector<optim::StreamAdamItem> items;

  void add(const OptimShard& shard, std::uintptr_t counter) { items.push_back({shard, pointer<float>(counter)}); }
  void step(device::Stream& stream, const AdamParams& params, const std::vector<std::uintptr_t>& grads,
            std::uintptr_t factors, double clip, std::uintptr_t lr, std::uintptr_t grad_scale,
            std::uintptr_t found_inf) {
    if (grads.size() != items.size())
      throw InvalidArgument(text("adam: ", grads.size(), " gradients for ", items.size(), " items"));
    for (std::size_t i = 0; i < items.size(); ++i) items[i].shard.grad = pointer<const void>(grads[i]);
    const optim::StreamAdam options{.params = params,
                                    .clip = clip,
                                    .lr = pointer<const float>(lr),
                                    .grad_scale = pointer<const float>(grad_scale),
                                    .found_inf = pointer<const float>(found_inf)};
    optim::stream_adam(stream.kernels(), items, options, pointer<OnDevice<optim::AdamFactors>>(factors));
  }
};

template <class Params>
void bind_step(py::module_& m, const char* name) {
  m.def(
      name,
      [](device::Stream& stream, const OptimShard& shard, const Params& params) {
        optim::stream_step(stream.kernels(), shard, params);
      },
      py::arg("stream"), py::arg("shard"), py::arg("params"), NoGil());
}

}  // namespace

void bind_stream_kernels(py::module_& m) {
  m.attr("ADAM_FACTORS_NBYTES") = sizeof(OnDevice<optim::AdamFactors>);
  py::class_<StreamAdamBatch>(m, "StreamAdamBatch")
      .def(py::init<>())
      .def("__len__", [](const StreamAdamBatch& self) { return self.items.size(); })
      .def("add", &StreamAdamBatch::add, py::arg("shard"), py::arg("counter"))
      .def("step", &StreamAdamBatch::step, py::arg("stream"), py::arg("params"), py::arg("grads"), py::arg("factors"),
           py::arg("clip") = 1.0, py::arg("lr") = 0, py::arg("grad_scale") = 0, py::arg("found_inf") = 0, NoGil());
  bind_step<AdamParams>(m, "stream_adam_step");
  bind_step<LionParams>(m, "stream_lion_step");
  bind_step<SgdParams>(m, "stream_sgd_step");
  bind_step<AdagradParams>(m, "stream_adagrad_step");
  m.def(
      "stream_squares",
      [](device::Stream& stream, std::uintptr_t sums, std::uintptr_t grad, DType dtype, std::size_t count) {
        optim::stream_squares(stream.kernels(), pointer<double>(sums), pointer<const void>(grad), dtype, count);
      },
      py::arg("stream"), py::arg("sums"), py::arg("grad"), py::arg("dtype"), py::arg("count"), NoGil());
  m.def(
      "stream_checksum",
      [](device::Stream& stream, std::uintptr_t sum, std::uintptr_t data, std::size_t nbytes) {
        stream.kernels().checksum({pointer<std::uint64_t>(sum), pointer<const void>(data), nbytes});
      },
      py::arg("stream"), py::arg("sum"), py::arg("data"), py::arg("nbytes"), NoGil());
  m.attr("EXACT_SUM_WORDS") = ExactSum::kWords;
  m.def(
      "stream_norm",
      [](device::Stream& stream, std::uintptr_t words, std::uintptr_t grad, DType dtype, std::size_t count) {
        optim::stream_norm(stream.kernels(), pointer<std::int64_t>(words), pointer<const void>(grad), dtype, count);
      },
      py::arg("stream"), py::arg("words"), py::arg("grad"), py::arg("dtype"), py::arg("count"), NoGil());
  m.def(
      "add_words",
      [](ExactSum& sum, std::uintptr_t words) {
        optim::add_words(
            sum, std::span<const std::int64_t, ExactSum::kWords>(pointer<const std::int64_t>(words), ExactSum::kWords));
      },
      py::arg("sum"), py::arg("words"), NoGil());
  m.def(
      "add_block_sums",
      [](ExactSum& sum, std::uintptr_t sums, std::size_t count) {
        optim::add_block_sums(sum, {pointer<const double>(sums), count});
      },
      py::arg("sum"), py::arg("sums"), py::arg("count"), NoGil());
}

}  // namespace zcomm::bindings
