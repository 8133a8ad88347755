// Shared by the binding files of zcomm_testing: their entry points.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace zcomm::bindings {

void bind_fake_nccl(pybind11::module_& m);
void bind_trace(pybind11::module_& m);

}  // namespace zcomm::bindings
