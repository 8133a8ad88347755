// The recorded bits of steps, equal on every instruction set and every processor (NEON, too, under qemu).
#include <cstdint>
#include <cstring>
#include <vector>

#include "optim/arithmetic/adam_factors.hpp"
#include "optim/optim_table.hpp"
#include "shard_state.hpp"
#include "test.hpp"
#include "zcomm/dtype.hpp"

namespace zcomm {
namespace {

/// Numbers over many octaves, of either sign, made only by integer arithmetic.
std::vector<float> numbers(std::size_t count, std::uint32_t seed) {
  std::vector<float> out(count);
  for (float& x : out) {
    seed = seed * 1664525u + 1013904223u;
    const std::uint32_t bits = (seed & 0x80000000u) | (118u + (seed >> 27 & 7u)) << 23 | (seed >> 4 & 0x7fffffu);
    std::memcpy(&x, &bits, sizeof(x));
  }
  return out;
}

std::uint64_t add_hash(std::uint64_t hash, const void* data, std::size_t nbytes) {  // FNV-1a
  for (std::size_t i = 0; i < nbytes; ++i) hash = (hash ^ static_cast<const std::uint8_t*>(data)[i]) * 0x100000001b3u;
  return hash;
}

/// Of weight, remainder and state after three steps.
template <class Step>
std::uint64_t hash_of_steps(Isa isa, DType state, bool split, const Step& step) {
  const std::size_t count = 1000;
  auto weight = numbers(count, 1);
  std::vector<std::uint16_t> high(count);
  std::vector<std::int16_t> low(count);
  std::vector<std::uint8_t> arrays(2 * 4 * count);
  std::vector<float> scales(8);
  const auto& table = optim::optim_table(isa);
  if (split) table.split(high.data(), low.data(), weight.data(), count);
  for (std::uint32_t t = 1; t <= 3; ++t) {
    const auto grad = numbers(count, 10 + t);
    optim::OptimPiece piece{weight.data(), nullptr,        {arrays.data(), arrays.data() + 4 * count},
                            grad.data(),   DType::float32, count,
                            state,         12345};
    piece.scales = scales.data();
    if (split) piece.weight = high.data(), piece.lo = low.data();
    step(table, piece, t);
  }
  std::uint64_t hash = 0xcbf29ce484222325u;
  hash = split ? add_hash(hash, high.data(), 2 * count) : add_hash(hash, weight.data(), 4 * count);
  hash = add_hash(add_hash(hash, low.data(), 2 * count), arrays.data(), arrays.size());
  return add_hash(hash, scales.data(), scales.size() * sizeof(float));
}

TEST(same_on_every_cpu, steps) {
  const auto adam = [](const optim::OptimTable& table, const optim::OptimPiece& piece, std::uint32_t t) {
    optim::AdamFactors f{0.75f, 0.9997f, 0.1f, 0.1f, 0.95f, 0.05f, 4.47f, 1e-8f, 3e-2f, t != 2, t};
    f.small = optim::small_adam_factors(f);
    table.adam(piece, f);
  };
  const auto sgd = [](const optim::OptimTable& table, const optim::OptimPiece& piece, std::uint32_t t) {
    table.sgd(piece, {0.75f, 0.1f, 0.9f, 0.7f, 0.9f, 3e-2f, true, t != 2});
  };
  const auto lion = [](const optim::OptimTable& table, const optim::OptimPiece& piece, std::uint32_t) {
    table.lion(piece, {0.75f, 0.9997f, 0.9f, 0.1f, 0.99f, 0.01f, 3e-2f});
  };
  const auto adagrad = [](const optim::OptimTable& table, const optim::OptimPiece& piece, std::uint32_t) {
    table.adagrad(piece, {0.75f, 0.1f, 1e-8f, 3e-2f});
  };
  for (const Isa isa : kIsas) {
    if (isa > best_isa()) continue;
    EXPECT_EQ(hash_of_steps(isa, DType::float32, false, adam), 0x3fc2309e3661b5d1u);
    EXPECT_EQ(hash_of_steps(isa, DType::float32, true, adam), 0x6eae1719f911c872u);
    EXPECT_EQ(hash_of_steps(isa, DType::bfloat16, false, adam), 0xe9d6ccd7e780c72du);
    EXPECT_EQ(hash_of_steps(isa, DType::bfloat16, true, adam), 0x39d8c80490f16eefu);
    EXPECT_EQ(hash_of_steps(isa, DType::uint8, false, adam), 0xb24e56983428d6c7u);
    EXPECT_EQ(hash_of_steps(isa, DType::uint8, true, adam), 0xf2e8afdf42b2f10du);
    EXPECT_EQ(hash_of_steps(isa, DType::float32, false, sgd), 0x5a70213773e5184eu);
    EXPECT_EQ(hash_of_steps(isa, DType::float32, true, lion), 0xe39868db8beca7e4u);
    EXPECT_EQ(hash_of_steps(isa, DType::float32, true, adagrad), 0x336198596d79d2beu);
  }
}

}  // namespace
}  // namespace zcomm
