// Reading torch tensors (torch_tensor.hpp). Attributes by interned name; nothing of torch is linked.
#include "torch_tensor.hpp"

#include <pybind11/gil_safe_call_once.h>

#include <array>
#include <cstdint>
#include <utility>

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

/// Names and singletons, looked up once and kept for the life of the process.
struct Torch {
  PyObject* is_cpu = PyUnicode_InternFromString("is_cpu");
  PyObject* is_contiguous = PyUnicode_InternFromString("is_contiguous");
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

  PyObject* kept(const char* name) const { return torch.attr(name).cast<py::object>().release().ptr(); }
};

const Torch& torch() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<const Torch*> once;
  // Never destroyed: the interpreter may be gone by then.
  return *once.call_once_and_store_result([] { return static_cast<const Torch*>(new Torch); }).get_stored();
}

/// A new reference; throws what Python raised.
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

/// Null, and no error, where the method raised.
py::object called_or_null(PyObject* object, PyObject* method) {
  PyObject* value = PyObject_CallMethodNoArgs(object, method);
  if (value == nullptr) PyErr_Clear();
  return py::reinterpret_steal<py::object>(value);
}

}  // namespace

std::optional<TorchTensor> read_torch_tensor(py::handle object) {
  const Torch& names = torch();
  PyObject* tensor = object.ptr();
  if (reinterpret_cast<PyObject*>(Py_TYPE(tensor)) != names.tensor) return std::nullopt;  // a subclass may be anything
  if (attribute(tensor, names.is_cpu).ptr() != Py_True) return std::nullopt;
  // Other layouts than strided raise here, or have no storage: Python's longer way names the layout.
  const py::object storage = called_or_null(tensor, names.untyped_storage);
  if (!storage || called_or_null(tensor, names.is_contiguous).ptr() != Py_True) return std::nullopt;
  const py::object dtype = attribute(tensor, names.dtype);
  for (const auto& [known, core] : names.dtypes) {
    if (dtype.ptr() != known) continue;
    const auto address = PyLong_AsUnsignedLongLong(called(tensor, names.data_ptr).ptr());
    const auto count = PyLong_AsSize_t(called(tensor, names.numel).ptr());
    const auto offset = PyLong_AsSize_t(called(tensor, names.storage_offset).ptr());
    const auto held = PyLong_AsSize_t(called(storage.ptr(), names.nbytes).ptr());
    if (count > 0 && (offset + count) * size_of(core) > held) return std::nullopt;  // a storage that was made smaller
    return TorchTensor{{reinterpret_cast<void*>(static_cast<std::uintptr_t>(address)), count}, core};
  }
  return std::nullopt;
}

}  // namespace zcomm::bindings
