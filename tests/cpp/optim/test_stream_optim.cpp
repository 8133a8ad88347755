// Optimizer steps and block squares on streams against the CPU's, bit by bit, over types, counts, tiles, cuts,
// alignments and nonfinite numbers: CUDA's kernels under the emulation, a simulated device, a GPU if there is one.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "doubles/simulated/device.hpp"
#include "runners.hpp"
#include "shard_state.hpp"
#include "test.hpp"
#include "zcomm/error.hpp"

namespace zcomm {
namespace {

using optim::OnDevice;
using optim::StreamAdam;
using optim::StreamAdamItem;

constexpr DType kStates[] = {DType::float32, DType::bfloat16, DType::uint8};
constexpr DType kAllWeights[] = {DType::float32, DType::bfloat16, DType::float16};

/// A shard in memory of its own: guards after each array, `shift` elements before weight and gradient.
struct Owned {
  using Bytes = test::LockedBytes;
  OptimShard shard{};
  Bytes weight, grad, state;

  Owned(DType weight_dtype, DType grad_dtype, DType state_dtype, int arrays, std::size_t count, std::size_t tile_count,
        std::size_t shift, unsigned seed)
      : weight((count + shift) * 4 + 64, std::byte{0x5a}),
        grad((count + shift) * 4 + 64, std::byte{0x5a}),
        state((count + 1) * (static_cast<std::size_t>(arrays) * 4 + 4) + (count / 256 + 2) * 8 + 64) {
    shard = {weight.data() + shift * size_of(weight_dtype),
             weight_dtype,
             grad.data() + shift * size_of(grad_dtype),
             grad_dtype,
             state.data(),
             count,
             tile_count,
             0,
             count,
             state_dtype,
             seed % 2 == 0 ? 12345u : (std::uint64_t{1} << 32) - 700};
    const auto master = random_floats(count, seed);
    if (count == 0) return;
    if (weight_dtype == DType::float32) {
      std::memcpy(shard.weight, master.data(), count * 4);
    } else {
      split_master(shard, master.data(), arrays);
    }
    fill_grad(seed + 1);
  }

  void fill_grad(unsigned seed) {
    const auto bytes = gradient(shard.count, shard.grad_dtype, seed);
    std::memcpy(const_cast<void*>(shard.grad), bytes.data(), shard.count * size_of(shard.grad_dtype));
  }
  void spoil(std::size_t at, float x) {
    if (at < shard.count)
      device::cast(static_cast<std::byte*>(const_cast<void*>(shard.grad)) + at * size_of(shard.grad_dtype),
                   shard.grad_dtype, &x, DType::float32, 1);
  }

