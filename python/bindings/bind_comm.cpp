// Binds Listener, Mesh and Communicator. Tensors arrive as (address, count) pairs.
#include <set>
#include <string>

#include "bindings.hpp"
#include "call_site.hpp"
#include "coll/cuda/nccl_comm.hpp"
#include "coll/overlap.hpp"
#include "device/device.hpp"
#include "net/mesh.hpp"
#include "torch_tensor.hpp"
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

/// The stream of this thread's next calls (Call::stream): set before each call on device tensors, ignored otherwise.
thread_local std::uintptr_t call_stream = 0;

/// Strings are interned, so that an operation may outlive them.
Call call_of(const std::string& name, bool async, const std::string& element = {},
             ReduceOrder order = ReduceOrder::any) {
  Call call(name.empty() ? "" : intern(name), async, call_site());
  if (!element.empty()) call.element = intern(element);
  call.stream = call_stream;
  call.order = order;
  return call;
}

/// None for a blocking call, which is done.
template <class Start>
WorkHolder start(const Call& call, Start start_it) {
  const BlockingCall blocking;
  Work work = start_it();
  return call.async ? hold(std::move(work)) : WorkHolder();
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
          py::arg("timeout_s"), py::call_guard<BlockingCall>())
      .def("lost",
           [](const net::Mesh& self) -> std::optional<int> {
             const auto loss = self.lost();
             return loss ? std::optional(loss->rank) : std::nullopt;
           })
      .def("leave", &net::Mesh::leave, py::call_guard<py::gil_scoped_release>());
}

using In = const Spans&;
using OwnSpans = std::vector<std::tuple<std::size_t, std::size_t, std::uintptr_t>>;  // begin, count, address
using Name = const std::string&;

std::vector<OwnPart> own_parts(const OwnSpans& spans) {
  std::vector<OwnPart> parts;
  parts.reserve(spans.size());
  for (const auto& [begin, count, address] : spans)
    parts.push_back({begin, count, reinterpret_cast<const void*>(address)});
  return parts;
}

/// The arguments of a call with a codec; masks are addresses.
struct CodingArgs {
  Codec codec;
  float keep;
  DType error_dtype;
  Spans errors, server_errors;
  std::vector<std::uintptr_t> masks;
  bool differences;
};

/// A Coding and the lists that it refers to, for the length of a call.
class CodingLists {
 public:
  explicit CodingLists(const CodingArgs& args) : errors_(buffers(args.errors)), servers_(buffers(args.server_errors)) {
    for (const std::uintptr_t mask : args.masks) masks_.push_back(reinterpret_cast<const std::uint8_t*>(mask));
    coding_ = {args.codec, args.keep, args.error_dtype, errors_, servers_, masks_, args.differences};
  }
  CodingLists(const CodingLists&) = delete;
  CodingLists& operator=(const CodingLists&) = delete;
  const Coding* get() const { return &coding_; }

 private:
  std::vector<Buffer> errors_, servers_;
  std::vector<const std::uint8_t*> masks_;
  Coding coding_{};
};

/// The most common small call at a third of its cost: one tensor, read here. NotImplemented for all else.
py::object all_reduce_tensor(Communicator& self, py::handle tensor, ReduceOp op, Name name, bool async) {
  const auto read = read_torch_tensor(tensor);
  if (!read) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  const Call call = call_of(name, async);
  return py::cast(start(call, [&] { return self.all_reduce({&read->buffer, 1}, read->dtype, op, call); }));
}

