// Binds the race checker: Trace, Race, record_device (doubles/recorded/trace.hpp).
#include <optional>
#include <string>
#include <variant>

#include "base/error.hpp"
#include "doubles/recorded/trace.hpp"
#include "testing/testing.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

using device::Race;
using device::Trace;

/// None: the calling thread; a name: a queue of that name; or a stream of a recorded device.
using ActorName = std::variant<std::monostate, std::string, std::shared_ptr<device::Stream>>;

Trace::Actor actor(Trace& trace, const ActorName& actor_name) {
  if (const auto* const name = std::get_if<std::string>(&actor_name)) return trace.queue(*name);
  if (const auto* const stream = std::get_if<std::shared_ptr<device::Stream>>(&actor_name))
    return device::actor_of(**stream);
  return trace.host();
}

void touch(Trace& self, const ActorName& actor_name, std::uintptr_t address, std::size_t nbytes,
           const std::string& access, const std::string& label) {
  const auto range = device::Footprint::range(reinterpret_cast<const void*>(address), nbytes);
  device::Footprint footprint;
  for (const char kind : access) {
    if (kind != 'r' && kind != 'w') throw InvalidArgument(text("touch: access='", access, "': expected r, w or rw"));
    (kind == 'r' ? footprint.reads : footprint.writes).push_back(range);
  }
  self.touch(actor(self, actor_name), footprint, label);
}

void bind_race(py::module_& m) {
  py::class_<Race::Side>(m, "RaceSide")
      .def_readonly("actor", &Race::Side::actor)
      .def_readonly("label", &Race::Side::label)
      .def_readonly("operation", &Race::Side::operation)
      .def_readonly("is_write", &Race::Side::is_write)
      .def_property_readonly("range",
                             [](const Race::Side& self) { return std::pair(self.range.begin, self.range.end); });
  py::class_<Race>(m, "Race")
      .def_readonly("first", &Race::first)
      .def_readonly("second", &Race::second)
      .def_property_readonly("overlap",
                             [](const Race& self) { return std::pair(self.overlap.begin, self.overlap.end); })
      .def_readonly("remedy", &Race::remedy)
      .def("__str__", &Race::describe)
      .def("__repr__", &Race::describe);
}

}  // namespace

void bind_trace(py::module_& m) {
  bind_race(m);
  py::class_<Trace, std::shared_ptr<Trace>>(m, "Trace")
      .def(py::init<>())
      .def("touch", &touch, py::arg("actor"), py::arg("address"), py::arg("nbytes"), py::arg("access"),
           py::arg("label"))
      .def("set_subject", &Trace::set_subject, py::arg("subject"))
      .def(
          "rename",
          [](Trace& self, const ActorName& actor_name, const std::string& name) {
            self.rename(actor(self, actor_name), name);
          },
          py::arg("actor"), py::arg("name"))
      .def(
          "order",
          [](Trace& self, const std::shared_ptr<device::Event>& before, const ActorName& after) {
            self.order(device::point_of(*before), actor(self, after));
          },
          py::arg("before").none(false), py::arg("after"))
      .def(
          "order",
          [](Trace& self, const ActorName& before, const ActorName& after) {
            self.order(actor(self, before), actor(self, after));
          },
          py::arg("before"), py::arg("after"))
      .def("races", &Trace::races)
      .def_property_readonly("operations", &Trace::operations)
      .def_property_readonly("race_count", &Trace::race_count);
  m.def("record_device", &device::record_device, py::arg("device"), py::arg("trace"));
}

}  // namespace zcomm::bindings
