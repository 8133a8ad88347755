// Binds element types, errors, Work, raw memory and queries of the machine.
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <exception>
#include <optional>

#include "base/cpu_features.hpp"
#include "base/env.hpp"
#include "base/error.hpp"
#include "base/interrupt.hpp"
#include "base/notices.hpp"
#include "base/thread_pool.hpp"
#include "base/worker_load.hpp"
#include "bindings.hpp"
#include "device/cuda/cuda.hpp"
#include "zcomm/dtype.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

constexpr double kSlice_s = 0.1;  // between checks for signals

// Kept for the life of the interpreter, like exception types.
py::object& error_type(int index) {
  static py::object types[3];
  return types[index];
}
enum { kMismatch, kPeerLost, kCuda };

void raise_os_error(const SystemError& error) {
  const py::object type = py::module_::import("builtins").attr("OSError");
  const py::object instance =
      error.path.empty() ? type(error.code, error.what()) : type(error.code, error.what(), error.path);
  PyErr_SetObject(type.ptr(), instance.ptr());
}

void translate(std::exception_ptr pointer) {
  try {
    if (pointer) std::rethrow_exception(pointer);
  } catch (const Interrupted&) {
    if (PyErr_Occurred() == nullptr) PyErr_SetNone(PyExc_KeyboardInterrupt);  // else the handler's exception
  } catch (const InvalidArgument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const CollectiveMismatch& error) {
    PyErr_SetString(error_type(kMismatch).ptr(), error.what());
  } catch (const PeerLost& error) {
    const py::object instance = error_type(kPeerLost)(error.what());
    instance.attr("rank") = error.job_rank >= 0 ? error.job_rank : error.rank;
    instance.attr("group_rank") = error.rank;
    PyErr_SetObject(error_type(kPeerLost).ptr(), instance.ptr());
  } catch (const Timeout& error) {
    PyErr_SetString(PyExc_TimeoutError, error.what());
  } catch (const SystemError& error) {
    raise_os_error(error);
  } catch (const Unsupported& error) {
    PyErr_SetString(PyExc_NotImplementedError, error.what());
  } catch (const CudaError& error) {
    PyErr_SetString(error_type(kCuda).ptr(), error.what());
  } catch (const Error& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
}

py::object new_error(const char* name, py::handle base, const char* doc) {
  py::dict body;
  body["__doc__"] = doc;
  body["__module__"] = "zcomm";
  return py::module_::import("builtins").attr("type")(name, py::make_tuple(base), body);
}

void bind_errors(py::module_& m) {
  error_type(kMismatch) = new_error("CollectiveMismatch", PyExc_RuntimeError,
                                    "Ranks called different collectives; raised on every rank, names both sides.");
  error_type(kPeerLost) =
      new_error("PeerLost", PyExc_ConnectionError,
                "A rank died or left while others needed it: `rank` of the job, `group_rank` of the "
                "communicator; -1: not known.");
  for (const char* rank : {"rank", "group_rank"}) py::setattr(error_type(kPeerLost), rank, py::int_(-1));
  error_type(kCuda) = new_error("CudaError", PyExc_RuntimeError, "A CUDA call failed.");
  m.attr("CollectiveMismatch") = error_type(kMismatch);
  m.attr("PeerLost") = error_type(kPeerLost);
  m.attr("CudaError") = error_type(kCuda);
  py::register_exception_translator(translate);
}

/// Runs the handlers of signals; returns whether one has raised, and counts it.
bool is_interrupted() {
  log_notices();
  if (PyErr_CheckSignals() == 0) return false;
  ++interrupt_count();
  return true;
}

/// Called periodically by threads that wait inside of the core; only Python's own threads may take its lock.
void check_signals() {
  if (!BlockingCall::is_running()) return;
  const py::gil_scoped_acquire acquire;
  if (is_interrupted()) throw Interrupted();
  Stop::check();
}

/// Errors of signal handlers that ran in a place that cannot raise, until the interpreter takes them (under its lock).
std::deque<py::object>& postponed_errors() {
  static auto* const errors = new std::deque<py::object>;  // may be needed until the process ends
  return *errors;
}

int raise_postponed(void*) {
  auto& errors = postponed_errors();
  if (errors.empty()) return 0;
  const py::object error = std::move(errors.front());
  errors.pop_front();
  PyErr_SetObject(py::type::handle_of(error).ptr(), error.ptr());
  return -1;
}

/// Fetches the current error, and raises it in the main thread when that continues.
void postpone_error() {
  py::error_already_set error;
  postponed_errors().push_back(error.value());
  if (Py_AddPendingCall(&raise_postponed, nullptr) != 0) {
    postponed_errors().pop_back();
    error.restore();
    PyErr_WriteUnraisable(nullptr);
  }
}

/// Ctrl-C must reach a program that waits for another rank.
template <class End>
void wait_interruptibly(Work& work, std::optional<double> timeout_s, const End& end) {
  for (double left_s = timeout_s.value_or(0.0);;) {
    const double slice_s = timeout_s ? std::min(kSlice_s, left_s) : kSlice_s;
    {
      const py::gil_scoped_release release;
      if (work.wait_for(slice_s, !timeout_s)) return end();
    }
    if (is_interrupted()) throw py::error_already_set();
    if (timeout_s && (left_s -= slice_s) <= 0.0)
      throw Timeout(text("Work.wait: not done after ", *timeout_s, " s; the operation goes on"));
  }
}

}  // namespace

