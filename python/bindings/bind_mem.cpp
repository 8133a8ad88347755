// Binds the memory tiers: pinned host memory and the swap file.
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "bindings.hpp"
#include "mem/io/crc32c.hpp"
#include "zcomm/error.hpp"
#include "zcomm/pinned_arena.hpp"
#include "zcomm/swap_file.hpp"

namespace py = pybind11;

namespace zcomm::bindings {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;
/// Dropping the last reference waits for I/O: never with the interpreter lock held.
using SwapHolder = std::unique_ptr<SwapFile, DeleteWithoutGil<SwapFile>>;

SwapFile::Engine engine_of(const std::string& name) {
  if (name == "auto") return SwapFile::Engine::automatic;
  if (name == "io_uring") return SwapFile::Engine::io_uring;
  if (name == "threads") return SwapFile::Engine::threads;
  throw InvalidArgument("SwapFile: engine '" + name + "' is not one of auto, io_uring, threads");
}

std::unique_ptr<SwapFile> open_swap_file(const std::vector<std::string>& directories, std::size_t nbytes,
                                         const std::string& engine, std::size_t block_nbytes, int depth, bool direct,
                                         bool checksum) {
  SwapFile::Options options;
  options.nbytes = nbytes;
  options.engine = engine_of(engine);
  options.block_nbytes = block_nbytes;
  options.depth = depth;
  options.direct = direct;
  options.checksum = checksum;
  return SwapFile::open(directories, options);
}

py::dict as_dict(const PinnedArena::Stats& stats) {
  py::dict dict;
  dict["used_nbytes"] = stats.used_nbytes;
  dict["peak_nbytes"] = stats.peak_nbytes;
  dict["locked_nbytes"] = stats.locked_nbytes;
  dict["process_nbytes"] = stats.process_nbytes;
  dict["process_peak_nbytes"] = stats.process_peak_nbytes;
  dict["allocation_count"] = stats.allocation_count;
  return dict;
}

py::dict as_dict(const SwapFile::Stats& stats) {
  py::dict dict;
  dict["read_nbytes"] = stats.read_nbytes;
  dict["written_nbytes"] = stats.written_nbytes;
  dict["read_s"] = stats.read_s;
  dict["write_s"] = stats.write_s;
  dict["reserved_nbytes"] = stats.reserved_nbytes;
  dict["file_nbytes"] = stats.file_nbytes;
  dict["error_count"] = stats.error_count;
  dict["retry_count"] = stats.retry_count;
  dict["direct"] = stats.direct;
  dict["engine"] = stats.engine;
  dict["path"] = stats.path;
  dict["paths"] = stats.paths;
  dict["notes"] = stats.notes;
  dict["bounce_nbytes"] = stats.bounce_nbytes;
  dict["bounced_nbytes"] = stats.bounced_nbytes;
  const auto add = [&dict](const std::string& kind, const SwapFile::Latency& latency) {
    dict[py::str(kind + "_count")] = latency.count;
    dict[py::str(kind + "_p50_s")] = latency.p50_s;
    dict[py::str(kind + "_p90_s")] = latency.p90_s;
    dict[py::str(kind + "_p99_s")] = latency.p99_s;
    dict[py::str(kind + "_max_s")] = latency.max_s;
  };
  add("read", stats.read_latency);
  add("write", stats.write_latency);
  return dict;
}

py::dict as_dict(const SwapFile::Image& image) {
  py::list keys;
  for (const SwapFile::ImageKey& each : image.keys) {
    py::dict key;
    key["key"] = each.key;
    key["nbytes"] = each.nbytes;
    key["first"] = each.first;
    key["offsets"] = each.offsets;
    key["crc32c"] = each.checksums;
    keys.append(std::move(key));
  }
  py::dict dict;
  dict["tile_nbytes"] = image.tile_nbytes;
  dict["alignment"] = image.alignment;
  dict["file_nbytes"] = image.file_nbytes;
  dict["methods"] = image.methods;
  dict["keys"] = std::move(keys);
  return dict;
}

void bind_arena(py::module_& m) {
  using Lease = PinnedArena::Lease;
  py::class_<Lease, std::unique_ptr<Lease, DeleteWithoutGil<Lease>>>(m, "Lease", py::buffer_protocol())
      .def_property_readonly("nbytes", &PinnedArena::Lease::nbytes)
      .def_property_readonly(
          "address", [](const PinnedArena::Lease& self) { return reinterpret_cast<std::uintptr_t>(self.data()); })
      .def_buffer([](PinnedArena::Lease& self) {
        return py::buffer_info(reinterpret_cast<std::uint8_t*>(self.data()), static_cast<py::ssize_t>(self.nbytes()));
      });
  py::class_<PinnedArena>(m, "PinnedArena")
      .def(py::init([](std::optional<std::size_t> budget_nbytes, bool page_lock, bool keep_resident) {
             return PinnedArena({budget_nbytes, page_lock, keep_resident});
           }),
           py::arg("budget_nbytes") = std::nullopt, py::arg("page_lock") = true, py::arg("keep_resident") = false)
      .def("allocate", &PinnedArena::allocate, py::arg("nbytes"), NoGil())
      .def("stats", [](const PinnedArena& self) {
        PinnedArena::Stats stats;
        {
          const py::gil_scoped_release release;  // its lock is held while memory is being locked
          stats = self.stats();
        }
        return as_dict(stats);
      });
}

}  // namespace

