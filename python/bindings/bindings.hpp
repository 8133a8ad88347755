// What the binding files share: their entry points and memory that Python can see.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "zcomm/work.hpp"

namespace zcomm::bindings {

/// Bytes with an owner; speaks the buffer protocol, so that torch.frombuffer makes a tensor of it without a copy.
struct Memory {
  std::byte* data = nullptr;
  std::size_t nbytes = 0;
  std::shared_ptr<void> owner;
};

/// Dropping a Work may wait: never with the interpreter lock held.
struct DeleteWithoutGil {
  void operator()(Work* work) const {
    const pybind11::gil_scoped_release release;
    delete work;
  }
};
using WorkHolder = std::unique_ptr<Work, DeleteWithoutGil>;
inline WorkHolder hold(Work work) { return WorkHolder(new Work(std::move(work))); }

/// Releases the interpreter lock for a call that may block, and lets Ctrl-C end it.
class BlockingCall {
 public:
  BlockingCall() { running_ = true; }
  ~BlockingCall() { running_ = false; }
  BlockingCall(const BlockingCall&) = delete;
  BlockingCall& operator=(const BlockingCall&) = delete;
  static bool is_running() { return running_; }

 private:
  pybind11::gil_scoped_release release_;
  inline static thread_local bool running_ = false;
};

/// (address, count) pairs as Python passes them.
using Spans = std::vector<std::pair<std::uintptr_t, std::size_t>>;

void bind_base(pybind11::module_& m);
void bind_comm(pybind11::module_& m);
void bind_device(pybind11::module_& m);
void bind_trace(pybind11::module_& m);
void bind_nccl(pybind11::module_& m);
void bind_cuda_ipc(pybind11::module_& m);
void bind_links(pybind11::module_& m);
void bind_heap(pybind11::module_& m);
void bind_optim(pybind11::module_& m);
void bind_stream_kernels(pybind11::module_& m);

}  // namespace zcomm::bindings

/// Defined in bind_mem.cpp.
void bind_mem(pybind11::module_& m);
