// Binds what else a device's stream does: scale, copy lists, optimizer steps, block squares; see
// device/stream_kernels.hpp and optim/stream_optim.hpp. Memory arrives as addresses.
#include <cstring>
#include <string>

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

/// Parameters that a step takes together; only their gradients' memory moves.
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

/// Copy items as bytes, to be copied to a device.
py::bytes copy_items(const std::vector<std::uintptr_t>& dst, const std::vector<std::uintptr_t>& src,
                     const std::vector<std::uint64_t>& counts) {
  if (dst.size() != counts.size() || src.size() != counts.size())
    throw InvalidArgument(text("copy_items: ", dst.size(), " dst, ", src.size(), " src, ", counts.size(), " counts"));
  std::vector<device::CopyItem> items;
  for (std::size_t i = 0; i < counts.size(); ++i)
    items.push_back({pointer<void>(dst[i]), pointer<const void>(src[i]), counts[i]});
  device::number_chunks(items);
  return {reinterpret_cast<const char*>(items.data()), items.size() * sizeof(device::CopyItem)};
}

void copy_list(device::Stream& stream, const std::string& bytes, std::uintptr_t on_device, DType dst_dtype,
               DType src_dtype) {
  if (bytes.size() % sizeof(device::CopyItem) != 0)
    throw InvalidArgument(text("stream_copy_list: items of ", bytes.size(), " bytes; copy_items makes them"));
  std::vector<device::CopyItem> items(bytes.size() / sizeof(device::CopyItem));
  if (!items.empty()) std::memcpy(items.data(), bytes.data(), bytes.size());
  stream.kernels().copy_list({items, pointer<const device::CopyItem>(on_device), dst_dtype, src_dtype});
}

void bind_element_kernels(py::module_& m) {
  m.def(
      "stream_scale",
      [](device::Stream& stream, std::uintptr_t dst, DType dst_dtype, std::uintptr_t src, DType src_dtype,
         std::size_t count, float factor, std::uintptr_t more, std::uintptr_t nonfinite) {
        stream.kernels().scale({pointer<void>(dst), dst_dtype, pointer<const void>(src), src_dtype, count, factor,
                                pointer<const float>(more), pointer<std::uint64_t>(nonfinite)});
      },
      py::arg("stream"), py::arg("dst"), py::arg("dst_dtype"), py::arg("src"), py::arg("src_dtype"), py::arg("count"),
      py::arg("factor"), py::arg("more") = 0, py::arg("nonfinite") = 0, NoGil());
  m.def("copy_items", &copy_items, py::arg("dst"), py::arg("src"), py::arg("counts"));
  m.def("stream_copy_list", &copy_list, py::arg("stream"), py::arg("items"), py::arg("on_device"), py::arg("dst_dtype"),
        py::arg("src_dtype"), NoGil());
}

}  // namespace

void bind_stream_kernels(py::module_& m) {
  bind_element_kernels(m);
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
