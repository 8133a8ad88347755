// Reads a CPU tensor of torch through its Python attributes, quickly: a small collective takes less time than the same
// queries from Python.
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

/// The contents of `object` if it is one dense, contiguous CPU tensor, with all of its elements in its storage, of a
/// dtype that the core supports. Otherwise empty, and Python reports an error, if there is one. Thread rule: holds the
/// interpreter lock.
std::optional<TorchTensor> read_torch_tensor(pybind11::handle object);

}  // namespace zcomm::bindings
