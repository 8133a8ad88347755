"""CommsLogger: how often, how long and how fast the collectives of engines ran, by operation and size.

Size: bytes of the whole bucket, as nccl-tests count it (all_gather: its result, reduce_scatter: its argument).
Bandwidth of the algorithm is size / time. Bandwidth of the bus also has a factor for the bytes that each rank moves.
``logger`` is the process's own.
Thread rule: any thread adds. Collectives are timed by the watching threads of ``taps.Proxy``.
Source: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import datetime
import logging
import math
import threading
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from zcomm.profiling.taps import COLLECTIVES, Proxy

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.zero.registry import Owner

Records = dict[str, dict[int, list[Any]]]  # by operation and bytes: count, ms, Gbit/s of algorithm and bus
_TWICE = ("all_reduce",)
_ALL_BUT_OWN = ("all_gather", "reduce_scatter", "all_to_all")
_COUNTS = ("Comm. Op", "Message Size", "Count")
_HEAD = (*_COUNTS, "Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)")
_LATE_HEAD = (*_COUNTS, "Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)")


class CommsLogger:
    """Records of collectives. ``prof_all``: keep all; else those in ``prof_ops``. ``debug``: apart by name."""

    def __init__(self) -> None:
        self.comms_dict: Records = {}
        self.enabled = self.verbose = self.debug = False
        self.prof_all = True
        self.prof_ops: list[str] = []
        self.world_size, self.rank = 1, 0
        self._lock = threading.Lock()

    # --- which operations -------------------------------------------------------------------------------------

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        self.prof_ops = sorted({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        self.prof_ops = [op for op in self.prof_ops if op not in set(op_name_list)]

    # --- records ----------------------------------------------------------------------------------------------

    def add(self, lane: str, name: str, begin: int, end: int, **args: Any) -> None:
        """Record a collective that a Proxy has timed (nanoseconds), as Trace.add does."""
        operation, _, detail = name.partition(" ")
        if self.prof_all or operation in self.prof_ops:
            record = f"{operation} | {detail}" if self.debug and detail else operation
            self.append(operation, record, (end - begin) / 1e6, int(args.get("nbytes", 0)))

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Record one operation. latency: milliseconds. msg_size: bytes of the whole bucket."""
        algorithm, bus = bandwidths(raw_name, msg_size, latency, self.world_size)
        with self._lock:
            row = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
            row[0] += 1
            for values, value in zip(row[1:], (latency, algorithm, bus), strict=True):
                values.append(value)
        if self.verbose and self.rank == 0:
            logging.getLogger("zcomm").info(
                "%s: %s in %.3f ms, %.2f Gbit/s, bus %.2f Gbit/s",
                record_name,
                size_words(msg_size),
                latency,
                algorithm,
                bus,
            )

    def get_raw_data(self) -> Records:
        with self._lock:
            return {
                name: {size: [row[0], *map(list, row[1:])] for size, row in rows.items()}
                for name, rows in self.comms_dict.items()
            }

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        with self._lock:
            self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(row[0] for rows in self.get_raw_data().values() for row in rows.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return the summary of one operation by size, or None without records of it."""
        rows = self.get_raw_data().get(operation_name)
        return None if rows is None else {size: _summary(size, row) for size, row in sorted(rows.items())}

    # --- engines ----------------------------------------------------------------------------------------------

    def watch(self, owner: Owner) -> None:
        """Time the collectives of an open optimizer from now on, except on a device: then logs a warning."""
        from zcomm.zero.registry import parts_of

        parts = parts_of(owner)
        self.rank, self.world_size = parts.comm.rank, parts.comm.world_size
        for comm in _communicators(parts):
            if comm.device.type != "cpu":
                if self.rank == 0:
                    logging.getLogger("zcomm").warning(
                        "comms_logger: collectives on %s are not timed; use torch.profiler", comm.device
                    )
                continue
            comm._core = Proxy(comm._core, "communication", COLLECTIVES, self, serial=True)  # type: ignore[assignment]

    def unwatch(self, owner: Owner) -> None:
        """Undo ``watch``: call it before the optimizer is closed. A profile that is open keeps its own proxy."""
        from zcomm.zero.registry import parts_of

        for comm in _communicators(parts_of(owner)):
            core: Any = comm._core
            if isinstance(core, Proxy) and core.recorder is self:
                comm._core = core.inner
                core.close()


logger = CommsLogger()


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the records of ``logger`` on rank 0. With ``show_straggler`` all ranks call it.

    show_straggler: also the time of each operation on its fastest rank, and how much longer this rank waited.
    Returns: with ``return_dict`` the numbers, on each rank: "summary", "straggler_analysis", "metadata".
    """
    found = {name: logger.get_operation_summary(name) or {} for name in logger.get_operation_names()}
    late = _stragglers() if show_straggler else None
    if logger.rank == 0:
        print(_table(_HEAD, found, ("count", "total_latency_ms", "avg_latency_ms", "tput_avg_gbps", "busbw_avg_gbps")))
        if late is not None:
            keys = ("count", "total_comm_lat_ms", "total_straggler_ms", "avg_comm_lat_ms", "avg_straggler_ms")
            print(_table(_LATE_HEAD, late, keys), flush=True)
    if not return_dict:
        return None
    now = datetime.datetime.now().isoformat()
    metadata = {"world_size": logger.world_size, "rank": logger.rank, "timestamp": now}
    return {"summary": found, "straggler_analysis": late, "metadata": metadata}


def bandwidths(operation: str, nbytes: int, latency_ms: float, ranks: int) -> tuple[float, float]:
    """Return Gbit/s of the algorithm and of the bus."""
    if latency_ms <= 0:
        return 0.0, 0.0
    algorithm = nbytes * 8 / latency_ms / 1e6
    others = (ranks - 1) / ranks
    if operation.startswith(_TWICE):
        return algorithm, algorithm * 2 * others
    return algorithm, algorithm * (others if operation.startswith(_ALL_BUT_OWN) else 1.0)


def trim_mean(values: Iterable[float], share: float) -> float:
    """Return the mean without the smallest and largest ``share`` of the values."""
    ordered = sorted(values)
    drop = int(len(ordered) * share)
    kept = ordered[drop : len(ordered) - drop]
    return sum(kept) / len(kept) if kept else 0.0


def size_words(nbytes: int) -> str:
    if nbytes == 0:
        return "0B"
    power = min(int(math.log2(nbytes) // 10), 8)
    return f"{round(nbytes / 2 ** (10 * power), 2)} {('B', 'KB', 'MB', 'GB', 'TB', 'PB', 'EB', 'ZB', 'YB')[power]}"


def _communicators(parts: Any) -> list[Communicator]:
    gather = getattr(parts.store, "gather", None)
    return [*parts.comms.every, *(gather.every if gather is not None else [])]


def _summary(size: int, row: list[Any]) -> dict[str, Any]:
    count, latencies, algorithm, bus = row
    return {
        "count": count,
        "total_latency_ms": sum(latencies),
        "avg_latency_ms": trim_mean(latencies, 0.1),
        "tput_avg_gbps": trim_mean(algorithm, 0.1),
        "busbw_avg_gbps": trim_mean(bus, 0.1),
        "msg_size_bytes": size,
        "msg_size_str": size_words(size),
    }


def _stragglers() -> dict[str, dict[int, dict[str, Any]]]:
    """Compare each operation's latencies with the fastest rank's. Collective."""
    from zcomm.comm import job
    from zcomm.zero.agree import all_values

    own = logger.get_raw_data()
    lists = [[[name, size, row[1]] for size, row in rows.items()] for name, rows in own.items()]
    every = all_values(job.current(), [item for rows in lists for item in rows], "log_summary")
    fastest: dict[tuple[str, int], list[float]] = {}
    for of_rank in every:
        for name, size, latencies in of_rank:
            known = fastest.setdefault((name, size), list(latencies))
            fastest[name, size] = [min(pair) for pair in zip(known, latencies, strict=False)]
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for name, rows in own.items():
        for size, row in sorted(rows.items()):
            best = fastest[name, size]
            waited = [mine - least for mine, least in zip(row[1], best, strict=False)]
            found.setdefault(name, {})[size] = {
                "count": row[0],
                "total_comm_lat_ms": sum(best),
                "total_straggler_ms": sum(waited),
                "avg_comm_lat_ms": trim_mean(best, 0.1),
                "avg_straggler_ms": trim_mean(waited, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": size_words(size),
            }
    return found


def _table(head: Iterable[str], found: dict[str, dict[int, dict[str, Any]]], keys: Iterable[str]) -> str:
    lines = ["".join(f"{word:<20}" for word in head)]
    for name, rows in found.items():
        lines.append(name)
        for row in rows.values():
            values = [row[key] if isinstance(row[key], int) else f"{row[key]:.2f}" for key in keys]
            lines.append("".join(f"{word:<20}" for word in (" ", row["msg_size_str"], *values)))
    return "\n".join(lines)