void bind_mem(py::module_& m) {
  bind_arena(m);
  m.def(
      "crc32c",
      [](std::uintptr_t address, std::size_t nbytes) {
        return mem::crc32c(reinterpret_cast<const std::byte*>(address), nbytes);
      },
      py::arg("ptr"), py::arg("nbytes"), NoGil());
  const SwapFile::Options defaults;
  py::class_<SwapFile, SwapHolder> swap_file(m, "SwapFile");
  swap_file.attr("COPY_NAME") = SwapFile::kCopyName;
  swap_file
      .def(py::init([](const std::variant<std::string, std::vector<std::string>>& directory, std::size_t nbytes,
                       const std::string& engine, std::size_t block_nbytes, int depth, bool direct, bool checksum) {
             const py::gil_scoped_release release;
             const auto* one = std::get_if<std::string>(&directory);
             return SwapHolder(open_swap_file(one != nullptr ? std::vector{*one} : std::get<1>(directory), nbytes,
                                              engine, block_nbytes, depth, direct, checksum)
                                   .release());
           }),
           py::arg("directory"), py::arg("nbytes") = 0, py::arg("engine") = "auto",
           py::arg("block_nbytes") = defaults.block_nbytes, py::arg("depth") = defaults.depth,
           py::arg("direct") = defaults.direct, py::arg("checksum") = defaults.checksum)
      .def("reserve", &SwapFile::reserve, py::arg("key"), py::arg("nbytes"), NoGil())
      .def("release", &SwapFile::release, py::arg("key"), NoGil())
      .def(
          "write",
          [](SwapFile& self, const std::string& key, std::uintptr_t address, std::size_t nbytes) {
            return hold(self.write(key, reinterpret_cast<const void*>(address), nbytes));
          },
          py::arg("key"), py::arg("ptr"), py::arg("nbytes"), NoGil())
      .def(
          "read",
          [](SwapFile& self, const std::string& key, std::uintptr_t address, std::size_t nbytes) {
            return hold(self.read(key, reinterpret_cast<void*>(address), nbytes));
          },
          py::arg("key"), py::arg("ptr"), py::arg("nbytes"), NoGil())
      .def("written", &SwapFile::written, NoGil())
      .def("wait", &SwapFile::wait, NoGil())
      .def(
          "copy_to",
          [](SwapFile& self, const std::vector<std::string>& files, bool durable) {
            SwapFile::Image image;
            {
              const py::gil_scoped_release release;
              image = self.copy_to(files, durable);
            }
            return as_dict(image);
          },
          py::arg("files"), py::arg("durable") = true)
      .def("copy_beside",
           [](SwapFile& self) {
             SwapFile::Image image;
             std::vector<int> files;
             {
               const py::gil_scoped_release release;
               image = self.copy_beside(files);
             }
             py::dict dict = as_dict(image);
             dict["descriptors"] = files;
             return dict;
           })
      .def("close", &SwapFile::close, NoGil())
      .def("stats", [](const SwapFile& self) {
        SwapFile::Stats stats;
        {
          const py::gil_scoped_release release;
          stats = self.stats();
        }
        return as_dict(stats);
      });
}

}  // namespace zcomm::bindings
