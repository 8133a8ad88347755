// zcomm._core: the C++ core as Python sees it.
#include "bindings.hpp"

PYBIND11_MODULE(_core, m) {
  m.doc() = "C++ core of zcomm: collectives, memory tiers, fused optimizers.";
  m.attr("__version__") = ZCOMM_VERSION;
  zcomm::bindings::bind_base(m);
  zcomm::bindings::bind_codec(m);
  zcomm::bindings::bind_comm(m);
  zcomm::bindings::bind_device(m);
  zcomm::bindings::bind_nccl(m);
  zcomm::bindings::bind_cuda_ipc(m);
  zcomm::bindings::bind_links(m);
  zcomm::bindings::bind_heap(m);
  zcomm::bindings::bind_optim(m);
  zcomm::bindings::bind_stream_kernels(m);
  zcomm::bindings::bind_mem(m);
}
