#include "runners.hpp"

#include "doubles/simulated/device.hpp"
#include "emulated_optim.hpp"
#include "optim/kinds.hpp"
#include "test.hpp"

namespace zcomm::test {
namespace {

[[maybe_unused]] const bool shares_threads = (threads_may_stay() |= true);  // the core's pool, the runners' devices

using optim::AdamFactors;
using optim::LionFactors;
using optim::OnDevice;

class Emulation final : public Runner {
 public:
  std::string name() const override { return "emulation"; }
  void step(const OptimShard& shard, const AdamParams& params) override { launch(shard, params); }
  void step(const OptimShard& shard, const LionParams& params) override { launch(shard, params); }
  void step(const OptimShard& shard, const SgdParams& params) override { launch(shard, params); }
  void step(const OptimShard& shard, const AdagradParams& params) override { launch(shard, params); }
  void step(const OptimShard& shard, const OnDevice<AdamFactors>* told) override {
    optim::emulated::launch_step(shard, 2, AdamFactors{}, told, 0);
  }
  void step(const OptimShard& shard, const OnDevice<LionFactors>* told) override {
    optim::emulated::launch_step(shard, 1, LionFactors{}, told, 0);
  }
  void adam(std::span<const optim::StreamAdamItem> items, const optim::StreamAdam& options,
            OnDevice<AdamFactors>* factors) override {
    optim::emulated::launch_advance(items, options, factors, 0);
    optim::emulated::launch_adam(items, factors, 0);
  }
  void squares(double* sums, const void* grad, DType dtype, std::size_t count) override {
    optim::emulated::launch_squares(sums, grad, dtype, count, 0);
  }
  void norm(std::int64_t* words, const void* grad, DType dtype, std::size_t count) override {
    optim::emulated::launch_norm(words, grad, dtype, count, 0);
  }

 private:
  template <class Params>
  void launch(const OptimShard& shard, const Params& params) {
    using K = optim::Kind<Params>;
    optim::emulated::launch_step(shard, K::arrays(params), K::factors(params), nullptr, 0);
  }
};

class OnStream final : public Runner {
 public:
  explicit OnStream(std::shared_ptr<device::Device> device)
      : device_(std::move(device)), stream_(device_->make_stream()) {}
  std::string name() const override { return device_->name(); }
  void step(const OptimShard& shard, const AdamParams& params) override { put(shard, params); }
  void step(const OptimShard& shard, const LionParams& params) override { put(shard, params); }
  void step(const OptimShard& shard, const SgdParams& params) override { put(shard, params); }
  void step(const OptimShard& shard, const AdagradParams& params) override { put(shard, params); }
  void step(const OptimShard& shard, const OnDevice<AdamFactors>* told) override { put(shard, told); }
  void step(const OptimShard& shard, const OnDevice<LionFactors>* told) override { put(shard, told); }
  void adam(std::span<const optim::StreamAdamItem> items, const optim::StreamAdam& options,
            OnDevice<AdamFactors>* factors) override {
    optim::stream_adam(stream_->kernels(), items, options, factors);
  }
  void squares(double* sums, const void* grad, DType dtype, std::size_t count) override {
    optim::stream_squares(stream_->kernels(), sums, grad, dtype, count);
  }
  void norm(std::int64_t* words, const void* grad, DType dtype, std::size_t count) override {
    optim::stream_norm(stream_->kernels(), words, grad, dtype, count);
  }
  void synchronize() override { stream_->synchronize(); }

 private:
  template <class How>
  void put(const OptimShard& shard, const How& how) {
    optim::stream_step(stream_->kernels(), shard, how);
  }
  std::shared_ptr<device::Device> device_;
  std::unique_ptr<device::Stream> stream_;
};

std::vector<std::unique_ptr<Runner>> make_runners() {
  std::vector<std::unique_ptr<Runner>> all;
  all.push_back(std::make_unique<Emulation>());
  all.push_back(std::make_unique<OnStream>(device::make_simulated_device()));
  if (device::cuda::available()) all.push_back(std::make_unique<OnStream>(device::make_cuda_device(0)));
  return all;
}

}  // namespace

const std::vector<std::unique_ptr<Runner>>& runners() {
  static const auto all = make_runners();
  return all;
}

}  // namespace zcomm::test
