// Kind<Params>: the description of an optimizer for the code that runs its steps (step_shard, OptimBatch): name,
// arrays, checks and factors. Each is defined next to its optimizer's step.
#pragma once

#include "optim/shard.hpp"
#include "zcomm/adagrad.hpp"
#include "zcomm/adam.hpp"
#include "zcomm/lion.hpp"
#include "zcomm/sgd.hpp"

namespace zcomm::optim {

template <class Params>
struct Kind;

template <>
struct Kind<AdamParams> {
  using Factors = AdamFactors;
  static constexpr const char* kName = "adam";
  static constexpr bool kRoundsState = true;
  static constexpr auto kKernel = &OptimTable::adam;
  static int arrays(const AdamParams&) { return 2; }  // m, v
  static void check(const AdamParams& params);
  static Factors factors(const AdamParams& params);
};

template <>
struct Kind<SgdParams> {
  using Factors = SgdFactors;
  static constexpr const char* kName = "sgd";
  static constexpr bool kRoundsState = false;
  static constexpr auto kKernel = &OptimTable::sgd;
  static int arrays(const SgdParams& params) { return params.buffer ? 1 : 0; }
  static void check(const SgdParams& params);
  static Factors factors(const SgdParams& params);
};

template <>
struct Kind<LionParams> {
  using Factors = LionFactors;
  static constexpr const char* kName = "lion";
  static constexpr bool kRoundsState = false;
  static constexpr auto kKernel = &OptimTable::lion;
  static int arrays(const LionParams&) { return 1; }  // m
  static void check(const LionParams& params);
  static Factors factors(const LionParams& params);
};

template <>
struct Kind<AdagradParams> {
  using Factors = AdagradFactors;
  static constexpr const char* kName = "adagrad";
  static constexpr bool kRoundsState = false;
  static constexpr auto kKernel = &OptimTable::adagrad;
  static int arrays(const AdagradParams&) { return 1; }  // sum of squares
  static void check(const AdagradParams& params);
  static Factors factors(const AdagradParams& params);
};

template <class Params>
void check_step(const OptimShard& shard, const Params& params) {
  using K = Kind<Params>;
  check_step(K::kName, shard, K::arrays(params), K::kRoundsState);
  K::check(params);
}

template <class Params>
void step_shard(const OptimShard& shard, const Params& params, int threads, ExactSum* squares) {
  using K = Kind<Params>;
  check_step(shard, params);
  const CheckedShard checked{shard, K::arrays(params)};
  const typename K::Factors factors = K::factors(params);
  run_step(std::span(&checked, 1), &factors, threads, current_optim_table().*K::kKernel, squares);
}

}  // namespace zcomm::optim