  /// With the same bits, elsewhere.
  Owned copy() const {
    Owned other(*this);
    const auto moved = [&](const void* data, const Bytes& from, Bytes& to) {
      return to.data() + (static_cast<const std::byte*>(data) - from.data());
    };
    other.shard.weight = moved(shard.weight, weight, other.weight);
    other.shard.grad = moved(shard.grad, grad, other.grad);
    other.shard.state = other.state.data();
    return other;
  }
};

bool same_floats(const void* a, const void* b, DType dtype, std::size_t count) {
  if (std::memcmp(a, b, count * size_of(dtype)) == 0) return true;
  std::vector<float> x(count), y(count);
  device::cast(x.data(), DType::float32, a, dtype, count);
  device::cast(y.data(), DType::float32, b, dtype, count);
  for (std::size_t i = 0; i < count; ++i)
    if (std::memcmp(&x[i], &y[i], 4) != 0 && !(std::isnan(x[i]) && std::isnan(y[i]))) return false;
  return true;
}

/// All bytes, but that any NaN of the gradient's making equals any other.
bool same(const Owned& a, const Owned& b, bool finite) {
  if (finite) return a.weight == b.weight && a.grad == b.grad && a.state == b.state;
  const std::size_t n = a.shard.count;
  if (!same_floats(a.shard.weight, b.shard.weight, a.shard.weight_dtype, n)) return false;
  const auto floats = [&](std::size_t at, DType dtype, std::size_t count) {
    return same_floats(a.state.data() + at, b.state.data() + at, dtype, count);
  };
  const auto bytes_from = [&](std::size_t at) {
    return std::equal(&a.state[at], a.state.data() + a.state.size(), &b.state[at]);
  };
  if (a.shard.tile_count < n) return a.shard.state_dtype != DType::uint8 || bytes_from(0);
  const std::size_t master = a.shard.weight_dtype == DType::float16 ? n : 0;  // before the state
  if (!floats(0, DType::float32, master)) return false;
  switch (a.shard.state_dtype) {
    case DType::float32:
      return floats(master * 4, DType::float32, n);
    case DType::bfloat16:
      return floats(master * 4, DType::bfloat16, n);
    default:  // codes and scales
      return bytes_from(master * 4);
  }
}

std::string describe(const OptimShard& s) {
  return std::string(name_of(s.weight_dtype)) + " weight, " + std::string(name_of(s.grad_dtype)) + " grad, " +
         std::string(name_of(s.state_dtype)) + " state, count " + std::to_string(s.count) + ", tile " +
         std::to_string(s.tile_count) + ", [" + std::to_string(s.begin) + ", " + std::to_string(s.end) + ")";
}

AdamParams adam_params(int step, bool adamw) {
  return {.lr = 1e-2,
          .beta2 = 0.95,
          .weight_decay = 0.03,
          .adamw = adamw,
          .maximize = step % 2 == 0,
          .step = step,
          .grad_scale = 0.7f};
}

/// Three steps of each; the third by factors in device memory.
void compare_adam(test::Runner& runner, const Owned& start, bool adamw, bool finite) {
  Owned first = start.copy(), second = start.copy();
  for (int step = 1; step <= 3; ++step) {
    for (Owned* each : {&first, &second}) {
      each->fill_grad(static_cast<unsigned>(step) + 50);
      if (finite) continue;
      each->spoil(3, std::numeric_limits<float>::infinity());
      each->spoil(static_cast<std::size_t>(step) * 40, std::numeric_limits<float>::quiet_NaN());
    }
    const AdamParams params = adam_params(step, adamw);
    adam_step(first.shard, params, 1);
    const test::Locked told(optim::factors_of(params));
    step == 3 ? runner.step(second.shard, told.get()) : runner.step(second.shard, params);
    runner.synchronize();
    if (same(first, second, finite)) continue;
    return test::fail(__FILE__, __LINE__,
                      runner.name() + ": " + describe(first.shard) + ", step " + std::to_string(step));
  }
}

void compare_on_all(const Owned& start, bool adamw, bool finite) {
  for (const auto& runner : test::runners()) compare_adam(*runner, start, adamw, finite);
}

std::vector<std::size_t> counts() {
  if (test::few_values()) return {1, 38, 257, 2049};
  std::vector<std::size_t> all;
  for (std::size_t n = 1; n <= 40; n += 3) all.push_back(n);
  for (std::size_t n : {64u, 255u, 256u, 257u, 300u, 511u, 512u, 1000u, 2047u, 2048u, 2049u, 5000u}) all.push_back(n);
  return all;
}

TEST(stream_optim, adam_has_the_cpus_bits) {
  unsigned seed = 0;
  for (const DType weight : kAllWeights)
    for (const DType grad : kGrads)
      for (const DType state : kStates)
        for (const std::size_t count : counts())
          for (const std::size_t shift : {0u, 1u})
            ++seed, compare_on_all(Owned(weight, grad, state, 2, count, count, shift, seed), seed % 2 == 0, true);
}

TEST(stream_optim, adam_takes_tiles_and_ranges) {
  unsigned seed = 0;
  for (const DType weight : kAllWeights)
    for (const DType state : kStates)
      for (const std::size_t tile : {256u, 2304u, 4096u}) {
        if (test::few_values() && tile != 2304) continue;
        for (const auto& [begin, end] : std::vector<std::pair<std::size_t, std::size_t>>{
                 {0, 9000}, {256, 9000}, {2304, 4608}, {512, 768}, {4096, 8192}, {0, 0}}) {
          Owned shard(weight, DType::bfloat16, state, 2, 9000, tile, 0, ++seed);
          shard.shard.begin = begin;
          shard.shard.end = end;
          compare_on_all(shard, true, true);
        }
      }
  for (const std::size_t begin : {1u, 5u, 99u}) {
    Owned shard(DType::bfloat16, DType::float32, DType::bfloat16, 2, 5000, 1000, 0, ++seed);
    shard.shard.begin = begin;
    shard.shard.end = 4321 + begin;
    compare_on_all(shard, true, true);
  }
}

TEST(stream_optim, adam_with_numbers_that_are_not_finite) {
  unsigned seed = 0;
  for (const DType weight : kAllWeights)
    for (const DType grad : kGrads)
      for (const DType state : kStates)
        for (const std::size_t count : {4u, 100u, 700u, 3000u})
          compare_on_all(Owned(weight, grad, state, 2, count, count, 0, ++seed), true, false);
}

void compare_lion(test::Runner& runner, DType weight, DType grad, std::size_t count, unsigned seed) {
  Owned first(weight, grad, DType::float32, 1, count, count < 1000 ? count : 1000, seed % 2, seed);
  Owned second = first.copy();
  for (int step = 1; step <= 3; ++step) {
    for (Owned* each : {&first, &second}) each->fill_grad(static_cast<unsigned>(step));
    const LionParams params{.lr = 1e-2, .weight_decay = 0.1, .grad_scale = 0.5f};
    lion_step(first.shard, params, 1);
    const test::Locked told(optim::factors_of(params));
    step == 2 ? runner.step(second.shard, told.get()) : runner.step(second.shard, params);
    runner.synchronize();
  }
  if (!same(first, second, true)) test::fail(__FILE__, __LINE__, runner.name() + ": lion, " + describe(first.shard));
}

TEST(stream_optim, lion_has_the_cpus_bits) {
  unsigned seed = 0;
  for (const auto& runner : test::runners())
    for (const DType weight : kAllWeights)
      for (const DType grad : kGrads)
        for (const std::size_t count : counts()) compare_lion(*runner, weight, grad, count, ++seed);
}

void step_here(const OptimShard& shard, const SgdParams& params) { sgd_step(shard, params, 1); }
void step_here(const OptimShard& shard, const AdagradParams& params) { adagrad_step(shard, params, 1); }

/// Three steps, of `params[i]`, in tiles and ranges.
template <class Params>
void compare_steps(const char* what, int arrays, const std::array<Params, 3>& params) {
  unsigned seed = 0;
  for (const auto& runner : test::runners())
    for (const DType weight : kAllWeights)
      for (const DType grad : kGrads)
        for (const std::size_t count : counts()) {
          ++seed;
          Owned first(weight, grad, DType::float32, arrays, count, count < 1000 ? count : 1000, seed % 2, seed);
          if (count > 8) first.shard.begin = 4, first.shard.end = count - 3;
          Owned second = first.copy();
          for (unsigned step = 0; step < 3; ++step) {
            for (Owned* each : {&first, &second}) each->fill_grad(step);
            step_here(first.shard, params[step]);
            runner->step(second.shard, params[step]);
            runner->synchronize();
          }
          if (!same(first, second, true))
            test::fail(__FILE__, __LINE__, runner->name() + ": " + what + ", " + describe(first.shard));
        }
}

TEST(stream_optim, sgd_has_the_cpus_bits) {
  const SgdParams plain{.lr = 1e-2, .weight_decay = 0.1, .grad_scale = 0.5f};
  compare_steps<SgdParams>("sgd", 0, {plain, plain, plain});
  SgdParams first = plain, more, idle = plain;
  first.momentum = 0.9, first.dampening = 0.1, first.buffer = first.first = idle.buffer = true;
  more = first, more.first = false;
  compare_steps<SgdParams>("sgd with momentum", 1, {first, more, idle});
  SgdParams nesterov = first, up = more;
  nesterov.nesterov = up.nesterov = up.maximize = true, nesterov.dampening = up.dampening = 0.0;
  compare_steps<SgdParams>("sgd, nesterov", 1, {idle, nesterov, up});
}

TEST(stream_optim, adagrad_has_the_cpus_bits) {
  const AdagradParams one{.lr = 1e-2, .lr_decay = 0.1, .weight_decay = 0.1, .grad_scale = 0.5f};
  AdagradParams two = one, three = one;
  two.step = 2, three.step = 3, three.maximize = true;
  compare_steps<AdagradParams>("adagrad", 1, {one, two, three});
}

TEST(stream_optim, skip_changes_nothing) {
  for (const auto& runner : test::runners()) {
    Owned first(DType::float32, DType::float32, DType::float32, 2, 3000, 3000, 0, 1), second = first.copy();
    auto told = optim::factors_of(AdamParams{});
    told.skip = 1;
    const test::Locked locked(told);
    runner->step(second.shard, locked.get());
    runner->synchronize();
    EXPECT_TRUE(same(first, second, true));
  }
}

constexpr unsigned kMany = 400;  // more than two launches of either kind take

/// Parameters of all types: the CPU's steps one by one, and all together on a stream. Turn 2 has found infinity.
void compare_many(test::Runner& runner) {
  std::vector<Owned> expected, stepped;
  std::vector<float> start(kMany);
  for (unsigned i = 0; i < kMany; ++i) {
    const std::size_t count = i % 9 == 0 ? 0 : i % 50 == 3 ? 5000 + i : (i * 577) % 500 + 1;
    expected.emplace_back(kAllWeights[i / 20 % 3], kGrads[i % 3], kStates[i / 30 % 3], 2, count, count + 1, i % 2, i);
    stepped.push_back(expected.back().copy());
    start[i] = static_cast<float>(i % 4);
  }
  const test::LockedFloats numbers{8.0f, 3e-3f, 1.0f, 0.0f};
  test::LockedFloats counters(start.begin(), start.end());
  test::LockedVector<OnDevice<optim::AdamFactors>> factors(kMany);
  std::vector<StreamAdamItem> items;
  for (std::size_t i = 0; i < kMany; ++i) items.push_back({stepped[i].shard, &counters[i]});
  for (int turn = 0; turn < 4; ++turn) {
    StreamAdam options{.params = adam_params(1, true), .clip = 0.9};
    if (turn > 0) options.grad_scale = &numbers[0], options.lr = &numbers[1];
    options.found_inf = turn == 2 ? &numbers[2] : turn == 3 ? &numbers[3] : nullptr;
    for (std::size_t i = 0; turn != 2 && i < expected.size(); ++i) {
      AdamParams params = options.params;
      params.step = static_cast<std::int64_t>(counters[i]) + 1;
      params.grad_scale = static_cast<float>(turn > 0 ? 0.9 / 8.0 : 0.9);
      if (turn > 0) params.lr = static_cast<double>(numbers[1]);
      adam_step(expected[i].shard, params, 1);
    }
    runner.adam(items, options, factors.data());
    runner.synchronize();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_EQ(counters[i], start[i] + static_cast<float>(turn < 2 ? turn + 1 : turn));
      if (!same(expected[i], stepped[i], true))
        test::fail(__FILE__, __LINE__,
                   runner.name() + ": item " + std::to_string(i) + ": " + describe(expected[i].shard));
    }
  }
}

TEST(stream_optim, many_parameters_at_once) {
  for (const auto& runner : test::runners()) compare_many(*runner);
}

TEST(stream_optim, block_squares_sum_to_the_norm) {
  for (const auto& runner : test::runners())
    for (const DType dtype : kGrads)
      for (std::size_t count = 0; count <= 9000; count += count < (test::few_values() ? 9u : 200u) ? 1 : 391) {
        const auto bytes = gradient(count, dtype, static_cast<unsigned>(count));
        test::LockedBytes grad(bytes.begin(), bytes.end());
        if (count % 10 == 7) std::memset(grad.data(), 0xff, size_of(dtype));  // NaN
        const std::size_t blocks = (count + 63) / 64;
        test::LockedVector<double> sums(blocks + 1, -1.0);
        runner->squares(sums.data(), grad.data(), dtype, count);
        runner->synchronize();
        ExactSum sum, expected;
        optim::add_block_sums(sum, {sums.data(), blocks});
        add_squares(expected, grad.data(), dtype, count);
        EXPECT_EQ(sums[blocks], -1.0);
        std::vector<double> here(blocks);
        optim::block_squares(here.data(), grad.data(), dtype, count);
        EXPECT_TRUE(count % 10 == 7 || count == 0 ||
                    std::memcmp(here.data(), sums.data(), blocks * sizeof(double)) == 0);
        const double a = sum.value(), b = expected.value();
        EXPECT_TRUE(a == b || (std::isnan(a) && std::isnan(b)));
      }
}

TEST(stream_optim, a_norm_is_added_where_the_gradients_are) {
  for (const auto& runner : test::runners())
    for (const DType dtype : kGrads) {
      test::LockedVector<std::int64_t> words(ExactSum::kWords, 0);
      ExactSum expected;
      for (const std::size_t count : {0u, 1u, 64u, 4095u, test::few_values() ? 17000u : 70000u}) {
        const auto bytes = gradient(count, dtype, static_cast<unsigned>(count));
        const test::LockedBytes grad(bytes.begin(), bytes.end());
        runner->norm(words.data(), grad.data(), dtype, count);
        runner->synchronize();
        add_squares(expected, grad.data(), dtype, count);
        ExactSum sum;
        sum.add(1.0);
        optim::add_words(sum, std::span<const std::int64_t, ExactSum::kWords>(words.data(), ExactSum::kWords));
        sum.add(-1.0);
        EXPECT_EQ(sum.value(), expected.value());
      }
      const float infinite = std::numeric_limits<float>::infinity();
      test::LockedBytes bad(64 * sizeof(float));
      std::memcpy(bad.data(), &infinite, sizeof(infinite));
      runner->norm(words.data(), bad.data(), DType::float32, 64);
      runner->synchronize();
      ExactSum sum;
      optim::add_words(sum, std::span<const std::int64_t, ExactSum::kWords>(words.data(), ExactSum::kWords));
      EXPECT_TRUE(std::isnan(sum.value()));
    }
}

TEST(stream_optim, arguments_are_checked) {
  const auto device = device::make_simulated_device();
  const auto stream = device->make_stream();
  device::StreamKernels& kernels = stream->kernels();
  Owned owned(DType::float32, DType::float32, DType::float32, 2, 10, 10, 0, 1);
  float counter = 0;
  double sum = 0;
  const StreamAdamItem item{owned.shard, &counter}, uncounted{owned.shard, nullptr};
  OnDevice<optim::AdamFactors> factors{};
  const auto adam = [&](const StreamAdamItem& it, const StreamAdam& options, auto* out) {
    optim::stream_adam(kernels, {&it, 1}, options, out);
  };
  EXPECT_THROW_WITH(adam(uncounted, {}, &factors), InvalidArgument, "counter of item 0");
  EXPECT_THROW_WITH(adam(item, {}, static_cast<OnDevice<optim::AdamFactors>*>(nullptr)), InvalidArgument, "factors");
  StreamAdam bad;
  bad.params.beta1 = 1.5;
  EXPECT_THROW_WITH(adam(item, bad, &factors), InvalidArgument, "beta 1.5");
  EXPECT_THROW_WITH(optim::stream_step(kernels, owned.shard, static_cast<OnDevice<optim::AdamFactors>*>(nullptr)),
                    InvalidArgument, "on_device is null");
  OptimShard two_terms = owned.shard;
  two_terms.addend = two_terms.grad;
  const StreamAdamItem item_of_two{two_terms, &counter};
  EXPECT_THROW_WITH(optim::stream_step(kernels, two_terms, SgdParams{}), InvalidArgument, "takes no addend");
  EXPECT_THROW_WITH(adam(item_of_two, {}, &factors), InvalidArgument, "adam: a step on a device takes no addend");
  owned.shard.grad_dtype = DType::int32;
  EXPECT_THROW_WITH(optim::stream_step(kernels, owned.shard, AdamParams{}), InvalidArgument, "int32");
  EXPECT_THROW_WITH(optim::stream_squares(kernels, &sum, &sum, DType::float64, 1), InvalidArgument, "float64");
  EXPECT_THROW_WITH(optim::stream_squares(kernels, nullptr, &sum, DType::float32, 1), InvalidArgument, "sums is null");
  EXPECT_THROW_WITH(optim::stream_norm(kernels, nullptr, &sum, DType::float32, 1), InvalidArgument, "words is null");
  EXPECT_EQ(counter, 0.0f);
}

}  // namespace
}  // namespace zcomm