/// An error of a log handler is printed, as logging does.
void log_notices() {
  if (!has_notices()) return;
  const py::error_scope kept;
  try {
    const py::object warning = py::module_::import("logging").attr("getLogger")("zcomm").attr("warning");
    for (const std::string& line : take_notices()) warning("%s", line);
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("zcomm: a notice that could not be logged");
  }
}

void Stop::check() {
  for (const auto& stop : current())
    if (stop->is_set_) throw Error(stop->why_);
}

namespace {

/// Whether an exception ends the main thread's code that started `work`: then its drop must not wait.
bool is_unwinding(const HeldWork& work) {
  const bool is_main_thread = ::getpid() == ::gettid();
  return is_main_thread && (work.started_after != interrupt_count() || PyEval_GetFrame() == nullptr);
}

}  // namespace

void DropWork::operator()(HeldWork* work) const {
  const py::error_scope raised;  // preserves an error in flight
  if (is_unwinding(*work)) {
    const py::gil_scoped_release release;
    work->give_up();
    delete work;
    return;
  }
  for (bool ended = false; !ended;) {
    {
      const py::gil_scoped_release release;
      ended = work->wait_for(kSlice_s, true);
    }
    if (ended || !is_interrupted()) continue;
    postpone_error();
    const py::gil_scoped_release release;
    work->give_up();
    break;
  }
  const py::gil_scoped_release release;
  delete work;
}

void bind_base(py::module_& m) {
  bind_errors(m);
  set_interrupt_check(&check_signals);

  py::enum_<DType>(m, "DType")
      .value("float32", DType::float32)
      .value("float64", DType::float64)
      .value("float16", DType::float16)
      .value("bfloat16", DType::bfloat16)
      .value("int8", DType::int8)
      .value("uint8", DType::uint8)
      .value("int32", DType::int32)
      .value("int64", DType::int64)
      .value("bool", DType::boolean);
  py::enum_<ReduceOp>(m, "ReduceOp")
      .value("sum", ReduceOp::sum)
      .value("avg", ReduceOp::avg)
      .value("min", ReduceOp::min)
      .value("max", ReduceOp::max)
      .value("prod", ReduceOp::prod);
  py::enum_<ReduceOrder>(m, "ReduceOrder").value("any", ReduceOrder::any).value("rank", ReduceOrder::rank);

  py::class_<HeldWork, WorkHolder>(m, "Work")
      .def(
          "wait",
          [](HeldWork& self, std::optional<double> timeout_s) {
            wait_interruptibly(self, timeout_s, [&] { self.wait(); });
          },
          py::arg("timeout") = std::nullopt)
      .def(
          "wait_on",
          [](HeldWork& self, std::uintptr_t stream, std::optional<double> timeout_s) {
            wait_interruptibly(self, timeout_s, [&] { self.wait_on(stream); });
          },
          py::arg("stream"), py::arg("timeout") = std::nullopt)
      .def("done", [](HeldWork& self) { return self.done(); }, py::call_guard<py::gil_scoped_release>());

  py::class_<Memory>(m, "Memory", py::buffer_protocol())
      .def_readonly("nbytes", &Memory::nbytes)
      .def_property_readonly("address", [](const Memory& self) { return reinterpret_cast<std::uintptr_t>(self.data); })
      .def_buffer([](Memory& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.data), static_cast<py::ssize_t>(self.nbytes));
      });

  py::class_<Stop, std::shared_ptr<Stop>>(m, "Stop")
      .def(py::init<std::string>(), py::arg("why"))
      .def("set", &Stop::set)
      .def_property_readonly("is_set", &Stop::is_set)
      .def("__enter__",
           [](std::shared_ptr<Stop> self) {
             Stop::enter(self);
             return self;
           })
      .def("__exit__", [](Stop&, const py::args&) { Stop::leave(); });
  m.def("check_stop", &Stop::check);

  py::class_<WorkerLoad>(m, "WorkerLoad")
      .def(py::init<>())
      .def("serve", &WorkerLoad::serve)
      .def("add", &WorkerLoad::add)
      .def("done", &WorkerLoad::done)
      .def("begin_wait", &WorkerLoad::begin_wait)
      .def("end_wait", &WorkerLoad::end_wait);

  m.def("isa", [] { return std::string(name_of(current_isa())); });
  m.def("best_isa", [] { return std::string(name_of(best_isa())); });
  m.def("cuda_info", &device::cuda::build_info);
  m.def("cuda_available", &device::cuda::available);
  m.def("cuda_uuids", &device::cuda::uuids);
  m.def("set_threads", &ThreadPool::set_default_size, py::arg("count"), py::call_guard<py::gil_scoped_release>());
  m.def("threads", [] { return ThreadPool::shared().size(); }, py::call_guard<py::gil_scoped_release>());
  m.def("env_variables", [] {
    std::vector<std::pair<std::string, std::string>> all;
    for (const auto& variable : env_variables()) all.emplace_back(variable.name, variable.meaning);
    return all;
  });
}

}  // namespace zcomm::bindings
