// Finding and remembering call sites (call_site.hpp).
//
// Each code object is looked up once and then known by its address, for which it is kept alive; each position in it has
// one text. A program has few of either. Skipped are zcomm, the standard library, decorators (torch wraps its calls in
// some) and code that torch generates. Frames of torch are skipped as well, but if there are no others (a hook of
// torch's under DDP) the innermost at least names the purpose; the frames that every torch.distributed call passes
// through name nothing. Source: Python C API, "Frame objects".
#include "call_site.hpp"

#include <pybind11/gil_safe_call_once.h>
#include <pybind11/pybind11.h>

#include <initializer_list>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

enum class Owner { none, torch, program };

struct Code {
  Owner owner;
  std::string file;                            // without its directory
  std::unordered_map<int, std::string> sites;  // by place
};

/// A frame's position in its code. Its line is found by reading the code's table of lines, which takes longer.
int place_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030B0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

/// The directory of an imported module, with a slash at its end; empty if it is not imported.
std::string directory_of(const char* module) {
  const py::dict modules = py::module_::import("sys").attr("modules");
  if (!modules.contains(module)) return "";
  const auto file = py::cast<std::string>(py::getattr(modules[module], "__file__", py::str()));
  return file.substr(0, file.rfind('/') + 1);
}

bool is_in(const std::string& directory, const std::string& path) {
  return !directory.empty() && path.starts_with(directory);
}

struct Directories {
  std::string zcomm = directory_of("zcomm"), torch = directory_of("torch"), standard = directory_of("os");
};

/// Python may run another thread while they are found, so a thread that waited with the interpreter's lock would
/// deadlock.
const Directories& directories() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<Directories> once;
  return once.call_once_and_store_result([] { return Directories{}; }).get_stored();
}

bool ends_with_any(const std::string& path, std::initializer_list<const char*> ends) {
  for (const char* end : ends)
    if (path.ends_with(end)) return true;
  return false;
}

Owner owner_of(const std::string& path) {
  const Directories& known = directories();
  if (is_in(known.zcomm, path)) return Owner::none;
  if (is_in(known.torch, path)) {
    const bool is_on_every_way =
        path.find("/_dynamo/") != std::string::npos ||
        ends_with_any(path, {"/distributed_c10d.py", "/c10d_logger.py", "/_functional_collectives.py",
                             "/_contextlib.py", "/futures/__init__.py", "/nn/modules/module.py"});
    return is_on_every_way ? Owner::none : Owner::torch;
  }
  if (ends_with_any(path, {"/typing_extensions.py", "/decorator.py"}) || path.find("/wrapt/") != std::string::npos)
    return Owner::none;
  // Generated code and frozen modules; a program itself may be "<stdin>" or "<string>".
  if (path.starts_with("<eval_with_key>") || path.starts_with("<frozen ")) return Owner::none;
  const bool is_standard = is_in(known.standard, path) && path.find("-packages/") == std::string::npos;
  return is_standard ? Owner::none : Owner::program;  // a thread of ours ends in the standard library
}

Code look_at(PyCodeObject* code) {
  const py::object filename = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code)).attr("co_filename");
  const auto path = py::cast<std::string>(filename);
  return {owner_of(path), path.substr(path.rfind('/') + 1), {}};
}

const char* text_of(Code& code, PyFrameObject* frame) {
  std::string& text = code.sites[place_of(frame)];
  if (text.empty()) text = code.file + ":" + std::to_string(PyFrame_GetLineNumber(frame));
  return text.c_str();
}

thread_local const char* given_site = nullptr;

}  // namespace

void set_call_site(const char* site) { given_site = site; }

const char* call_site() {
  if (given_site != nullptr) return given_site;
  static std::unordered_map<PyCodeObject*, Code> known;
  constexpr int kDepth = 64;  // a module's forward under DDP, compiled, is some 20 deep
  PyFrameObject* frame = PyThreadState_GetFrame(PyThreadState_Get());
  const char* site = "";
  for (int depth = 0; frame != nullptr && depth < kDepth; ++depth) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    auto place = known.find(code);
    if (place == known.end()) {
      Code looked_at = look_at(code);  // another thread may have looked, too, meanwhile
      const auto [at, is_new] = known.emplace(code, std::move(looked_at));
      if (is_new) Py_INCREF(code);
      place = at;
    }
    Py_DECREF(code);
    const Owner owner = place->second.owner;
    if (owner == Owner::program || (owner == Owner::torch && *site == '\0')) site = text_of(place->second, frame);
    if (owner == Owner::program) break;
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return site;
}

}  // namespace zcomm::bindings
