// adam_stream_s: plain loops with the widest vectors that the CPU has.
#include "stream_roof.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace zcomm::bench {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::size_t kTile = 65536;

struct Arrays {
  float* p;
  const float* g;
  float *m, *v;
};

void stream_plain(const Arrays& a, std::size_t begin, std::size_t end) {
#pragma GCC ivdep
  for (std::size_t i = begin; i < end; ++i) {
    const float g = a.g[i], m = a.m[i] + g, v = a.v[i] + g;
    a.m[i] = m;
    a.v[i] = v;
    a.p[i] += g;
  }
}

#if defined(__x86_64__)
__attribute__((target("avx512f"))) void stream_512(const Arrays& a, std::size_t begin, std::size_t end) {
  std::size_t i = begin;
  for (; i + 16 <= end; i += 16) {
    const __m512 g = _mm512_loadu_ps(a.g + i);
    const __m512 p = _mm512_loadu_ps(a.p + i), m = _mm512_loadu_ps(a.m + i), v = _mm512_loadu_ps(a.v + i);
    _mm512_storeu_ps(a.p + i, p + g);
    _mm512_storeu_ps(a.m + i, m + g);
    _mm512_storeu_ps(a.v + i, v + g);
  }
  stream_plain(a, i, end);
}

__attribute__((target("avx2"))) void stream_256(const Arrays& a, std::size_t begin, std::size_t end) {
  std::size_t i = begin;
  for (; i + 8 <= end; i += 8) {
    const __m256 g = _mm256_loadu_ps(a.g + i);
    const __m256 p = _mm256_loadu_ps(a.p + i), m = _mm256_loadu_ps(a.m + i), v = _mm256_loadu_ps(a.v + i);
    _mm256_storeu_ps(a.p + i, p + g);
    _mm256_storeu_ps(a.m + i, m + g);
    _mm256_storeu_ps(a.v + i, v + g);
  }
  stream_plain(a, i, end);
}
#endif

void stream(const Arrays& a, std::size_t begin, std::size_t end) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return stream_512(a, begin, end);
  if (__builtin_cpu_supports("avx2")) return stream_256(a, begin, end);
#endif
  stream_plain(a, begin, end);
}

/// All threads leave it at once.
class Start {
 public:
  explicit Start(int threads) : missing_(threads) {}
  void wait() {
    for (--missing_; missing_ > 0;) std::this_thread::yield();
  }

 private:
  std::atomic<int> missing_;
};

}  // namespace

double adam_stream_s(float* p, const float* g, float* m, float* v, std::size_t count, int threads, int variant) {
  const Arrays arrays{p, g, m, v};
  const auto workers = static_cast<std::size_t>(std::max(1, threads));
  const std::size_t part = (count / workers + 15) / 16 * 16;
  Start start(static_cast<int>(workers));
  std::atomic<std::size_t> next{0};
  Clock::time_point begin;
  const auto work = [&](std::size_t rank) {
    start.wait();
    if (rank == 0) begin = Clock::now();
    if (variant == 0)
      return stream(arrays, std::min(count, rank * part), rank + 1 == workers ? count : (rank + 1) * part);
    for (std::size_t i = next.fetch_add(kTile); i < count; i = next.fetch_add(kTile))
      stream(arrays, i, std::min(count, i + kTile));
  };
  std::vector<std::jthread> others;
  for (std::size_t rank = 1; rank < workers; ++rank) others.emplace_back(work, rank);
  work(0);
  others.clear();  // joins
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

}  // namespace zcomm::bench
