// adam_step: checks its parameters and computes a step's factors once, in f64.
#include "zcomm/adam.hpp"

#include "base/error.hpp"
#include "base/float_mode.hpp"
#include "optim/arithmetic/adam_factors.hpp"
#include "optim/kinds.hpp"

namespace zcomm {
namespace {

constexpr int kArrays = 2;  // m, v

void check_coded(const char* call, const OptimShard& shard, const float* m, const float* v) {
  optim::check_shard(call, shard, kArrays);
  if (shard.state_dtype != DType::uint8)
    throw InvalidArgument(text(call, ": state is ", name_of(shard.state_dtype), "; it must be uint8"));
  if ((m == nullptr || v == nullptr) && shard.begin != shard.end) throw InvalidArgument(text(call, ": m or v is null"));
}

}  // namespace

namespace optim {

void Kind<AdamParams>::check(const AdamParams& p) {
  check_beta(kName, p.beta1);
  check_beta(kName, p.beta2);
  if (p.step < 1) throw InvalidArgument(text("adam: step ", p.step, " is less than 1; steps count from 1"));
}

AdamFactors Kind<AdamParams>::factors(const AdamParams& p) {
  return adam_factors(p, p.lr, signed_scale(p.grad_scale, p.maximize), static_cast<std::uint64_t>(p.step));
}

}  // namespace optim

std::size_t adam_state_nbytes(DType weight, std::size_t count, DType state) {
  return optim::state_nbytes("adam", weight, kArrays, count, state);
}

void adam_step(const OptimShard& shard, const AdamParams& params, int threads, ExactSum* squares) {
  optim::step_shard(shard, params, threads, squares);
}

void adam_encode_state(const OptimShard& shard, const float* m, const float* v) {
  check_coded("adam_encode_state", shard, m, v);
  const DefaultFloatMode mode;
  const auto encode = optim::current_optim_table().encode_state;
  optim::for_each_piece(shard, kArrays, 0, [=](const optim::OptimPiece& piece, auto, std::size_t begin) {
    encode(piece, m + begin, v + begin);
  });
}

void adam_decode_state(const OptimShard& shard, float* m, float* v) {
  check_coded("adam_decode_state", shard, m, v);
  const DefaultFloatMode mode;
  const auto decode = optim::current_optim_table().decode_state;
  optim::for_each_piece(shard, kArrays, 0, [=](const optim::OptimPiece& piece, auto, std::size_t begin) {
    decode(m + begin, v + begin, piece);
  });
}

}  // namespace zcomm
