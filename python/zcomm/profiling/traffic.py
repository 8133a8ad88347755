"""Traffic: the bytes that this rank sends in each collective, by the axes of a mesh along which it runs.

While a Traffic is open, a proxy of the core counts the calls of all open Communicators and process groups.
Bytes are those of algorithms that send least, as over a network. all_reduce of n bytes on P ranks sends
2 n (P - 1) / P. reduce_scatter and all_gather send (P - 1) / P of the whole bucket, all_to_all the parts of the other
ranks, send its message. Calls with a codec count as if they were not encoded.
Thread rule: opened and closed on the main thread, while no collective is in flight; any thread calls collectives.
Source of the counts: https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
"""

from __future__ import annotations

import itertools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from zcomm import _core
from zcomm.comm import communicator
from zcomm.profiling.taps import ITEMSIZES

if TYPE_CHECKING:
    from zcomm.comm.mesh import ProcessMesh

# operation -> share of its whole bucket that a rank of P sends
_SHARES: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_reduce_tensor": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: (ranks - 1) / ranks,
    "gather": lambda ranks: 1.0,
    "scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: 1.0,
    "send": lambda ranks: 1.0,
}


@dataclass
class Sent:
    """Calls of one kind, and the bytes that this rank sent in them."""

    calls: int = 0
    nbytes: float = 0.0


def axes_of(mesh: ProcessMesh) -> list[tuple[str, ...]]:
    """Return all combinations of axes with several ranks, fewest axes first."""
    several = [axis for axis in mesh.axes if mesh.size(axis) > 1]
    return [some for count in range(1, len(several) + 1) for some in itertools.combinations(several, count)]


class Traffic(ExitStack):
    """Counts of this rank while it is open: ``with Traffic(mesh) as traffic``. Not collective.

    It counts communicators that are open at its beginning. A communicator belongs to the fewest axes that have all its
    ranks. Ranks of one rank send nothing.
    """

    def __init__(self, mesh: ProcessMesh) -> None:
        super().__init__()
        self._counts: dict[tuple[tuple[str, ...], str, str], Sent] = {}
        self._lock = threading.Lock()
        places = mesh.world._joined.places
        of_job = {rank: places[rank] if places else rank for rank in range(mesh.world.world_size)}
        self._groups = [(some, {of_job[rank] for rank in mesh.ranks(*some)}) for some in axes_of(mesh)]

    def __enter__(self) -> Traffic:
        for owner, places in _owners():
            if len(places) > 1:
                axes = next((some for some, ranks in self._groups if ranks.issuperset(places)), ())
                self._wrap(owner, _Counted(owner._core, axes, self))
        return self

    def _wrap(self, owner: Any, proxy: _Counted) -> None:
        for name in ("_core", "_messenger"):
            if getattr(owner, name, None) is proxy.inner:
                setattr(owner, name, proxy)
                self.callback(setattr, owner, name, proxy.inner)

    def add(self, axes: tuple[str, ...], operation: str, name: str, nbytes: float) -> None:
        """Count a call. name: of the call; its numbers are left out."""
        key = axes, operation, re.sub(r"\d+", "N", name)
        with self._lock:
            sent = self._counts.setdefault(key, Sent())
            sent.calls += 1
            sent.nbytes += nbytes

    def rows(self) -> dict[tuple[tuple[str, ...], str, str], Sent]:
        """Return the counts by axes, operation and name of the call."""
        with self._lock:
            return {key: Sent(sent.calls, sent.nbytes) for key, sent in self._counts.items()}

    def by_axes(self) -> dict[tuple[str, ...], Sent]:
        """Return the counts of all calls along the same axes."""
        found: dict[tuple[str, ...], Sent] = {}
        for (axes, _, _), sent in self.rows().items():
            total = found.setdefault(axes, Sent())
            total.calls += sent.calls
            total.nbytes += sent.nbytes
        return found


def _owners() -> Iterator[tuple[Any, Sequence[int]]]:
    """Yield the open Communicators and torch's process groups of the backend "zcomm", with their ranks in the job."""
    for comm in list(communicator._open):
        yield comm, comm._joined.places or range(comm.world_size)
    module = sys.modules.get("zcomm.torch_backend.group")
    for group in list(module._alive) if module is not None else ():
        yield group, dist.get_process_group_ranks(group)


class _Counted:
    """Proxy of a core communicator."""

    def __init__(self, inner: Any, axes: tuple[str, ...], traffic: Traffic) -> None:
        self.inner, self._axes, self._traffic = inner, axes, traffic

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return self._count(name, value) if name in _SHARES else value

    def _count(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        ranks, rank = self.inner.world_size, self.inner.rank

        def counted(*args: Any, **kwargs: Any) -> Any:
            work = call(*args, **kwargs)
            if work is not NotImplemented:  # else the same call comes again, in another form
                words = next((given for given in (*args, *kwargs.values()) if isinstance(given, str)), "")
                nbytes = _nbytes(operation, args, rank) * _SHARES[operation](ranks)
                self._traffic.add(self._axes, operation.removesuffix("_tensor"), words, nbytes)
            return work

        return counted


def _nbytes(operation: str, args: tuple[Any, ...], rank: int) -> int:
    """Return the bytes of the whole bucket; of all_to_all, gather and scatter those that this rank has for others."""
    if isinstance(args[0], torch.Tensor):
        return args[0].numel() * args[0].element_size()
    lists = [given for given in args if isinstance(given, list) and given and isinstance(given[0], tuple)]
    lists = [spans for spans in lists if len(spans[0]) == 2]
    dtype = next(given for given in args if isinstance(given, _core.DType))
    counts = [sum(span[1] for span in spans) for spans in lists]
    if operation == "all_to_all":
        counts = [counts[0] - lists[0][rank][1]]
    if (operation == "gather" and len(lists) == 2) or (operation == "scatter" and len(lists) == 1):
        counts = []  # the root of a gather, and all ranks except the root of a scatter
    return max(counts, default=0) * ITEMSIZES[dtype.name]
