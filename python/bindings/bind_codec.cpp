// Binds codecs and their host kernels; see device/codec.hpp. Memory arrives as addresses, 0 for none.
#include "bindings.hpp"
#include "device/codec.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void encode(const Codec& codec, std::uintptr_t out, std::uintptr_t data, DType dtype, std::size_t count,
            std::uintptr_t error, DType error_dtype, float keep, std::uintptr_t base, DType base_dtype,
            std::uintptr_t mask, std::uint64_t seed, std::uint64_t first_index) {
  device::encode_in_parts(codec, {.out = at<std::byte>(out),
                                  .in = at<const void>(data),
                                  .dtype = dtype,
                                  .count = count,
                                  .error = at<void>(error),
                                  .error_dtype = error_dtype,
                                  .keep = keep,
                                  .base = at<void>(base),
                                  .base_dtype = base_dtype,
                                  .mask = at<const std::uint8_t>(mask),
                                  .seed = seed,
                                  .first_index = first_index});
}

void decode(const Codec& codec, std::uintptr_t out, const std::vector<std::uintptr_t>& parts, std::size_t count,
            DType dtype, bool accumulate, float divide_by, std::uintptr_t mask) {
  std::vector<const std::byte*> in;
  for (const std::uintptr_t part : parts) in.push_back(at<const std::byte>(part));
  device::decode_sum_in_parts(codec, {.out = at<void>(out),
                                      .in = in,
                                      .count = count,
                                      .dtype = dtype,
                                      .accumulate = accumulate,
                                      .divide_by = divide_by,
                                      .mask = at<const std::uint8_t>(mask)});
}

}  // namespace

void bind_codec(py::module_& m) {
  py::enum_<CodecKind>(m, "CodecKind")
      .value("block_int", CodecKind::block_int)
      .value("fp8_e4m3", CodecKind::fp8_e4m3)
      .value("sign", CodecKind::sign);
  py::class_<Codec>(m, "Codec")
      .def(py::init([](CodecKind kind, int bits, int rotate, bool stochastic) {
             const Codec codec{kind, bits, rotate, stochastic};
             check_codec(codec);
             return codec;
           }),
           py::arg("kind"), py::arg("bits") = 8, py::arg("rotate") = 0, py::arg("stochastic") = false)
      .def_readonly("kind", &Codec::kind)
      .def_readonly("bits", &Codec::bits)
      .def_readonly("rotate", &Codec::rotate)
      .def_readonly("stochastic", &Codec::stochastic)
      .def_property_readonly("id", &codec_id)
      .def("encoded_nbytes", &encoded_nbytes, py::arg("count"));
  m.def("encode", &encode, py::arg("codec"), py::arg("out"), py::arg("data"), py::arg("dtype"), py::arg("count"),
        py::arg("error") = 0, py::arg("error_dtype") = DType::float32, py::arg("keep") = 0.0f, py::arg("base") = 0,
        py::arg("base_dtype") = DType::bfloat16, py::arg("mask") = 0, py::arg("seed") = 0, py::arg("first_index") = 0,
        py::call_guard<py::gil_scoped_release>());
  m.def("decode", &decode, py::arg("codec"), py::arg("out"), py::arg("parts"), py::arg("count"),
        py::arg("dtype") = DType::float32, py::arg("accumulate") = false, py::arg("divide_by") = 1.0f,
        py::arg("mask") = 0, py::call_guard<py::gil_scoped_release>());
}

}  // namespace zcomm::bindings
