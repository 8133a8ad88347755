// Tasks for device streams: the CPU's own steps on the host, optim/cuda on CUDA.
#include "optim/stream_optim.hpp"

#include <algorithm>
#include <vector>

#include "base/error.hpp"
#include "optim/arithmetic/adam_factors.hpp"
#include "optim/cuda/kernels.hpp"
#include "optim/kinds.hpp"

namespace zcomm::optim {
namespace {

using device::KernelTask;
using Each = std::function<void(const device::Touched&)>;

/// The CPU's step, only on the task's thread: a stream is one worker, and the pool belongs to the host's own steps.
template <class Params>
void step_here(const OptimShard& shard, int arrays, const typename Kind<Params>::Factors& factors) {
  const CheckedShard checked{shard, arrays};
  run_step(std::span(&checked, 1), &factors, 1, current_optim_table().*Kind<Params>::kKernel, nullptr);
}

void touch_shard(const char* call, const OptimShard& s, int arrays, const Each& each) {
  const std::size_t n = s.end - s.begin, weight = size_of(s.weight_dtype), grad = size_of(s.grad_dtype);
  each({static_cast<const std::byte*>(s.grad) + s.begin * grad, n * grad, false});
  each({static_cast<std::byte*>(s.weight) + s.begin * weight, n * weight, true});
  if (const std::size_t nbytes = state_nbytes(call, s.weight_dtype, arrays, s.count, s.state_dtype))
    each({s.state, nbytes, true});
}

template <class Params>
class StepTask final : public KernelTask {
 public:
  using K = Kind<Params>;
  using Factors = typename K::Factors;
  StepTask(const OptimShard& shard, int arrays, const Factors& factors, const OnDevice<Factors>* on_device)
      : shard_(shard), arrays_(arrays), factors_(factors), on_device_(on_device) {}

  const char* name() const override { return K::kName; }
  void touch(const Each& each) const override {
    touch_shard(K::kName, shard_, arrays_, each);
    if (on_device_ != nullptr) each({on_device_, sizeof(*on_device_), false});
  }
  void on_host() const override {
    if (on_device_ == nullptr) return step_here<Params>(shard_, arrays_, factors_);
    if (on_device_->skip == 0) step_here<Params>(shard_, arrays_, on_device_->factors);
  }
  void on_cuda(std::uintptr_t stream) const override {
    cuda::launch_step(shard_, arrays_, factors_, on_device_, stream);
  }
  std::shared_ptr<const KernelTask> copy() const override { return std::make_shared<StepTask>(*this); }

 private:
  OptimShard shard_;
  int arrays_;
  Factors factors_;
  const OnDevice<Factors>* on_device_;
};

/// Kernels of a device read one gradient.
void refuse_addend(const char* call, const OptimShard& shard) {
  if (shard.addend != nullptr)
    throw InvalidArgument(text(call, ": a step on a device takes no addend; add it to grad first"));
}

template <class Params>
void put_step(device::StreamKernels& kernels, const OptimShard& shard, int arrays,
              const typename Kind<Params>::Factors& factors,
              const OnDevice<typename Kind<Params>::Factors>* on_device) {
  check_step(Kind<Params>::kName, shard, arrays, Kind<Params>::kRoundsState);
  refuse_addend(Kind<Params>::kName, shard);
  if (shard.begin != shard.end) kernels.run(StepTask<Params>(shard, arrays, factors, on_device));
}

template <class Params>
void put_step(device::StreamKernels& kernels, const OptimShard& shard, const Params& params) {
  Kind<Params>::check(params);
  put_step<Params>(kernels, shard, Kind<Params>::arrays(params), Kind<Params>::factors(params), nullptr);
}

template <class Params>
void put_step(device::StreamKernels& kernels, const OptimShard& shard,
              const OnDevice<typename Kind<Params>::Factors>* on_device) {
  if (on_device == nullptr) throw InvalidArgument(text(Kind<Params>::kName, ": on_device is null"));
  put_step<Params>(kernels, shard, Kind<Params>::arrays({}), {}, on_device);
}

class AdamTask final : public KernelTask {
 public:
  AdamTask(std::span<const StreamAdamItem> items, const StreamAdam& options, OnDevice<AdamFactors>* factors)
      : items_(items), options_(options), factors_(factors) {}

  const char* name() const override { return "adam"; }
  void touch(const Each& each) const override {
    for (const float* number : {options_.lr, options_.grad_scale, options_.found_inf})
      if (number != nullptr) each({number, sizeof(*number), false});
    each({factors_, items_.size() * sizeof(*factors_), true});
    for (const StreamAdamItem& item : items_) {
      touch_shard("adam", item.shard, 2, each);
      each({item.counter, sizeof(*item.counter), true});
    }
  }
  void on_host() const override {
    if (options_.found_inf != nullptr && *options_.found_inf != 0.0f) return;
    const double lr = options_.lr == nullptr ? options_.params.lr : static_cast<double>(*options_.lr);
    const double divisor = options_.grad_scale == nullptr ? 1.0 : static_cast<double>(*options_.grad_scale);
    const float scale = signed_scale(static_cast<float>(options_.clip / divisor), options_.params.maximize);
    for (const StreamAdamItem& item : items_) {
      const auto step = static_cast<std::uint64_t>(*item.counter) + 1;
      *item.counter += 1.0f;
      if (item.shard.begin != item.shard.end)
        step_here<AdamParams>(item.shard, 2, adam_factors(options_.params, lr, scale, step));
    }
  }
  void on_cuda(std::uintptr_t stream) const override {
    cuda::launch_advance(items_, options_, factors_, stream);
    cuda::launch_adam(items_, factors_, stream);
  }
  std::shared_ptr<const KernelTask> copy() const override {
    auto own = std::make_shared<AdamTask>(*this);
    own->kept_.assign(items_.begin(), items_.end());
    own->items_ = own->kept_;
    return own;
  }

