// adagrad_step: checks its parameters and computes a step's factors once, in f64.
#include "zcomm/adagrad.hpp"

#include "base/error.hpp"
#include "optim/shard.hpp"

namespace zcomm {
namespace {

constexpr int kArrays = 1;  // sum of squares

optim::AdagradFactors factors_of(const AdagradParams& p) {
  return {.grad_scale = optim::signed_scale(p.grad_scale, p.maximize),
          .l2 = static_cast<float>(p.weight_decay),
          .eps = static_cast<float>(p.eps),
          .rate = static_cast<float>(p.lr / (1.0 + static_cast<double>(p.step - 1) * p.lr_decay))};
}

}  // namespace

std::size_t adagrad_state_nbytes(DType weight, std::size_t count) {
  return count * optim::state_bytes_per_element("adagrad", weight, kArrays);
}

void adagrad_step(const OptimShard& shard, const AdagradParams& params, int threads, ExactSum* squares) {
  optim::check_step("adagrad", shard, kArrays);
  if (params.step < 1)
    throw InvalidArgument(text("adagrad: step ", params.step, " is less than 1; steps count from 1"));
  optim::run_step(shard, kArrays, threads, optim::current_optim_table().adagrad, factors_of(params), squares);
}

}  // namespace zcomm
