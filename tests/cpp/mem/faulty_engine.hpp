// A drive that misbehaves: an engine between SwapFile and a real one changes requests and results on purpose.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "mem/io/io_engine.hpp"
#include "mem/swap_file_impl.hpp"
#include "mem_test.hpp"

namespace zcomm::test {

/// The engines that this system has; prints once when io_uring is not among them.
inline const std::vector<std::string>& engine_names() {
  static const std::vector<std::string> names = [] {
    std::string why;
    if (mem::make_io_uring_engine(1, &why) != nullptr) return std::vector<std::string>{"threads", "io_uring"};
    std::cout << "     io_uring is not here, its tests run nothing: " << why << "\n";
    return std::vector<std::string>{"threads"};
  }();
  return names;
}

inline std::unique_ptr<mem::IoEngine> make_engine(const std::string& name, int depth) {
  return name == "threads" ? mem::make_thread_engine(depth) : mem::make_io_uring_engine(depth);
}

/// Shows each request to `on_request` (which may shorten it) and each result to `on_result` (which may change it);
/// both run on the I/O thread. `reorder`: results are returned shuffled, some of them one or more reaps later.
class FaultyEngine final : public mem::IoEngine {
 public:
  explicit FaultyEngine(std::unique_ptr<mem::IoEngine> inner)
      : inner_(std::move(inner)), kept_(static_cast<std::size_t>(inner_->depth())) {
    for (Kept& each : kept_) free_.push_back(&each);
  }

  std::function<void(mem::IoRequest&)> on_request = [](mem::IoRequest&) {};
  std::function<void(const mem::IoRequest&, std::int64_t&)> on_result = [](const mem::IoRequest&, std::int64_t&) {};
  bool reorder = false;

  const char* name() const override { return inner_->name(); }
  int depth() const override { return inner_->depth(); }
  void wake() noexcept override { inner_->wake(); }

  void submit(std::span<const mem::IoRequest> requests) override {
    for (const mem::IoRequest& request : requests) {
      Kept* kept = free_.back();
      free_.pop_back();
      kept->request = request;
      on_request(kept->request);
      mem::IoRequest passed = kept->request;
      passed.user = kept;
      inner_->submit({&passed, 1});
      ++in_flight_;
    }
  }

  int reap(std::span<mem::IoResult> results) override {
    if (held_.empty() || (in_flight_ > 0 && random_() % 2 == 0)) take(results.size(), true);
    return hand_out(results);
  }

  int poll(std::span<mem::IoResult> results) override {
    take(results.size(), false);
    return hand_out(results);
  }

 private:
  struct Kept {
    mem::IoRequest request;
  };

  int hand_out(std::span<mem::IoResult> results) {
    std::size_t count = std::min(held_.size(), results.size());
    if (reorder) {
      std::shuffle(held_.begin(), held_.end(), random_);
      if (in_flight_ > 0 && count > 0) count = random_() % (count + 1);
    }
    for (std::size_t i = 0; i < count; ++i) results[i] = held_[i];
    held_.erase(held_.begin(), held_.begin() + static_cast<std::ptrdiff_t>(count));
    return static_cast<int>(count);
  }

  void take(std::size_t limit, bool block) {
    std::vector<mem::IoResult> got(limit);
    const int count = block ? inner_->reap(got) : inner_->poll(got);
    in_flight_ -= count;
    for (int i = 0; i < count; ++i) {
      mem::IoResult result = got[static_cast<std::size_t>(i)];
      auto* kept = static_cast<Kept*>(result.user);
      result.user = kept->request.user;
      on_result(kept->request, result.result);
      free_.push_back(kept);
      held_.push_back(result);
    }
  }

  std::unique_ptr<mem::IoEngine> inner_;
  std::vector<Kept> kept_;
  std::vector<Kept*> free_;
  std::vector<mem::IoResult> held_;
  int in_flight_ = 0;
  std::mt19937 random_{1};
};

/// A configuration that faults are tried on.
struct Rig {
  std::string engine;
  bool direct;
};

/// Each engine, direct and buffered.
template <class Body>
void on_each_rig(Body body) {
  for (const std::string& engine : engine_names())
    for (const bool direct : {true, false}) body(Rig{engine, direct});
}

/// A SwapFile over a FaultyEngine, on `drives` directories of a temporary one.
struct Setup {
  explicit Setup(
      const Rig& rig, const std::function<void(FaultyEngine&)>& prepare = [](FaultyEngine&) {}, std::size_t drives = 1,
      int depth = 4) {
    auto made = std::make_unique<FaultyEngine>(make_engine(rig.engine, depth));
    prepare(*made);
    options.block_nbytes = 64 << 10;
    options.direct = rig.direct;
    for (std::size_t i = 0; i < drives; ++i) directories.push_back(temp.path() + "/drive" + std::to_string(i));
    file = mem::open_swap_file(directories, options, std::move(made));
  }
  TempDirectory temp;
  std::vector<std::string> directories;
  SwapFile::Options options;
  std::unique_ptr<SwapFile> file;
};

}  // namespace zcomm::test
