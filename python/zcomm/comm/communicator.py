"""Communicator: collectives and messages of the job's ranks on torch tensors.

A tensor or a list of tensors is one operation. Collectives of one communicator run in call order: a blocking one on the
calling thread, an asynchronous one on the communicator's own. Every rank must issue them in the same order. Before
bytes move, the ranks compare their calls. Any thread may call, as long as that order holds.
Tensors from ``empty`` lie in symmetric memory (mapped by every rank), so collectives on them copy nothing.
Source: owner-computes reduction, docs/internals/algorithms.md.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, overload

import torch

from zcomm import _core
from zcomm.bootstrap.departure import note_cause
from zcomm.bootstrap.join import Joined
from zcomm.bootstrap.meeting import Watch
from zcomm.comm.calls import Buckets
from zcomm.comm.movements import Movements
from zcomm.comm.p2p import Messages
from zcomm.comm.reductions import Reductions
from zcomm.comm.split import split
from zcomm.comm.tensors import core_dtype, integers, tensor_of
from zcomm.comm.work import Work, followed

__all__ = ["Buckets", "Communicator"]


class Communicator(Reductions, Movements, Messages):
    """The ranks of a job, in a fixed order. ``zcomm.init``, ``duplicate`` and ``split`` create Communicators."""

    def __init__(self, joined: Joined) -> None:
        super().__init__(joined.core, joined.device, joined.messenger)
        self._joined = joined
        self.rank: int = joined.core.rank
        self.world_size: int = joined.core.world_size
        self.local_rank: int = joined.hosts.local_rank(self.rank)
        self.local_world_size: int = joined.hosts.local_world_size(self.rank)
        self.backend: str = joined.backend
        self._failed: list[_core.Work] = []  # entries of ``fail``, because dropping one waits
        self._stop = _core.Stop("split: the communicator was closed while its part was being joined")
        _open.add(self)
        self._watch: Watch | None = None
        if joined.watch is not None:
            self._joined = replace(joined, watch=None)  # only the watch holds the store
            self._watch = joined.watch(self.close)

    @property
    def device(self) -> torch.device:
        """Device of its tensors."""
        return torch.device(self._device)

    @property
    def is_on_device(self) -> bool:
        """Return True if it moves tensors of devices: backends "nccl" and "cuda_ipc"."""
        return self._joined.host is not None

    @property
    def is_closed(self) -> bool:
        """Return True after ``close()`` on this rank."""
        return bool(self._stop.is_set)

    @property
    def is_symmetric(self) -> bool:
        """Return True if ``empty`` allocates symmetric memory for its tensors: not with backend "nccl"."""
        return self.backend != "nccl"

    def __repr__(self) -> str:
        return f"<zcomm.Communicator: {self.describe()}>"

    def describe(self) -> str:
        """Return one line: this rank, the number of ranks, their hosts and the backend."""
        return f"rank {self.rank} of {self._joined.describe()}"

    # --- memory -----------------------------------------------------------------------------------------------

    @overload
    def empty(self, *shape: int, dtype: torch.dtype = ..., device: str | None = ...) -> torch.Tensor: ...
    @overload
    def empty(self, shape: Sequence[int], /, *, dtype: torch.dtype = ..., device: str | None = ...) -> torch.Tensor: ...
    @overload
    def empty(self, n: int, dtype: torch.dtype = ..., device: str | None = ...) -> torch.Tensor: ...

    def empty(
        self, *shape: Any, dtype: torch.dtype = torch.float32, device: str | None = None, n: int | None = None
    ) -> torch.Tensor:
        """Allocate a symmetric tensor, zero-filled. Collective: same shape on each rank.

        shape: as torch.empty's: integers or one sequence of them. (``empty(n, dtype, device)`` is accepted, too.)
        device: of this communicator's tensors ("cpu"; with backend "cuda_ipc" "cuda" or this rank's "cuda:1"); None:
        the same. Raises: ValueError, NotImplementedError (another device), OSError; CudaError on all ranks, naming the
        rank without free memory on its device (then the communicator remains usable).
        """
        sizes, dtype, device = _asked_shape(shape if n is None else (n, *shape), dtype, device)
        return self._allocated(math.prod(sizes), dtype, device, shared=False).view(sizes)

    def shared_empty(self, n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Allocate one zero-filled flat tensor of ``n`` elements that all ranks of the host share. Collective."""
        return self._allocated(n, dtype, "cpu", shared=True)

    def _allocated(self, n: int, dtype: torch.dtype, device: str | None, shared: bool) -> torch.Tensor:
        if n < 0:
            raise ValueError(f"empty: n={n} is negative")
        core_dtype(dtype)
        own = self._joined.core_device
        asked = torch.device(device or self._device)
        if asked.type != torch.device(self._device).type or asked.index not in (None, torch.device(self._device).index):
            raise NotImplementedError(
                f"empty: device={device!r}: this communicator (backend {self.backend}) has symmetric memory on "
                f"{self._device} only"
            )
        if own is not None:
            if shared:
                raise NotImplementedError(
                    f"shared_empty: ranks do not share memory of a device ({own.name}); use empty"
                )
            memory = _core.allocate_on(self._core, own, n * dtype.itemsize)
            return torch.from_dlpack(memory).view(dtype) if n else torch.empty(0, dtype=dtype, device=self._device)
        if self._device != "cpu":
            raise NotImplementedError(
                f"empty: backend {self.backend} has no symmetric memory; use torch.empty(..., device={self._device!r})"
            )
        allocate = self._core.allocate_shared if shared else self._core.allocate
        return tensor_of(allocate(n * dtype.itemsize), dtype, n)

    def memory(self) -> dict[str, int]:
        """Return the bytes that this communicator holds on this rank, by kind, and its number of allocations so far."""
        return dict(self._core.memory())

    # --- order --------------------------------------------------------------------------------------------------

    def after(self, work: Work) -> Work:
        """Start later operations of this communicator when ``work``, usually another communicator's, has ended.

        Local, and returns at once: ranks need not agree on it, and wait for this one as for any late rank. An operation
        on a device counts when the device has ended it. The entry has no deadline, because ``work`` has one.
        Returns: a Work that ends with ``work``; it keeps ``work``, and dropping it waits.
        Raises: RuntimeError in a forked child; TypeError. NotImplementedError on backend mpi. If ``work`` fails, this
        communicator is poisoned. The entry and later calls raise an error of the same type that names the cause, and
        the other ranks RuntimeError with that cause. A PeerLost of this kind has ``group_rank`` -1: its message
        counts ranks in the other communicator.
        """
        entry = self._core.after(followed(work), True)
        assert entry is not None
        return Work(entry, work)

    def fail(self, reason: str) -> None:
        """Fail on all ranks, when this rank's earlier calls have ended. Local, returns at once.

        Later calls raise RuntimeError with ``reason``, on the other ranks behind "rank r failed: ". For a rank that
        cannot go on, so that the others need not wait for it. Does nothing if the communicator has failed, or is
        closed. Raises: NotImplementedError on backend mpi.
        """
        fail = getattr(self._core, "fail", None)
        if fail is None:
            raise NotImplementedError(f"fail: backend {self.backend} has no means to tell the other ranks")
        with suppress(Exception):  # its failure, of any type, or "closed"
            self._failed.append(fail(reason))

    # --- life -------------------------------------------------------------------------------------------------

    def split(self, color: int | None, key: int = 0, *, name: str = "") -> Communicator | None:
        """Split into communicators of parts: ranks of one ``color``, in order of ``key``, then of rank. Collective.

        color: None or negative: this rank joins no part and the result is None. name: for programs that split from
        several threads; compared between the ranks, as any operation's name.
        A part has its own order of calls, memory, sockets and failures, and outlives this communicator; close() frees
        it. Raises: as all_gather, and then this communicator is poisoned. RuntimeError, OSError, PeerLost or
        TimeoutError if a part cannot be joined; this communicator remains usable.
        """
        splitter = self._joined.splitter or split
        with self._stop:
            joined = splitter(self, self._joined, color, key, name)
            _core.check_stop()
        return None if joined is None else Communicator(joined)

    def duplicate(self) -> Communicator:
        """Create a communicator of the same ranks with its own order of calls: ``split`` into one part. Collective."""
        twin = self.split(0, self.rank, name="duplicate")
        assert twin is not None
        return twin

    def host_twin(self) -> Communicator:
        """Create a communicator of the same ranks for tensors in host memory, with its own order of calls. Collective.

        Raises: as ``split``; ValueError for one that is in host memory already (``duplicate`` it).
        """
        host = self._joined.host
        if host is None:
            raise ValueError(f"host_twin: backend {self.backend!r} moves tensors in host memory; use duplicate()")
        twin = split(Communicator(host), host, 0, self.rank, "host twin")
        assert twin is not None
        return Communicator(twin)

    @contextmanager
    def no_deadline(self) -> Iterator[None]:
        """Suspend, in the block, the deadline of ranks that wait for this rank: for slow set-up by one rank.

        A rank that dies is still detected. Blocks nest. Raises: RuntimeError on a closed or failed communicator.
        """
        with ExitStack() as resumed:
            for core in (self._core, self._messenger):
                core.suspend_deadline()
                resumed.push(partial(_resume, core))
            yield

    def _lost(self) -> bool:
        """Return True if a rank is known to have ended; never waits."""
        return any(mesh.lost() is not None for mesh in self._joined.meshes)

    def close(self) -> None:
        """End pending operations with an error, say goodbye to the peers, free everything. Idempotent; not collective.

        Parts that were split from it remain usable. A signal handler may call close(): the interrupted call then raises
        RuntimeError.
        """
        self._stop.set()
        if self._watch is not None:
            self._watch.end()
        note_cause(self._core, self._joined.meshes, self._joined.processes)
        self._core.close()
        self._messenger.close()
        for mesh in self._joined.meshes:
            mesh.leave()


def _asked_shape(
    given: Sequence[Any], dtype: torch.dtype, device: str | None
) -> tuple[tuple[int, ...], torch.dtype, str | None]:
    """Return sizes, dtype and device of a call of ``empty``; dtype and device may be positional.

    Raises: TypeError, ValueError.
    """
    given = list(given)
    if len(given) > 1 and isinstance(given[1], torch.dtype):
        if len(given) > 3:
            raise TypeError(f"empty: {len(given) - 3} argument(s) too many; dtype and device are given by keyword")
        dtype = given[1]
        device = given[2] if len(given) == 3 else device
        given = given[:1]
    sizes = tuple(integers("empty", given[0] if len(given) == 1 and isinstance(given[0], Sequence) else given))
    for size in sizes:
        if size < 0:
            raise ValueError(f"empty: n={size} is negative")
    return sizes, dtype, device


def _resume(core: Any, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
    """End ``no_deadline``. If the block raised, suppress the error of a communicator that has failed meanwhile."""
    with suppress(Exception) if error is not None else nullcontext():
        core.resume_deadline()


_open: weakref.WeakSet[Communicator] = weakref.WeakSet()


def close_all() -> None:
    """Close every communicator of this process."""
    for comm in list(_open):
        comm.close()
