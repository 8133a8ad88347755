"""The library of bench/cpp: copies, a cache line, raw sockets and an optimizer's stream at the machine's speed."""

from __future__ import annotations

import ctypes

from harness.record import ROOT


def bench_library() -> ctypes.CDLL | str:
    """Return the library, or the reason why it is missing."""
    path = ROOT / "build/bench/bench/cpp/libzcomm_bench_roofs.so"
    if not path.exists():
        return f"no {path.relative_to(ROOT)} (make bench-cpp builds it)"
    library = ctypes.CDLL(str(path))
    if not hasattr(library, "zcomm_bench_adam_stream_s"):  # the newest of its functions
        return f"{path.relative_to(ROOT)} is older than this bench (make bench-cpp builds it)"
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.zcomm_bench_ring_listen.restype = address
    library.zcomm_bench_ring_connect.argtypes = [address, number, number, number, ctypes.POINTER(number)]
    library.zcomm_bench_ring_run.argtypes = [address, size, number]
    library.zcomm_bench_ring_close.argtypes = [address]
    library.zcomm_bench_streaming_copy.argtypes = [address, address, size]
    library.zcomm_bench_round_trip_s.argtypes = [address, number, number]
    library.zcomm_bench_round_trip_s.restype = ctypes.c_double
    library.zcomm_bench_adam_stream_s.argtypes = [*4 * [address], size, number, number]
    library.zcomm_bench_adam_stream_s.restype = ctypes.c_double
    return library


def bench_library_or_none() -> ctypes.CDLL | None:
    library = bench_library()
    return library if isinstance(library, ctypes.CDLL) else None
