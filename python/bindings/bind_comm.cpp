// Binds Listener, Mesh and Communicator. Tensors arrive as (address, count) pairs.
#include <set>
#include <string>

#include "bindings.hpp"
#include "net/mesh.hpp"
#include "zcomm/communicator.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

/// Names live as long as the process: an operation may outlive the Python string.
const char* intern(const std::string& name) {
  static std::set<std::string> names;  // guarded by the interpreter lock
  return names.insert(name).first->c_str();
}

std::vector<Buffer> buffers(const Spans& spans) {
  std::vector<Buffer> all;
  all.reserve(spans.size());
  for (const auto& [address, count] : spans) all.push_back({reinterpret_cast<void*>(address), count});
  return all;
}

std::vector<ConstBuffer> const_buffers(const Spans& spans) {
  std::vector<ConstBuffer> all;
  all.reserve(spans.size());
  for (const auto& [address, count] : spans) all.push_back({reinterpret_cast<const void*>(address), count});
  return all;
}

template <class Call>
WorkHolder start(Call call) {
  const py::gil_scoped_release release;
  return hold(call());
}

Memory memory_of(std::shared_ptr<SymmetricBuffer> buffer, int rank) {
  std::byte* data = rank < 0 ? buffer->data() : buffer->peer(rank);
  const std::size_t nbytes = buffer->nbytes();
  return {data, nbytes, std::move(buffer)};
}

void bind_mesh(py::module_& m) {
  py::class_<net::Listener>(m, "Listener").def(py::init<>()).def_property_readonly("address", [](net::Listener& self) {
    return self.address();
  });
  py::class_<net::Mesh, std::shared_ptr<net::Mesh>>(m, "Mesh")
      .def_static(
          "connect",
          [](int rank, int world_size, net::Listener& listener, const std::vector<std::string>& addresses,
             const std::string& token, double timeout_s) {
            return net::Mesh::connect(rank, world_size, std::move(listener), addresses, token, timeout_s);
          },
          py::arg("rank"), py::arg("world_size"), py::arg("listener"), py::arg("addresses"), py::arg("token"),
          py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>())
      .def("lost",
           [](const net::Mesh& self) -> std::optional<int> {
             const auto loss = self.lost();
             return loss ? std::optional(loss->rank) : std::nullopt;
           })
      .def("leave", &net::Mesh::leave, py::call_guard<py::gil_scoped_release>());
}

void bind_collectives(py::class_<Communicator>& c) {
  c.def("all_reduce",
        [](Communicator& self, const Spans& spans, DType dtype, ReduceOp op, const std::string& name) {
          const char* label = intern(name);
          const auto list = buffers(spans);
          return start([&] { return self.all_reduce(list, dtype, op, label); });
        })
      .def("reduce_scatter",
           [](Communicator& self, const Spans& in, const Spans& out, DType dtype, ReduceOp op, DType out_dtype,
              bool accumulate, const std::string& name) {
             const char* label = intern(name);
             const auto from = const_buffers(in);
             const auto to = buffers(out);
             return start([&] { return self.reduce_scatter(from, to, dtype, op, out_dtype, accumulate, label); });
           })
      .def("all_gather",
           [](Communicator& self, const Spans& in, const Spans& out, DType dtype, const std::string& name) {
             const char* label = intern(name);
             const auto from = const_buffers(in);
             const auto to = buffers(out);
             return start([&] { return self.all_gather(from, to, dtype, label); });
           })
      .def("broadcast",
           [](Communicator& self, const Spans& spans, DType dtype, int root, const std::string& name) {
             const char* label = intern(name);
             const auto list = buffers(spans);
             return start([&] { return self.broadcast(list, dtype, root, label); });
           })
      .def("barrier", [](Communicator& self, const std::string& name) {
        const char* label = intern(name);
        return start([&] { return self.barrier(label); });
      });
}

}  // namespace

void bind_comm(py::module_& m) {
  bind_mesh(m);
  py::class_<Communicator> c(m, "Communicator");
  c.def_static(
       "create",
       [](std::shared_ptr<net::Mesh> mesh, double timeout_s, std::size_t slot_nbytes, int slot_count) {
         return Communicator::create(std::move(mesh), {timeout_s, slot_nbytes, slot_count});
       },
       py::arg("mesh"), py::arg("timeout_s") = CommOptions{}.timeout_s,
       py::arg("slot_nbytes") = CommOptions{}.slot_nbytes, py::arg("slot_count") = CommOptions{}.slot_count,
       py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def("allocate",
           [](Communicator& self, std::size_t nbytes) {
             std::shared_ptr<SymmetricBuffer> buffer;
             {
               const py::gil_scoped_release release;
               buffer = self.allocate(nbytes);
             }
             return memory_of(std::move(buffer), -1);
           })
      .def("allocate_shared",
           [](Communicator& self, std::size_t nbytes) {
             std::shared_ptr<SymmetricBuffer> buffer;
             {
               const py::gil_scoped_release release;
               buffer = self.allocate_shared(nbytes);
             }
             return memory_of(std::move(buffer), -1);
           })
      .def("duplicate", &Communicator::duplicate, py::call_guard<py::gil_scoped_release>())
      .def("memory",
           [](const Communicator& self) {
             const CommMemory memory = self.memory();
             py::dict all;
             all["symmetric_nbytes"] = memory.symmetric_nbytes;
             all["shared_nbytes"] = memory.shared_nbytes;
             all["slot_nbytes"] = memory.slot_nbytes;
             all["allocation_count"] = memory.allocation_count;
             return all;
           })
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>());
  bind_collectives(c);
}

}  // namespace zcomm::bindings