void bind_reductions(py::class_<Communicator, CommHolder>& c) {
  c.def("all_reduce_tensor", all_reduce_tensor)
      .def(
          "all_reduce",
          [](Communicator& self, In spans, DType dtype, ReduceOp op, Name name, bool async, ReduceOrder order) {
            const Call call = call_of(name, async, {}, order);
            const auto list = buffers(spans);
            return start(call, [&] { return self.all_reduce(list, dtype, op, call); });
          },
          py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("order") = ReduceOrder::any)
      .def("reduce", [](Communicator& self, In spans, DType dtype, ReduceOp op, int root, Name name, bool async) {
        const Call call = call_of(name, async);
        const auto list = buffers(spans);
        return start(call, [&] { return self.reduce(list, dtype, op, root, call); });
      });
  const auto scatter = [](Communicator& self, In in, In out, DType dtype, ReduceOp op, DType out_dtype, bool accumulate,
                          const OwnSpans& own, Name name, bool async, ReduceOrder order) {
    const Call call = call_of(name, async, {}, order);
    const auto from = const_buffers(in);
    const auto to = buffers(out);
    const auto parts = own_parts(own);
    return start(call, [&] { return self.reduce_scatter(from, to, dtype, op, out_dtype, accumulate, call, parts); });
  };
  c.def("reduce_scatter", scatter, py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
        py::arg(), py::arg(), py::arg("order") = ReduceOrder::any)
      .def(
          "reduce_scatter",
          [scatter](Communicator& self, In in, In out, DType dtype, ReduceOp op, DType out_dtype, bool accumulate,
                    Name name, bool async, ReduceOrder order) {
            return scatter(self, in, out, dtype, op, out_dtype, accumulate, {}, name, async, order);
          },
          py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(),
          py::arg("order") = ReduceOrder::any)
      .def_property_readonly("reads_own_parts", &Communicator::reads_own_parts);
}

void bind_coded(py::module_& m, py::class_<Communicator, CommHolder>& c) {
  py::class_<CodingArgs>(m, "Coding")
      .def(py::init([](const Codec& codec, float keep, DType error_dtype, Spans errors, Spans server_errors,
                       std::vector<std::uintptr_t> masks, bool differences) {
             return CodingArgs{
                 codec, keep, error_dtype, std::move(errors), std::move(server_errors), std::move(masks), differences};
           }),
           py::arg("codec"), py::arg("keep") = 0.0f, py::arg("error_dtype") = DType::float32,
           py::arg("errors") = Spans(), py::arg("server_errors") = Spans(),
           py::arg("masks") = std::vector<std::uintptr_t>(), py::arg("differences") = false);
  m.def(
      "all_reduce_part",
      [](std::size_t count, int rank, int world_size) {
        const TensorPart part = all_reduce_part(count, rank, world_size);
        return std::pair(part.begin, part.count);
      },
      py::arg("count"), py::arg("rank"), py::arg("world_size"));
  m.def("error_count", &error_count, py::arg("error_dtype"), py::arg("count"), py::arg("step"));
  c.def_property_readonly("coded_parts", &Communicator::coded_parts)
      .def("all_reduce",
           [](Communicator& self, In spans, DType dtype, ReduceOp op, Name name, bool async, const CodingArgs& coding) {
             const Call call = call_of(name, async);
             const auto list = buffers(spans);
             const CodingLists lists(coding);
             return start(call, [&] { return self.all_reduce(list, dtype, op, call, lists.get()); });
           })
      .def("reduce_scatter",
           [](Communicator& self, In in, In out, DType dtype, ReduceOp op, DType out_dtype, bool accumulate, Name name,
              bool async, const CodingArgs& coding) {
             const Call call = call_of(name, async);
             const auto from = const_buffers(in);
             const auto to = buffers(out);
             const CodingLists lists(coding);
             return start(call, [&] {
               return self.reduce_scatter(from, to, dtype, op, out_dtype, accumulate, call, {}, lists.get());
             });
           })
      .def("all_gather",
           [](Communicator& self, In in, In out, DType dtype, Name name, bool async, const CodingArgs& coding) {
             const Call call = call_of(name, async);
             const auto from = const_buffers(in);
             const auto to = buffers(out);
             const CodingLists lists(coding);
             return start(call, [&] { return self.all_gather(from, to, dtype, call, lists.get()); });
           });
}

