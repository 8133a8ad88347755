// Worlds of threads over real unix sockets, and helpers for the tests of net: counting descriptors, waiting until.
#pragma once

#include <dirent.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "net/mesh.hpp"
#include "test.hpp"

namespace zcomm::test {

inline constexpr double kPatience_s = 60.0;  // far more than any test needs: sanitizers and busy machines are slow

struct Lobby {
  explicit Lobby(int world_size) : listeners(static_cast<std::size_t>(world_size)) {
    for (const auto& listener : listeners) addresses.push_back(listener.address());
  }
  std::shared_ptr<net::Mesh> connect(int rank, std::string_view token = "secret", double timeout_s = kPatience_s) {
    return net::Mesh::connect(rank, static_cast<int>(addresses.size()),
                              std::move(listeners[static_cast<std::size_t>(rank)]), addresses, token, timeout_s);
  }
  std::vector<net::Listener> listeners;
  std::vector<std::string> addresses;
};

/// body(rank) on a thread per rank; exceptions fail the test.
inline void run_ranks(int world_size, const std::function<void(int)>& body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank) {
    threads.emplace_back([rank, &body] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        fail("rank", rank, std::string("uncaught: ") + error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

/// body(mesh) on a thread per rank; no rank leaves before all are done.
inline void run_world(int world_size, const std::function<void(net::Mesh&)>& body) {
  Lobby lobby(world_size);
  std::vector<std::shared_ptr<net::Mesh>> meshes(static_cast<std::size_t>(world_size));
  run_ranks(world_size, [&](int rank) {
    auto& mesh = meshes[static_cast<std::size_t>(rank)];
    mesh = lobby.connect(rank);
    body(*mesh);
  });
}

inline bool eventually(const std::function<bool()>& condition, double timeout_s = kPatience_s) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(timeout_s);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  return true;
}

inline int open_descriptors() {
  DIR* const dir = ::opendir("/proc/self/fd");
  int count = 0;
  while (::readdir(dir) != nullptr) ++count;
  ::closedir(dir);
  return count;
}

inline std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* const begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

inline std::string string_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace zcomm::test
