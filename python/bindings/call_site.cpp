// Finding and remembering call sites (call_site.hpp).
//
// Each code object is looked at once and then known by its address, for which it is kept alive; each (code, line) has
// one text. A program has few of either. Frames of torch are passed over, too: who calls torch.distributed is asked
// for, and a program that is all torch (a hook under DDP) gets the innermost of them. So are those of the standard
// library, which threads and executors begin with. Source: Python C API, "Frame objects".
#include "call_site.hpp"

#include <pybind11/pybind11.h>

#include <map>
#include <string>
#include <unordered_map>

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

enum class Whose { ours, torchs, programs };

struct Code {
  Whose whose;
  std::string file;  // without its directory
  std::unordered_map<int, std::string> lines;
};

/// Of a package that has been imported, with a slash at its end; empty if it has not.
std::string directory_of(const char* package) {
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains(package)) return "";
  const auto init = py::cast<std::string>(modules[package].attr("__file__"));
  return init.substr(0, init.rfind('/') + 1);
}

/// Of the standard library: a thread of ours ends there.
bool is_standard(const std::string& path) {
  static const std::string library =
      py::cast<std::string>(py::module_::import("sysconfig").attr("get_path")("stdlib")) + "/";
  return path.starts_with(library) && path.find("-packages/") == std::string::npos;
}

Code look_at(PyCodeObject* code) {
  const py::object filename = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code)).attr("co_filename");
  const auto path = py::cast<std::string>(filename);
  static const std::string package = directory_of("zcomm"), torchs = directory_of("torch");
  const bool is_ours = path.starts_with(package) || is_standard(path),
             is_torchs = !torchs.empty() && path.starts_with(torchs);
  const Whose whose = is_ours ? Whose::ours : is_torchs ? Whose::torchs : Whose::programs;
  return {whose, path.substr(path.rfind('/') + 1), {}};
}

const char* text_of(Code& code, PyFrameObject* frame) {
  const int line = PyFrame_GetLineNumber(frame);
  std::string& text = code.lines[line];
  if (text.empty()) text = code.file + ":" + std::to_string(line);
  return text.c_str();
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
    const Whose whose = place->second.whose;
    if (whose == Whose::programs || (whose == Whose::torchs && *site == '\0')) site = text_of(place->second, frame);
    if (whose == Whose::programs) break;
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return site;
}

}  // namespace zcomm::bindings
