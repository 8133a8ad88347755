// See ring.hpp. Each partial sum travels the ring once, so all ranks end with the same bits.
#include "coll/ring.hpp"

#include <array>

#include "base/error.hpp"
#include "device/kernels.hpp"

namespace zcomm::coll {

void run_ring(std::span<const RingStep> steps, std::byte* data, DType dtype, ReduceOp op, std::span<std::byte> scratch,
              net::Link& next, net::Link& prev, double timeout_s) {
  const std::size_t size = size_of(dtype);
  for (const RingStep& step : steps) {
    if (step.reduce && step.recv.count() * size > scratch.size()) {
      throw InvalidArgument(text("a ring with chunks of ", step.recv.count() * size,
                                 " bytes needs as much scratch, not ", scratch.size(), " bytes"));
    }
  }
  for (const RingStep& step : steps) {
    const std::span<const std::byte> out(data + step.send.begin * size, step.send.count() * size);
    std::byte* const target = data + step.recv.begin * size;
    const std::size_t in_nbytes = step.recv.count() * size;
    net::send_recv(next, out, prev, step.reduce ? scratch.first(in_nbytes) : std::span(target, in_nbytes), timeout_s);
    if (!step.reduce || in_nbytes == 0) continue;
    const std::array<void* const, 1> dst = {target};
    const std::array<const void* const, 2> src = {scratch.data(), target};
    device::reduce({dst, src, step.recv.count(), dtype, dtype, op == ReduceOp::avg ? ReduceOp::sum : op, false});
  }
}

}  // namespace zcomm::coll