void bind_movements(py::class_<Communicator, CommHolder>& c) {
  c.def("all_gather",
        [](Communicator& self, In in, In out, DType dtype, Name name, bool async) {
          const Call call = call_of(name, async);
          const auto from = const_buffers(in);
          const auto to = buffers(out);
          return start(call, [&] { return self.all_gather(from, to, dtype, call); });
        })
      .def("broadcast",
           [](Communicator& self, In spans, DType dtype, int root, Name name, bool async) {
             const Call call = call_of(name, async);
             const auto list = buffers(spans);
             return start(call, [&] { return self.broadcast(list, dtype, root, call); });
           })
      .def("gather",
           [](Communicator& self, In in, In out, DType dtype, int root, Name name, bool async) {
             const Call call = call_of(name, async);
             const auto from = const_buffers(in);
             const auto to = buffers(out);
             return start(call, [&] { return self.gather(from, to, dtype, root, call); });
           })
      .def("scatter",
           [](Communicator& self, In in, In out, DType dtype, int root, Name name, bool async) {
             const Call call = call_of(name, async);
             const auto from = const_buffers(in);
             const auto to = buffers(out);
             return start(call, [&] { return self.scatter(from, to, dtype, root, call); });
           })
      .def("all_to_all",
           [](Communicator& self, In in, In out, DType dtype, Name name, bool async) {
             const Call call = call_of(name, async);
             const auto from = const_buffers(in);
             const auto to = buffers(out);
             return start(call, [&] { return self.all_to_all(from, to, dtype, call); });
           })
      .def("barrier",
           [](Communicator& self, Name name, bool async) {
             const Call call = call_of(name, async);
             return start(call, [&] { return self.barrier(call); });
           })
      .def("verify", &Communicator::verify, py::arg("behind"), py::call_guard<BlockingCall>())
      .def(
          "after",
          [](Communicator& self, std::shared_ptr<device::Event> event, bool async) {
            const Call call = call_of("", async);
            return start(call, [&] { return self.after(std::move(event), call); });
          },
          py::arg(), py::arg("async_op") = true)
      .def(
          "after",
          [](Communicator& self, const HeldWork& work, bool async) {
            const Call call = call_of("", async);
            return start(call, [&] { return self.after(work, call); });
          },
          py::arg(), py::arg("async_op") = true);
}

/// Receives the source rank of recv.
struct Source {
  int rank = -1;
};

void bind_messages(py::module_& m, py::class_<Communicator, CommHolder>& c) {
  py::class_<Source, std::shared_ptr<Source>>(m, "Source").def(py::init<>()).def_readwrite("rank", &Source::rank);
  c.def(
       "send",
       [](Communicator& self, In spans, DType dtype, int dst, int tag, Name name, bool async, Name element) {
         const Call call = call_of(name, async, element);
         const auto list = const_buffers(spans);
         return start(call, [&] { return self.send(list, dtype, dst, tag, call); });
       },
       py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("element") = "")
      .def(
          "recv",
          [](Communicator& self, In spans, DType dtype, int src, int tag, Name name, bool async, Source& source,
             Name element) {
            const Call call = call_of(name, async, element);
            const auto list = buffers(spans);
            return start(call, [&] { return self.recv(list, dtype, src, tag, call, &source.rank); });
          },
          py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg(), py::arg("element") = "");
}

/// For a communicator outside the core. Unknown kinds ("recv"): no buffer may share memory with another.
void check_overlap_of_spans(const std::string& kind, In in, In out, DType dtype, DType out_dtype, int rank,
                            bool accumulate) {
  auto found = coll::OpKind::all_reduce;
  while (found != coll::OpKind::barrier && kind != coll::name_of(found))
    found = static_cast<coll::OpKind>(static_cast<int>(found) + 1);
  const auto from = const_buffers(in);
  const auto to = buffers(out);
  coll::check_overlap({.what = kind.c_str(),
                       .kind = found,
                       .in = from,
                       .out = to,
                       .in_size = size_of(dtype),
                       .out_size = size_of(out_dtype),
                       .rank = rank,
                       .accumulate = accumulate});
}

}  // namespace

