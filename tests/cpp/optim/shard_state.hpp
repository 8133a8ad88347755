// A shard with its state in memory of its own, random gradients in every dtype, and the ISAs of this CPU.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "device/kernels.hpp"
#include "optim/optim_table.hpp"
#include "zcomm/adam.hpp"
#include "zcomm/optim_shard.hpp"

namespace zcomm {

struct State {
  DType weight_dtype;
  std::size_t count, tile_count;
  int arrays;
  DType state_dtype;
  std::vector<float> weight;            // f32 weight, or unused
  std::vector<std::uint16_t> weight16;  // bf16 weight, or unused
  std::vector<float> storage;           // state bytes, aligned
  bool operator==(const State& other) const {
    const auto same = [](const auto& a, const auto& b) {
      return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0);
    };
    return same(weight, other.weight) && same(weight16, other.weight16) && same(storage, other.storage);
  }

  OptimShard shard(const void* grad, DType grad_dtype) {
    void* data = weight_dtype == DType::float32 ? static_cast<void*>(weight.data()) : weight16.data();
    return {data,  weight_dtype, grad, grad_dtype, reinterpret_cast<std::byte*>(storage.data()),
            count, tile_count,   0,    count,      state_dtype};
  }
};

inline State make_state(DType dtype, std::size_t tile_count, const std::vector<float>& master, int arrays = 2,
                        DType state = DType::float32) {
  const std::size_t bytes = static_cast<std::size_t>(arrays) * size_of(state) + (dtype == DType::bfloat16 ? 2 : 0);
  const std::size_t scales = state == DType::uint8 ? (master.size() / optim::kStateBlock + 1) * 2 : 0;
  State s{dtype, master.size(), tile_count, arrays, state, {}, {}, {}};
  s.storage.resize(bytes * master.size() / 4 + 1 + scales);
  if (dtype == DType::float32) {
    s.weight = master;
  } else {
    s.weight16.resize(master.size());
    split_master(s.shard(nullptr, DType::float32), master.data(), arrays);
  }
  return s;
}

inline std::vector<float> master_of(State& s) {
  if (s.weight_dtype == DType::float32) return s.weight;
  std::vector<float> master(s.count);
  join_master(s.shard(nullptr, DType::float32), master.data(), s.arrays);
  return master;
}

inline std::vector<float> random_floats(std::size_t count, unsigned seed, float scale = 1.0f) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> out(count);
  for (float& x : out) x = normal(random);
  return out;
}

/// A gradient in the asked dtype, as bytes.
inline std::vector<std::byte> gradient(std::size_t count, DType dtype, unsigned seed) {
  const auto wide = random_floats(count, seed, 0.1f);
  std::vector<std::byte> out(count * size_of(dtype) + 1);
  device::cast(out.data(), dtype, wide.data(), DType::float32, count);
  return out;
}

/// Four steps of Adam on the elements between `cuts`, in that order.
inline void adam_in_cuts(State& s, const std::vector<std::size_t>& cuts, int threads, std::uint64_t first_index = 0) {
  for (int t = 1; t <= 4; ++t) {
    const auto grad = gradient(s.count, DType::bfloat16, static_cast<unsigned>(t));
    OptimShard shard = s.shard(grad.data(), DType::bfloat16);
    shard.first_index = first_index;
    for (std::size_t k = 0; k + 1 < cuts.size(); ++k) {
      shard.begin = cuts[k];
      shard.end = cuts[k + 1];
      adam_step(shard, {.lr = 1e-2, .step = t}, threads);
    }
  }
}

inline constexpr DType kGrads[] = {DType::float32, DType::bfloat16, DType::float16};
inline constexpr DType kWeights[] = {DType::float32, DType::bfloat16};
inline constexpr Isa kIsas[] = {Isa::plain, Isa::avx2, Isa::avx512, Isa::avx512_bf16};

}  // namespace zcomm
