// Binds the connections between hosts: a Mesh over adopted sockets, and communicators over links.
//
// Descriptors are passed as numbers and are owned from then on, also when the call throws.
#include "bindings.hpp"
#include "coll/hierarchical/engine.hpp"
#include "coll/tcp/engine.hpp"
#include "net/mesh.hpp"
#include "zcomm/error.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

using Numbers = std::vector<std::vector<int>>;

std::vector<coll::PeerSockets> own(const Numbers& numbers) {
  std::vector<coll::PeerSockets> links(numbers.size());
  for (std::size_t r = 0; r < numbers.size(); ++r)
    for (const int fd : numbers[r]) links[r].emplace_back(fd);
  return links;
}

std::shared_ptr<net::Mesh> adopt(int rank, int world_size, const std::vector<std::pair<int, int>>& numbers) {
  std::vector<net::AdoptedSockets> sockets;
  for (const auto& [data, control] : numbers) sockets.push_back({UniqueFd(data), UniqueFd(control)});
  if (numbers.size() != static_cast<std::size_t>(world_size))
    throw InvalidArgument("world_size " + std::to_string(world_size) + " with sockets for " +
                          std::to_string(numbers.size()) + " ranks");
  return net::Mesh::adopt(rank, std::move(sockets));
}

/// Adds a static method to a class that another file binds.
template <class Function, class... Extra>
void def_static(const py::object& type, const char* name, Function&& function, const Extra&... extra) {
  const py::cpp_function method(std::forward<Function>(function), py::name(name), py::scope(type),
                                py::sibling(py::getattr(type, name, py::none())), extra...);
  type.attr(name) = py::staticmethod(method);
}

}  // namespace

void bind_links(py::module_& m) {
  def_static(
      m.attr("Mesh"), "adopt", &adopt, py::arg("rank"), py::arg("world_size"), py::arg("sockets"),
      "A mesh over connected, authenticated stream sockets: (data, control) descriptors by rank, (-1, -1) for itself.",
      py::call_guard<py::gil_scoped_release>());

  const coll::TcpOptions link;
  const coll::HierarchicalOptions hierarchical;
  def_static(
      m.attr("Communicator"), "create_linked",
      [](std::shared_ptr<net::Mesh> world, const Numbers& links, double timeout_s, std::size_t segment_nbytes,
         double limit_s, double warn_s) {
        return hold(coll::create_linked(std::move(world), own(links), {timeout_s, segment_nbytes, limit_s, warn_s}));
      },
      py::arg("mesh"), py::arg("links"), py::arg("timeout_s") = link.timeout_s,
      py::arg("segment_nbytes") = link.segment_nbytes, py::arg("limit_s") = link.limit_s,
      py::arg("warn_s") = link.warn_s,
      "links[r]: at least two connected stream sockets to each other rank r, in the same order on both sides:\n"
      "[0] collectives, [1] messages, [2:] more for the ring, between neighbours (r and r + 1, last and first).",
      py::call_guard<BlockingCall>());
  def_static(
      m.attr("Communicator"), "create_hierarchical",
      [](std::shared_ptr<net::Mesh> world, std::shared_ptr<net::Mesh> host, std::vector<int> host_of_rank,
         const Numbers& links, double timeout_s, std::size_t segment_nbytes, std::size_t slot_nbytes, int slot_count,
         double limit_s, double warn_s) {
        return hold(coll::create_hierarchical(std::move(world), std::move(host), std::move(host_of_rank), own(links),
                                              {{timeout_s, segment_nbytes, limit_s, warn_s}, slot_nbytes, slot_count}));
      },
      py::arg("mesh"), py::arg("host_mesh"), py::arg("host_of_rank"), py::arg("links"),
      py::arg("timeout_s") = link.timeout_s, py::arg("segment_nbytes") = link.segment_nbytes,
      py::arg("slot_nbytes") = hierarchical.slot_nbytes, py::arg("slot_count") = hierarchical.slot_count,
      py::arg("limit_s") = link.limit_s, py::arg("warn_s") = link.warn_s,
      "links[r]: as for create_linked, to the ranks with the same position on the other hosts; one, for messages and\n"
      "bad news, or none to the rest.\n"
      "Ring neighbours are the next and the previous host.",
      py::call_guard<BlockingCall>());
}

}  // namespace zcomm::bindings