void bind_comm(py::module_& m) {
  bind_mesh(m);
  m.def("call_site", [] { return std::string(call_site()); });
  m.def(
      "set_call_site", [](const std::string& site) { set_call_site(site.empty() ? nullptr : intern(site)); },
      py::arg("site"));
  m.def("check_overlap", check_overlap_of_spans, py::arg("kind"), py::arg("spans"), py::arg("out"), py::arg("dtype"),
        py::arg("out_dtype"), py::arg("rank"), py::arg("accumulate") = false);
  m.def("set_call_stream", [](std::uintptr_t stream) { call_stream = stream; }, py::arg("stream"));
  py::class_<Communicator, CommHolder> c(m, "Communicator");
  c.def_static(
       "create",
       [](std::shared_ptr<net::Mesh> mesh, double timeout_s, std::size_t slot_nbytes, int slot_count,
          std::size_t one_shot_nbytes, double limit_s, double warn_s) {
         return hold(Communicator::create(std::move(mesh),
                                          {timeout_s, slot_nbytes, slot_count, one_shot_nbytes, limit_s, warn_s}));
       },
       py::arg("mesh"), py::arg("timeout_s") = CommOptions{}.timeout_s,
       py::arg("slot_nbytes") = CommOptions{}.slot_nbytes, py::arg("slot_count") = CommOptions{}.slot_count,
       py::arg("one_shot_nbytes") = CommOptions{}.one_shot_nbytes, py::arg("limit_s") = CommOptions{}.limit_s,
       py::arg("warn_s") = CommOptions{}.warn_s, py::call_guard<BlockingCall>())
      .def_property_readonly("rank", &Communicator::rank)
      .def_property_readonly("world_size", &Communicator::world_size)
      .def("allocate",
           [](Communicator& self, std::size_t nbytes) {
             std::shared_ptr<SymmetricBuffer> buffer;
             {
               const BlockingCall blocking;
               buffer = self.allocate(nbytes);
             }
             return memory_of(std::move(buffer), -1);
           })
      .def("allocate_shared",
           [](Communicator& self, std::size_t nbytes) {
             std::shared_ptr<SymmetricBuffer> buffer;
             {
               const BlockingCall blocking;
               buffer = self.allocate_shared(nbytes);
             }
             return memory_of(std::move(buffer), -1);
           })
      .def(
          "duplicate", [](Communicator& self) { return hold(self.duplicate()); }, py::call_guard<BlockingCall>())
      .def(
          "split_devices",
          [](Communicator& self, int color, int key) {
            std::shared_ptr<coll::NcclComm> part;
            const bool can = self.split_devices(color, key, &part);
            return std::pair(can, std::move(part));
          },
          py::call_guard<BlockingCall>())
      .def("fail", [](Communicator& self, const std::string& reason) { return hold(self.fail(reason)); })
      .def("describe", [](Communicator& self, std::string text,
                          std::vector<int> ranks) { self.describe({std::move(text), std::move(ranks)}); })
      .def("suspend_deadline", &Communicator::suspend_deadline, py::call_guard<py::gil_scoped_release>())
      .def("resume_deadline", &Communicator::resume_deadline, py::call_guard<py::gil_scoped_release>())
      .def("forget_callers", &Communicator::forget_callers)
      .def("memory",
           [](const Communicator& self) {
             CommMemory memory{};
             {
               const py::gil_scoped_release release;
               memory = self.memory();
             }
             py::dict all;
             all["symmetric_nbytes"] = memory.symmetric_nbytes;
             all["shared_nbytes"] = memory.shared_nbytes;
             all["slot_nbytes"] = memory.slot_nbytes;
             all["allocation_count"] = memory.allocation_count;
             return all;
           })
      .def("close", &Communicator::close, py::call_guard<py::gil_scoped_release>());
  bind_reductions(c);
  bind_coded(m, c);
  bind_movements(c);
  bind_messages(m, c);
}

}  // namespace zcomm::bindings
