// Finding and remembering call sites (call_site.hpp).
//
// Each code object is looked at once and then known by its address, for which it is kept alive; each (code, line) has
// one text. A program has few of either. Source: Python C API, "Frame objects".
#include "call_site.hpp"

#include <pybind11/pybind11.h>

#include <map>
#include <string>
#include <unordered_map>

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

struct Code {
  bool is_ours;
  std::string file;  // without its directory
  std::unordered_map<int, std::string> lines;
};

Code look_at(PyCodeObject* code) {
  const py::object filename = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code)).attr("co_filename");
  const auto path = py::cast<std::string>(filename);
  static const std::string package = [] {
    const auto init = py::cast<std::string>(py::module_::import("zcomm").attr("__file__"));
    return init.substr(0, init.rfind('/') + 1);
  }();
  return {path.starts_with(package), path.substr(path.rfind('/') + 1), {}};
}

}  // namespace

const char* call_site() {
  static std::unordered_map<PyCodeObject*, Code> known;
  constexpr int kDepth = 12;
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  const char* site = "";
  for (int depth = 0; frame != nullptr && depth < kDepth; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    auto place = known.find(code);
    if (place == known.end()) {
      place = known.emplace(code, look_at(code)).first;
      Py_INCREF(code);
    }
    Py_DECREF(code);
    if (!place->second.is_ours) {
      const int line = PyFrame_GetLineNumber(frame);
      std::string& text = place->second.lines[line];
      if (text.empty()) text = place->second.file + ":" + std::to_string(line);
      site = text.c_str();
      break;
    }
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return site;
}

}  // namespace zcomm::bindings
