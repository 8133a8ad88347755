// Backend cuda_ipc under the race checker: its streams' accesses to memory are ordered in every run, not only in this
// one.
#include <algorithm>
#include <string>

#include "coll/support/device_world.hpp"
#include "doubles/recorded/trace.hpp"

using namespace zcomm;
using namespace zcomm::test;

namespace {

/// Runs `body` on recorded devices; returns the unordered accesses of the ranks' streams.
std::vector<device::Race> races_of(int world, const std::function<void(DeviceRank&)>& body) {
  auto trace = std::make_shared<device::Trace>();
  run_device_world(world, {.max_delay_s = 50e-6, .trace = trace}, body);
  EXPECT_GT(trace->operations(), 5u);
  return trace->races();
}

void expect_none(const std::vector<device::Race>& races) {
  for (std::size_t i = 0; i < std::min<std::size_t>(races.size(), 3); ++i)
    fail(__FILE__, __LINE__, races[i].describe());
}

Call on(device::Stream& stream) {
  Call call("", true);
  call.stream = handle_of(stream);
  return call;
}

/// Every operation, on memory that the caller's stream writes before and after.
void all_operations(DeviceRank& self, bool symmetric) {
  const auto world = static_cast<std::size_t>(self.world);
  const std::size_t part = 700, whole = part * world;
  auto stream = self.device->make_stream(false);
  std::shared_ptr<SymmetricBuffer> buffers[2];
  device::Memory memory[2];
  float* data[2];
  for (int i = 0; i < 2; ++i) {
    if (symmetric)
      data[i] = reinterpret_cast<float*>((buffers[i] = self.comm->allocate(whole * 4))->data());
    else
      data[i] = static_cast<float*>((memory[i] = self.device->allocate(whole * 4)).get());
  }
  float *const x = data[0], *const y = data[1];
  const Buffer x_all{x, whole}, x_part_out{x, part}, y_all{y, whole}, y_part{y, part};
  const ConstBuffer x_in{x, whole}, x_part{x, part}, y_in{y, whole};
  const bool is_root = self.rank == 0;
  std::vector<ConstBuffer> from;
  std::vector<Buffer> to;
  for (std::size_t q = 0; q < world; ++q) from.push_back({x + q * part, part}), to.push_back({y + q * part, part});
  const DType f32 = DType::float32;
  const std::function<Work()> calls[] = {
      [&] { return self.comm->all_reduce({&x_all, 1}, f32, ReduceOp::sum, on(*stream)); },
      [&] { return self.comm->reduce({&x_all, 1}, f32, ReduceOp::max, 0, on(*stream)); },
      [&] { return self.comm->reduce_scatter({&x_in, 1}, {&y_part, 1}, f32, ReduceOp::sum, f32, true, on(*stream)); },
      [&] { return self.comm->all_gather({&x_part, 1}, {&y_all, 1}, f32, on(*stream)); },
      [&] { return self.comm->broadcast({&x_all, 1}, f32, 0, on(*stream)); },
      [&] { return self.comm->gather({&x_part, 1}, {&y_all, is_root ? 1u : 0u}, f32, 0, on(*stream)); },
      [&] { return self.comm->scatter({&y_in, is_root ? 1u : 0u}, {&x_part_out, 1}, f32, 0, on(*stream)); },
      [&] { return self.comm->all_to_all(from, to, f32, on(*stream)); },
      [&] { return self.comm->barrier(on(*stream)); },
  };
  for (int turn = 0; turn < 2; ++turn)
    for (const auto& call : calls) {
      stream->fill(x, 0, whole * 4);
      stream->fill(y, 0, whole * 4);
      call().wait();
      stream->fill(x, 1, whole * 4);
      stream->fill(y, 1, whole * 4);
    }
  stream->synchronize();
}

}  // namespace

TEST(cuda_ipc_trace, nothing_races) {
  for (const bool symmetric : {false, true})
    for (const int world : {1, 2, 3})
      expect_none(races_of(world, [symmetric](DeviceRank& self) { all_operations(self, symmetric); }));
}

#ifndef __SANITIZE_THREAD__  // which would find it, too
TEST(cuda_ipc_trace, an_input_overwritten_too_early_is_found) {
  const auto races = races_of(2, [](DeviceRank& self) {
    auto buffer = self.comm->allocate(4000);
    auto stream = self.device->make_stream(false);
    const Buffer all{buffer->data(), 1000};
    Work work = self.comm->all_reduce({&all, 1}, DType::float32, ReduceOp::sum, on(*stream));
    stream->fill(buffer->data(), 1, 4000);  // before work.wait()
    work.wait();
    stream->synchronize();
  });
  EXPECT_FALSE(races.empty());
}
#endif
