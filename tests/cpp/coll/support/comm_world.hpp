// Worlds of ranks for the communicator's tests: each rank a thread, connected by a real Mesh.
#pragma once

#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device/kernels.hpp"
#include "net/mesh.hpp"
#include "test.hpp"
#include "zcomm/communicator.hpp"
#include "zcomm/error.hpp"

namespace zcomm::test {

struct Rank {
  int rank, world;
  std::shared_ptr<net::Mesh> mesh;
  std::unique_ptr<Communicator> comm;
};

struct Listeners {
  std::vector<net::Listener> all;
  std::vector<std::string> addresses;
  explicit Listeners(int world) : all(static_cast<std::size_t>(world)) {
    for (const auto& listener : all) addresses.push_back(listener.address());
  }
};

inline std::shared_ptr<net::Mesh> join(Listeners& listeners, int rank) {
  return net::Mesh::connect(rank, static_cast<int>(listeners.addresses.size()),
                            std::move(listeners.all[static_cast<std::size_t>(rank)]), listeners.addresses, "token", 20);
}

/// Small slots, so that modest buffers take many steps.
inline CommOptions small_slots(double timeout_s = 30, std::size_t one_shot_nbytes = 0) {
  return {timeout_s, 4096, 4, one_shot_nbytes};
}

/// Runs `body` as each rank of a world of threads. Errors that leave it fail the test.
inline void run_world(int world, CommOptions options, const std::function<void(Rank&)>& body) {
  Listeners listeners(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      try {
        Rank self{r, world, join(listeners, r), nullptr};
        self.comm = Communicator::create(self.mesh, options);
        body(self);
        if (self.comm) self.comm->close();
        self.mesh->leave();
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, "rank " + std::to_string(r) + " of " + std::to_string(world) + ": " + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

inline void run_worlds(int first, int last, const std::function<void(Rank&)>& body) {
  for (int world = first; world <= last; ++world)
    for (const std::size_t one_shot_nbytes : {0, 4096}) run_world(world, small_slots(30, one_shot_nbytes), body);
}

/// Elements of `dtype` with the given values (rounded to nearest).
inline std::vector<std::byte> encode(DType dtype, const std::vector<double>& values) {
  std::vector<std::byte> bytes(values.size() * size_of(dtype) + 1);  // never a null pointer
  const auto store = [&](auto zero) {
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto value = static_cast<decltype(zero)>(values[i]);
      std::memcpy(bytes.data() + i * sizeof(value), &value, sizeof(value));
    }
  };
  switch (dtype) {
    case DType::float64:
      store(double{});
      break;
    case DType::float32:
      store(float{});
      break;
    case DType::int32:
      store(std::int32_t{});
      break;
    case DType::int64:
      store(std::int64_t{});
      break;
    case DType::int8:
      store(std::int8_t{});
      break;
    case DType::uint8:
    case DType::boolean:
      store(std::uint8_t{});
      break;
    default:
      device::cast(bytes.data(), dtype, values.data(), DType::float64, values.size());
  }
  return bytes;
}

// Zeros may differ in sign (0 * -1), so compare values: both sides as f64.
inline bool equal(DType dtype, const std::byte* got, const std::vector<double>& wanted) {
  const auto expected = encode(dtype, wanted);
  const std::size_t count = wanted.size();
  if (!is_floating(dtype)) return std::memcmp(got, expected.data(), count * size_of(dtype)) == 0;
  std::vector<double> a(count), b(count);
  device::cast(a.data(), DType::float64, got, dtype, count);
  device::cast(b.data(), DType::float64, expected.data(), dtype, count);
  return a == b;
}

/// Fills private or symmetric memory, at the caller's choice.
struct Memory {
  std::shared_ptr<SymmetricBuffer> symmetric;
  std::vector<std::byte> heap;
  std::byte* data() { return symmetric ? symmetric->data() : heap.data(); }

  static Memory make(Communicator& comm, std::size_t nbytes, bool use_symmetric) {
    Memory memory;
    auto buffer = comm.allocate(nbytes + 1);  // collective, so all ranks call it
    if (use_symmetric)
      memory.symmetric = buffer;
    else
      memory.heap.resize(nbytes + 1);
    return memory;
  }
};

inline std::vector<float> random_floats(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::uniform_real_distribution<float> mantissa(-2, 2);
  std::uniform_int_distribution<int> exponent(-12, 12);
  std::vector<float> values(count);
  for (float& value : values) value = std::ldexp(mantissa(engine), exponent(engine));
  return values;
}

}  // namespace zcomm::test
