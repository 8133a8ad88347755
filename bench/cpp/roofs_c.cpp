// C interface of the roofs, for bench/allreduce_bw (ctypes). 0: good; -1: failed, said on stderr.
#include <cstdio>
#include <cstring>
#include <exception>
#include <span>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "line.hpp"
#include "socket_ring.hpp"
#include "stream_roof.hpp"

using zcomm::bench::SocketRing;

namespace {

template <class Body>
int guarded(const Body& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "socket roof: %s\n", error.what());
    return -1;
  }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* zcomm_bench_ring_listen(int* port) {
  SocketRing* ring = nullptr;
  guarded([&] {
    ring = new SocketRing;
    *port = ring->port();
  });
  return ring;
}

int zcomm_bench_ring_connect(void* ring, int rank, int world_size, int sockets, const int* ports) {
  return guarded([&] {
    static_cast<SocketRing*>(ring)->connect(rank, world_size, sockets,
                                            std::span(ports, static_cast<std::size_t>(world_size)));
  });
}

int zcomm_bench_ring_run(void* ring, std::size_t nbytes, int threads) {
  return guarded([&] { static_cast<SocketRing*>(ring)->run(nbytes, threads); });
}

void zcomm_bench_ring_close(void* ring) { delete static_cast<SocketRing*>(ring); }

/// memcpy with non-temporal stores, line by line: no line of dst is fetched only to be overwritten.
void zcomm_bench_streaming_copy(void* dst, const void* src, std::size_t nbytes) {
  auto* to = static_cast<char*>(dst);
  const auto* from = static_cast<const char*>(src);
  std::size_t at = 0;
#if defined(__x86_64__)
  at = (64 - reinterpret_cast<std::size_t>(to) % 64) % 64;
  if (at > nbytes) at = nbytes;
  std::memcpy(to, from, at);
  for (; at + 64 <= nbytes; at += 64)
    for (std::size_t k = at; k < at + 64; k += 16)
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + k), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
  _mm_sfence();
#endif
  std::memcpy(to + at, from + at, nbytes - at);
}

/// Seconds per round trip of the line at `at` (128 bytes of shared memory, zero) between ranks 0 and 1; else 0.
double zcomm_bench_round_trip_s(void* at, int rank, int laps) {
  return zcomm::bench::line_round_trip_s(*static_cast<zcomm::bench::Word*>(at), rank, laps);
}

/// Seconds to read p, g, m, v and write p, m, v; see stream_roof.hpp.
double zcomm_bench_adam_stream_s(float* p, const float* g, float* m, float* v, std::size_t count, int threads,
                                 int variant) {
  return zcomm::bench::adam_stream_s(p, g, m, v, count, threads, variant);
}

}  // extern "C"
#pragma GCC visibility pop
