// A CPU tensor of torch read through its Python attributes, quickly: a small collective takes less time than the same
// questions asked from Python.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>

#include "zcomm/communicator.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm::bindings {

struct TorchTensor {
  Buffer buffer;
  DType dtype;
};

/// What `object` holds if it is one dense, contiguous CPU tensor, with all of its elements in its storage, of a dtype
/// that the core has; nothing otherwise, and then Python finds the words for what is wrong, if something is. Thread
/// rule: holds the interpreter lock.
std::optional<TorchTensor> read_torch_tensor(pybind11::handle object);

}  // namespace zcomm::bindings
