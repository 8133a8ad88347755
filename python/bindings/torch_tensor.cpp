// Reading torch tensors (torch_tensor.hpp): by DLPack's table of C functions, which torch has since 2.10, else by
// attributes of interned names. The storage's size is an attribute in both. Links nothing of torch. Source: dlpack.h
// 1.3, "DLPackExchangeAPI".
#include "torch_tensor.hpp"

#include <pybind11/gil_safe_call_once.h>

#include <array>
#include <cstdint>
#include <utility>

#include "dlpack_tensor.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

// The layout is DLPack's ABI; names are ours.
struct DlExchange {
  std::uint32_t major, minor;
  void* older;
  void* allocate;
  void* to_managed;
  void* from_managed;
  int (*read)(void* object, DlTensor* out);  // 0, or -1 with Python's error set
  void* current_stream;
};

/// Null if this torch has no table of this version.
const DlExchange* exchange_of(PyObject* type) {
  PyObject* capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
  const auto* table = capsule == nullptr
                          ? nullptr
                          : static_cast<const DlExchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
  Py_XDECREF(capsule);  // the type keeps it
  PyErr_Clear();
  return table != nullptr && table->major == 1 && table->minor >= 3 ? table : nullptr;
}

/// Names and singletons, looked up once and kept for the life of the process.
struct Torch {
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
  PyObject* is_neg = PyUnicode_InternFromString("is_neg");
  PyObject* dtype = PyUnicode_InternFromString("dtype");
  PyObject* data_ptr = PyUnicode_InternFromString("data_ptr");
  PyObject* numel = PyUnicode_InternFromString("numel");
  PyObject* storage_offset = PyUnicode_InternFromString("storage_offset");
  PyObject* untyped_storage = PyUnicode_InternFromString("untyped_storage");
  PyObject* nbytes = PyUnicode_InternFromString("nbytes");
  py::module_ torch = py::module_::import("torch");
  PyObject* tensor = kept("Tensor");
  std::array<std::pair<PyObject*, DType>, 9> dtypes{{{kept("float32"), DType::float32},
                                                     {kept("float64"), DType::float64},
                                                     {kept("float16"), DType::float16},
                                                     {kept("bfloat16"), DType::bfloat16},
                                                     {kept("int8"), DType::int8},
                                                     {kept("uint8"), DType::uint8},
                                                     {kept("int32"), DType::int32},
                                                     {kept("int64"), DType::int64},
                                                     {kept("bool"), DType::boolean}}};

  const DlExchange* exchange = exchange_of(tensor);

  PyObject* kept(const char* name) const { return torch.attr(name).cast<py::object>().release().ptr(); }
};

const Torch& torch() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<const Torch*> once;
  // Never destroyed, because the interpreter may end before.
  return *once.call_once_and_store_result([] { return static_cast<const Torch*>(new Torch); }).get_stored();
}

/// A new reference; throws Python's exception.
py::object attribute(PyObject* object, PyObject* name) {
  PyObject* value = PyObject_GetAttr(object, name);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

py::object called(PyObject* object, PyObject* method) {
  PyObject* value = PyObject_CallMethodNoArgs(object, method);
  if (value == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(value);
}

/// Null, and no error, if the method raised.
py::object called_or_null(PyObject* object, PyObject* method) {
  PyObject* value = PyObject_CallMethodNoArgs(object, method);
  if (value == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

std::optional<DType> dtype_of(const DlTensor& tensor) {
  enum { integer, unsigned_integer, floating, bfloat = 4, boolean = 6 };
  switch (tensor.type_code << 8 | tensor.type_bits) {
    case floating << 8 | 32:
      return DType::float32;
    case floating << 8 | 64:
      return DType::float64;
    case floating << 8 | 16:
      return DType::float16;
    case bfloat << 8 | 16:
      return DType::bfloat16;
    case integer << 8 | 8:
      return DType::int8;
    case unsigned_integer << 8 | 8:
      return DType::uint8;
    case integer << 8 | 32:
      return DType::int32;
    case integer << 8 | 64:
      return DType::int64;
    case boolean << 8 | 8:
      return DType::boolean;
    default:
      return std::nullopt;
  }
}

bool is_contiguous(const DlTensor& tensor) {
  std::int64_t stride = 1;
  for (int axis = tensor.dimensions - 1; axis >= 0; --axis) {
    if (tensor.shape[axis] != 1 && tensor.strides[axis] != stride) return false;
    stride *= tensor.shape[axis];
  }
  return true;
}

/// Empty if the slower path must read the tensor.
std::optional<TorchTensor> read_by_dlpack(const DlExchange& exchange, PyObject* object) {
  DlTensor tensor;
  if (exchange.read(object, &tensor) != 0) {
    PyErr_Clear();
    return std::nullopt;
  }
  constexpr int kHost = 1;
  const auto dtype = dtype_of(tensor);
  if (tensor.device_type != kHost || tensor.type_lanes != 1 || !dtype || !is_contiguous(tensor)) return std::nullopt;
  std::size_t count = 1;
  for (int axis = 0; axis < tensor.dimensions; ++axis) count *= static_cast<std::size_t>(tensor.shape[axis]);
  return TorchTensor{{static_cast<std::byte*>(tensor.data) + tensor.byte_offset, count}, *dtype};
}

std::optional<TorchTensor> read_by_attributes(const Torch& names, PyObject* tensor) {
  if (attribute(tensor, names.is_cpu).ptr() != Py_True) return std::nullopt;
  // Layouts other than strided raise here, or have no storage: Python's slower path names the layout.
  if (called_or_null(tensor, names.is_contiguous).ptr() != Py_True) return std::nullopt;
  const py::object dtype = attribute(tensor, names.dtype);
  for (const auto& [known, core] : names.dtypes) {
    if (dtype.ptr() != known) continue;
    const auto address = PyLong_AsUnsignedLongLong(called(tensor, names.data_ptr).ptr());
    const auto count = PyLong_AsSize_t(called(tensor, names.numel).ptr());
    return TorchTensor{{reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), count}, core};
  }
  return std::nullopt;
}

}  // namespace

std::optional<TorchTensor> read_torch_tensor(py::handle object) {
  const Torch& names = torch();
  PyObject* tensor = object.ptr();
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != names.tensor) return std::nullopt;  // a subclass may differ
  const py::object storage = called_or_null(tensor, names.untyped_storage);
  if (!storage) return std::nullopt;
  const auto read =
      names.exchange != nullptr ? read_by_dlpack(*names.exchange, tensor) : read_by_attributes(names, tensor);
  if (!read || read->buffer.count == 0) return read;
  if (called(tensor, names.is_neg).ptr() != Py_False) return std::nullopt;  // the values are not in memory
  const auto offset = PyLong_AsSize_t(called(tensor, names.storage_offset).ptr());
  const auto held = PyLong_AsSize_t(called(storage.ptr(), names.nbytes).ptr());
  if ((offset + read->buffer.count) * size_of(read->dtype) > held) return std::nullopt;  // it was shrunk
  return read;
}

}  // namespace zcomm::bindings
