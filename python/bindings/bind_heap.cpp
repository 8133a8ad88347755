// Binds the fixed addresses at which gathered units are mapped ([Note: address range] in heap/segment.hpp), and
// copy-on-write views of shared memory.
#include "bindings.hpp"
#include "heap/private_view.hpp"
#include "heap/segment.hpp"
#include "zcomm/communicator.hpp"

namespace py = pybind11;

namespace zcomm::bindings {

void bind_heap(py::module_& m) {
  m.def("page_nbytes", &heap::page_nbytes);
  m.def("table_nbytes", &heap::table_nbytes);
  m.def("moves_mappings", &heap::moves_mappings);
  py::class_<heap::AddressRange, std::shared_ptr<heap::AddressRange>>(m, "AddressRange")
      .def(py::init([](std::size_t nbytes, bool reads_nan) {
             using heap::AddressRange;
             const auto unmapped = reads_nan ? AddressRange::Unmapped::kNan : AddressRange::Unmapped::kFault;
             return std::make_shared<AddressRange>(AddressRange::reserve(nbytes, unmapped));
           }),
           py::arg("nbytes"), py::arg("reads_nan") = false)
      .def_property_readonly("nbytes", &heap::AddressRange::nbytes)
      .def("memory",
           [](std::shared_ptr<heap::AddressRange> self, std::size_t offset, std::size_t nbytes) {
             if (offset > self->nbytes() || nbytes > self->nbytes() - offset)
               throw py::value_error("AddressRange.memory: outside of the range");
             std::byte* data = self->data() + offset;
             return Memory{data, nbytes, std::move(self)};
           })
      .def(
          "alias",
          [](heap::AddressRange& self, std::size_t offset, const Memory& shared, std::size_t from, std::size_t nbytes) {
            if (from > shared.nbytes || nbytes > shared.nbytes - from)
              throw py::value_error("AddressRange.alias: outside of the shared memory");
            const py::gil_scoped_release release;
            self.alias(offset, shared.data + from, nbytes);
          },
          py::arg("offset"), py::arg("shared"), py::arg("from_offset"), py::arg("nbytes"))
      .def("take", &heap::AddressRange::take, py::arg("offset"), py::arg("source"), py::arg("from_offset"),
           py::arg("nbytes"), py::call_guard<py::gil_scoped_release>())
      .def("unmap", &heap::AddressRange::unmap, py::arg("offset"), py::arg("nbytes"),
           py::call_guard<py::gil_scoped_release>());
  py::class_<heap::PrivateView, std::shared_ptr<heap::PrivateView>>(m, "PrivateView")
      .def(py::init([](std::uintptr_t address, std::size_t nbytes) {
             return std::make_shared<heap::PrivateView>(reinterpret_cast<const std::byte*>(address), nbytes);
           }),
           py::arg("address"), py::arg("nbytes"))
      .def("memory",
           [](std::shared_ptr<heap::PrivateView> self) {
             std::byte* const data = self->data();
             const std::size_t nbytes = self->nbytes();
             return Memory{data, nbytes, std::move(self)};
           })
      .def("copied", &heap::PrivateView::copied)
      .def(
          "merge", [](heap::PrivateView& self, const std::vector<heap::ByteRange>& own) { return self.merge(own); },
          py::arg("own"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace zcomm::bindings
