"""ProcessGroup "zcomm": torch.distributed's object for a group of ranks.

A Python subclass of torch's ProcessGroup, over its own mesh and communicator of the core; libtorch is not linked.
C++ (DDP's reducer, functional collectives) reaches its methods through torch's trampoline (PyProcessGroup.hpp).
Invariant: groups are independent; one that failed or was destroyed does not touch the others.
Thread rule: as the core's communicator: any thread, collectives in the same order on all ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from zcomm import _core
from zcomm.bootstrap.auth import derive_key, page_job
from zcomm.bootstrap.departure import note_cause
from zcomm.bootstrap.join import Joined
from zcomm.bootstrap.meeting import Watch, meeting_keys
from zcomm.bootstrap.rendezvous import LINGER_S, join_through_store, launcher_in, name_of_job
from zcomm.comm.split import places_text
from zcomm.torch_backend.ops.messages import Messages
from zcomm.torch_backend.ops.monitored_barrier import Monitor
from zcomm.torch_backend.ops.movements import Movements
from zcomm.torch_backend.ops.reductions import Reductions
from zcomm.torch_backend.options import NAME, Options, timeout_of
from zcomm.torch_backend.split import split
from zcomm.torch_backend.store_end import StoreEnd, forget_end
from zcomm.torch_backend.work import Done, Ended, Pending, Together
from zcomm.watch import rank as watch

# In which rank 0 has to destroy its group, too. In error: the program may be about to end.
_STORE_END_S, _STORE_END_IN_ERROR_S = 10.0, 1.0
_alive: weakref.WeakSet[ProcessGroup] = weakref.WeakSet()
_Base: Any = dist.ProcessGroup


class ProcessGroup(Reductions, Movements, Messages, _Base):  # type: ignore[misc]
    """Process group made by ``torch.distributed.init_process_group("zcomm")`` and ``new_group``."""

    _page: watch.RankPage | None = None  # of this process, if this group has opened it
    # Attributes that torch reads of a backend (see _get_backend).
    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False
    _serves: tuple[str, ...] = ("cpu",)

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        global_ranks: Sequence[int] = (),
        part: Joined | None = None,
    ) -> None:
        """Join the group's ranks.

        global_ranks: of the ranks of this group in the default group. part: of ranks that have met already.
        """
        _Base.__init__(self, rank, size)  # the form with a store cannot be subclassed
        self._store: dist.Store | None = store
        self._watch: Watch | None = None
        self._name = ""
        self._description = ""
        seconds = timeout.total_seconds()
        job = name_of_job(launcher_in(os.environ), os.environ)
        is_default = part is None and not dist.is_initialized()  # the ranks of other groups have met before
        linger_s = LINGER_S if is_default and not job else 0.0
        joined = part or self._join("meeting", rank, size, seconds, job, linger_s, lambda: _lost_of(global_ranks))
        self._joined = replace(joined, watch=None)  # only the watch holds the store
        self._meshes, self._processes = joined.meshes, joined.processes
        self._places = tuple(global_ranks) or joined.places  # of these ranks in the default group, if they are a part
        self._splits = 0  # calls of split_group
        if not _alive:
            _core.set_threads(max(1, len(os.sched_getaffinity(0)) // joined.hosts.local_world_size(rank)))
        self._open(joined.core, seconds)
        self._monitor: Monitor | None = Monitor(store, self._meshes, rank, size)
        self._store_end = StoreEnd(store, rank) if is_default and size > 1 else None
        _alive.add(self)
        if is_default and watch.current() is None:  # a program need not call zcomm.init()
            watch.open_page(page_job(joined.key), rank, size, joined.hosts.local_rank(rank), joined.backend)
            self._page = watch.current()
        if joined.watch is not None:
            itself = weakref.ref(self)
            self._watch = joined.watch(lambda: _leave(itself()))
            weakref.finalize(self, self._watch.end)

    def _join(self, name: str, rank: int, size: int, seconds: float, *job: Any) -> Joined:
        """Join the group's ranks; ``job`` as in join_through_store.

        The meeting's keys are deleted, as a later group may use the same store and name. No rank continues before that.
        """
        meeting, master = dist.PrefixStore(name, self.get_group_store()), os.environ.get("MASTER_ADDR")
        joined = join_through_store(meeting, rank, size, "auto", seconds, None, "the group's store", master, *job)
        if size > 1:
            joined.core.barrier("", False)  # all have read them
            if rank == 0:
                for key in meeting_keys(size):
                    meeting.delete_key(key)
                forget_end(self.get_group_store())
            joined.core.barrier("", False)
        joined.core.forget_callers()
        return joined

    # --- identity ---------------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    name = _get_backend_name = getBackendName

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Keep the words, such as "mesh_tensor"; errors of a part of the ranks have them, with the ranks' numbers."""
        self._description = description
        if self._places and description not in ("undefined", "default_pg"):
            moved = self._places != tuple(range(self._size))
            text = f' [group "{description}"{f": {places_text(self._places)}" if moved else ""}]'
            self._core.describe(text, self._places)

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self._serves]

    def _get_backend(self, device: torch.device | str) -> ProcessGroup:
        kind = torch.device(device).type
        if kind not in self._serves:
            raise RuntimeError(f'no backend for device type {kind}: "zcomm" serves {" and ".join(self._serves)}')
        return self

    def supports_tensor_alloc(self, device: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return f'<zcomm.torch_backend.ProcessGroup "{self._name}", rank {self._rank} of {self._size}>'

    def get_group_store(self) -> dist.Store:
        """Return the group's store. Raises: RuntimeError after ``destroy_process_group``, which releases it."""
        if self._store is None:
            raise RuntimeError("this process group was destroyed, and its store released: make a group again")
        return self._store

    # --- order and time ---------------------------------------------------------------------------------------

    def _set_sequence_number_for_group(self) -> None:
        self._sequence = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations; it cannot exceed the group's original timeout."""
        seconds = timeout.total_seconds()
        if seconds > self._deadline_s:
            raise ValueError(
                f"set_timeout: {seconds:g} s is more than the {self._deadline_s:g} s that the group was made with"
            )
        self._timeout_s = seconds
        self._has_core_deadline = self._given_up is None and seconds == self._deadline_s

    _set_default_timeout = set_timeout

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Wait for all ranks, as torch.distributed.monitored_barrier does."""
        if hasattr(timeout, "device_ids"):  # BarrierOptions
            timeout = timeout_of(timeout)
        if timeout is None:
            timeout = self._timeout_s
        if not isinstance(timeout, timedelta):
            timeout = timedelta(seconds=timeout)
        if self._monitor is None:
            raise RuntimeError("monitored_barrier: this process group was destroyed: make a group again")
        self._monitor.barrier(timeout, wait_all_ranks)
        self._flight.finish_collectives()  # it goes through the store, not ordered with them

    # --- coalescing: operations issued in between end together -------------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Done | Pending:
        works, self._coalesced = self._coalesced or [], None
        if not works:
            return Ended([])
        outputs = [tensor for work in works for tensor in work.result()]
        are_collectives = all(work.lane is self._collectives for work in works)
        lane = self._collectives if are_collectives else self._messages
        work = Pending(Together(works), outputs, lane, self._flight)
        self._flight.add(work)
        return work

    # --- life -------------------------------------------------------------------------------------------------

    @property
    def options(self) -> Options:
        """Options of this group, a copy."""
        return Options(timedelta(seconds=self._timeout_s))

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroup | None:
        """Create a group of these ranks of this one, in this order; None on other ranks. Collective over this group.

        timeout: of the new group; None: that in ``opts``, or else this group's. device_types: without effect, because a
        group serves all devices. ``torch.distributed.split_group`` calls it, and makes the group known to torch.
        Raises: ValueError for ranks that are not of this group, and for different lists on the ranks of a part. As
        Communicator.split otherwise: if a part cannot be joined, this group remains usable.
        """
        if timeout is None:
            timeout = opts._timeout if opts is not None else timedelta(seconds=self._timeout_s)
        store, ranks, number = self.get_group_store(), [int(rank) for rank in ranks], self._splits
        self._splits += 1
        part = split(self, self._joined, ranks, timeout.total_seconds())
        if part is None:
            return None
        part.core.forget_callers()
        unique = derive_key(part.key, b"name").hex()[:12]  # the same on all ranks, of no other group
        store = dist.PrefixStore(f"split/{unique}", store)
        group = type(self)(store, part.core.rank, part.core.world_size, timeout, part=part)
        group.setGroupName(group_name or f"{self._name}:split:{unique}")
        group.setGroupDesc(group_desc or f"{self._description or 'undefined'}:split:{number}")
        return group

    def perform_nocolor_split(self, device: Any) -> None:
        """Do nothing: torch calls it on ranks outside a new group, which "zcomm" does not ask for."""

    def eager_connect_single_device(self, device: Any) -> None:
        """Do nothing: the ranks are connected, and the first collective on CUDA tensors connects the devices."""

    def shutdown(self) -> None:
        """End pending operations, say goodbye to the peers, free everything. Idempotent.

        For the default group it returns when the store that rank 0 serves has ended, or after ``_STORE_END_S``. So the
        next group has its own store, on any rank. While an exception is handled it waits for a shorter time.
        """
        self.abort()
        store_end, self._store_end = self._store_end, None
        if store_end is not None:
            most_s = _STORE_END_S if sys.exc_info()[1] is None else _STORE_END_IN_ERROR_S
            store_end.wait(min(self._deadline_s, most_s))
            store_end.close()

    def abort(self) -> None:
        """End pending operations, say goodbye to the peers, free everything, and wait for no rank. Idempotent."""
        if self._page is not None and self._page is watch.current():
            watch.close_page()
        if self._watch is not None:
            self._watch.end()
        note_cause(self._core, self._meshes, self._processes)
        self._close()
        if self._store_end is not None:
            self._store_end.announce()
        for mesh in self._meshes:
            mesh.leave()
        self._store = self._monitor = None
        _alive.discard(self)


def _lost_of(global_ranks: Sequence[int]) -> int | None:
    """Return one of these ranks if the default group knows that it has ended."""
    default = dist.group.WORLD if dist.is_initialized() else None
    if not isinstance(default, ProcessGroup) or not default._meshes:
        return None
    lost = default._meshes[-1].lost()  # by rank of the whole group
    return lost if lost in global_ranks else None


def _leave(group: ProcessGroup | None) -> None:
    """End a group that ranks of two jobs have joined."""
    if group is not None:
        group._has_core_deadline = False
        group._given_up = RuntimeError("ranks of another job came to the group's store (logged as an error)")
        group._core.close()


@atexit.register
def _shutdown_all() -> None:
    for group in list(_alive):
        group.abort()