 private:
  std::vector<StreamAdamItem> kept_;
  std::span<const StreamAdamItem> items_;
  StreamAdam options_;
  OnDevice<AdamFactors>* factors_;
};

class SquaresTask final : public KernelTask {
 public:
  SquaresTask(double* sums, const void* grad, DType dtype, std::size_t count)
      : sums_(sums), grad_(grad), dtype_(dtype), count_(count) {}

  const char* name() const override { return "squares"; }
  void touch(const Each& each) const override {
    each({grad_, count_ * size_of(dtype_), false});
    each({sums_, (count_ + kNormBlock - 1) / kNormBlock * sizeof(double), true});
  }
  void on_host() const override { block_squares(sums_, grad_, dtype_, count_); }
  void on_cuda(std::uintptr_t stream) const override { cuda::launch_squares(sums_, grad_, dtype_, count_, stream); }
  std::shared_ptr<const KernelTask> copy() const override { return std::make_shared<SquaresTask>(*this); }

 private:
  double* sums_;
  const void* grad_;
  DType dtype_;
  std::size_t count_;
};

class NormTask final : public KernelTask {
 public:
  NormTask(std::int64_t* words, const void* grad, DType dtype, std::size_t count)
      : words_(words), grad_(grad), dtype_(dtype), count_(count) {}

  const char* name() const override { return "norm"; }
  void touch(const Each& each) const override {
    each({grad_, count_ * size_of(dtype_), false});
    each({words_, ExactSum::kWords * sizeof(*words_), true});
  }
  void on_host() const override {
    ExactSum sum;
    add_squares_alone(sum, grad_, dtype_, count_);
    for (std::size_t i = 0; i < ExactSum::kWords; ++i) words_[i] += sum.words()[i];
  }
  void on_cuda(std::uintptr_t stream) const override { cuda::launch_norm(words_, grad_, dtype_, count_, stream); }
  std::shared_ptr<const KernelTask> copy() const override { return std::make_shared<NormTask>(*this); }

 private:
  std::int64_t* words_;
  const void* grad_;
  DType dtype_;
  std::size_t count_;
};

}  // namespace

OnDevice<AdamFactors> factors_of(const AdamParams& params) {
  Kind<AdamParams>::check(params);
  return {Kind<AdamParams>::factors(params)};
}
OnDevice<LionFactors> factors_of(const LionParams& params) {
  Kind<LionParams>::check(params);
  return {Kind<LionParams>::factors(params)};
}

void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const AdamParams& params) {
  put_step(kernels, shard, params);
}
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const LionParams& params) {
  put_step(kernels, shard, params);
}
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const SgdParams& params) {
  put_step(kernels, shard, params);
}
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const AdagradParams& params) {
  put_step(kernels, shard, params);
}
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const OnDevice<AdamFactors>* on_device) {
  put_step<AdamParams>(kernels, shard, on_device);
}
void stream_step(device::StreamKernels& kernels, const OptimShard& shard, const OnDevice<LionFactors>* on_device) {
  put_step<LionParams>(kernels, shard, on_device);
}

void stream_adam(device::StreamKernels& kernels, std::span<const StreamAdamItem> items, const StreamAdam& options,
                 OnDevice<AdamFactors>* factors) {
  AdamParams params = options.params;
  params.step = 1;  // counted on the device
  Kind<AdamParams>::check(params);
  if (items.empty()) return;
  if (factors == nullptr) throw InvalidArgument(text("adam: factors is null, ", items.size(), " items"));
  for (std::size_t i = 0; i < items.size(); ++i) {
    check_step("adam", items[i].shard, 2, true);
    refuse_addend("adam", items[i].shard);
    if (items[i].counter == nullptr) throw InvalidArgument(text("adam: counter of item ", i, " is null"));
  }
  kernels.run(AdamTask(items, options, factors));
}

void stream_squares(device::StreamKernels& kernels, double* sums, const void* grad, DType dtype, std::size_t count) {
  check_squares(grad, dtype, count);
  if (count > 0 && sums == nullptr) throw InvalidArgument(text("squares: sums is null, count ", count));
  if (count > 0) kernels.run(SquaresTask(sums, grad, dtype, count));
}

void stream_norm(device::StreamKernels& kernels, std::int64_t* words, const void* grad, DType dtype,
                 std::size_t count) {
  check_squares(grad, dtype, count);
  if (words == nullptr) throw InvalidArgument(text("norm: words is null, count ", count));
  if (count > 0) kernels.run(NormTask(words, grad, dtype, count));
}

void add_words(ExactSum& sum, std::span<const std::int64_t, ExactSum::kWords> words) {
  ExactSum other;
  std::copy(words.begin(), words.end(), other.words().begin());
  sum.add(other);
}

}  // namespace zcomm::optim
