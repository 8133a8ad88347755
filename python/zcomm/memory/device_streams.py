"""DeviceLane: zcomm's use of an accelerator: two copy streams, torch's current stream, events, and device memory.

[Note: lane] Copies run concurrently with torch's kernels on separate streams: ``d2h`` device to host, ``h2d`` host to
device. They are split into pieces, so that both directions and the kernels' own traffic alternate. Only events order
them: the host waits only in functions with names that begin with wait, and in ``passes`` and ``drain``. The owner of
torch's memory that a copy stream uses keeps it until the current stream has waited for the copy. Then torch may reuse
it (no record_stream).
``for_params`` opens it; tests replace ``open_lane`` by one for the simulated device. Its memory is the host's, so CPU
tensors serve as device tensors.
Thread rule: free-threaded; a stream's calls are made under its lock. Only the thread that uses torch's stream queues
work on it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator

PIECE_NBYTES = 8 << 20
_LOOK_S, _GRACE_S = 0.1, 2.0  # period of the check for ended ranks; time for work queued before


class CopyStream:
    """A stream of the core, for copies of whole flat tensors and kernels on them."""

    def __init__(self, core: _core.Stream) -> None:
        self._core = core
        self._lock = threading.Lock()

    def copy(
        self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]], after: Iterable[_core.Event], *done: _core.Event
    ) -> None:
        """Queue all ``copies`` (to, from; contiguous, equal sizes) after the events ``after``.

        Then record ``done``. Returns at once; the caller keeps the tensors until ``done``.
        """
        with self._lock:
            for event in after:
                self._core.wait(event)
            for to, source in copies:
                dst, src = to.data_ptr(), source.data_ptr()
                for begin in range(0, to.nbytes, PIECE_NBYTES):
                    self._core.copy(dst + begin, src + begin, min(PIECE_NBYTES, to.nbytes - begin))
            for event in done:
                self._core.record(event)

    def run(self, work: Callable[[_core.Stream], None], *done: _core.Event) -> None:
        """Queue ``work`` (kernels) on the stream, and then record ``done``."""
        with self._lock:
            work(self._core)
            for event in done:
                self._core.record(event)


class NoPeers:
    """Null object: the communicator between the devices of ranks that reach no other rank's device."""

    world_size = 1
    is_symmetric = True

    def duplicate(self) -> NoPeers:
        return self

    def verify(self, behind: bool = False) -> None: ...

    def memory(self) -> dict[str, int]:
        return {"allocation_count": 0}

    def close(self) -> None: ...


NO_PEERS = NoPeers()
Peers = Communicator | NoPeers


class Lane:
    """Memory of the model's device. The class itself is the null object, of the CPU: nothing runs concurrently."""

    on_device = False
    device = torch.device("cpu")

    def empty(self, count: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Allocate flat memory on the device, for the use that errors name."""
        return torch.empty(count, dtype=dtype)

    def drain(self) -> None:
        """Wait on the host until no copy is in flight, or the device is lost."""

    def close(self) -> None:
        """Wait for the copies and free everything. Idempotent."""


class DeviceLane(Lane):
    """Streams, events and memory of one accelerator; see [Note: lane]. core: the core's handle of ``device``."""

    on_device = True

    def __init__(self, device: torch.device, core: _core.Device) -> None:
        self.device = device
        self.core = core
        self.d2h = CopyStream(core.make_stream())
        self.h2d = CopyStream(core.make_stream())
        self.peers: list[Communicator] = []  # between devices: streams may wait for their ranks
        self._adopted: dict[int, _core.Stream] = {}
        self._locked: list[torch.Tensor] = []

    def __repr__(self) -> str:
        return f"DeviceLane({self.core.name})"

    # --- streams and events -----------------------------------------------------------------------------------

    def current(self) -> _core.Stream:
        """Return torch's current stream, as the core's."""
        native = self._native()
        stream = self._adopted.get(native)
        if stream is None:
            stream = self._adopted[native] = self.core.adopt_stream(native)
        return stream

    def _native(self) -> int:
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def event(self) -> _core.Event:
        """Create an event that is done until it is recorded."""
        return self.core.make_event()

    def recorded(self, event: _core.Event) -> _core.Event:
        """Record ``event`` on torch's current stream, and return it."""
        self.current().record(event)
        return event

    def passes(self, event: _core.Event) -> bool:
        """Wait on the host until ``event`` has passed; False: it has not, and a rank that it may wait for has ended."""
        while not event.wait_for(_LOOK_S):
            if any(comm._lost() for comm in self.peers):
                return event.wait_for(_GRACE_S)
        return True

    def wait(self, event: _core.Event) -> None:
        """Wait as ``passes`` does. Raises: PeerLost."""
        if not self.passes(event):
            raise _core.PeerLost(f"{self.core.name} waits for a rank that is gone")

    def wait_for(self, *streams: CopyStream) -> None:
        """Wait on the host until all work queued on ``streams`` is done. Raises: PeerLost."""
        for stream in streams:
            end = self.event()
            stream.copy((), (), end)
            self.wait(end)

    # --- other ranks ------------------------------------------------------------------------------------------

    def reach(self, job: Communicator) -> Communicator | None:
        """Open a separate communicator between the devices of ``job``'s ranks: cuda_ipc, else NCCL. Collective.

        Returns: None if neither can.
        """
        from zcomm.backends import devices  # which joins ranks, as a lane of one rank need not

        return devices.beside(job, self.core, self.device)

    # --- memory -----------------------------------------------------------------------------------------------

    def empty(self, count: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Allocate flat memory of torch's on the device. Raises: CudaError naming bytes, their use, and the remedy."""
        try:
            return self._empty(count, dtype)
        except torch.OutOfMemoryError as error:
            free, total = self.core.memory()
            raise _core.CudaError(
                f"out of memory on {self.core.name}: {count * dtype.itemsize} bytes for {what} ({free} of {total} "
                "bytes are free); use a higher stage or a smaller bucket_mb or prefetch, keep less on the device "
                "(zcomm.Offload), or recompute or offload activations"
            ) from error

    def buffer(self, peers: Peers, count: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Allocate flat memory for collectives of ``peers``: symmetric memory, zero-filled, if it has such (cuda_ipc),
        else as ``empty`` does. Collective."""
        if isinstance(peers, NoPeers) or not peers.is_symmetric:
            return self.empty(count, dtype, what)
        torch.cuda.empty_cache()  # the core cannot allocate memory that torch caches
        try:
            return peers.empty(count, dtype)
        except _core.CudaError as error:
            raise _core.CudaError(
                f"{error}: {count * dtype.itemsize} bytes on each rank for {what}; use a smaller bucket_mb or "
                "prefetch, or keep less on the device (zcomm.Offload)"
            ) from error

    def _empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=self.device)

    def free_nbytes(self) -> int:
        """Return the bytes of the device that torch's tensors may still take, in this process."""
        free, total = self.core.memory()
        used = torch.cuda.memory_allocated(self.device)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 1.0)(self.device)
        return max(0, min(free + torch.cuda.memory_reserved(self.device) - used, int(fraction * total) - used))

    def lock(self, tensor: torch.Tensor) -> torch.Tensor:
        """Page-lock host memory that the arena has not allocated, until ``close``. Raises: CudaError."""
        if tensor.nbytes:
            self._lock(tensor)
            self._locked.append(tensor)
        return tensor

    def _lock(self, tensor: torch.Tensor) -> None:
        _core.page_lock(tensor.data_ptr(), tensor.nbytes)

    def _unlock(self, tensor: torch.Tensor) -> None:
        _core.page_unlock(tensor.data_ptr())

    def drain(self) -> None:
        for stream in (self.d2h, self.h2d):
            try:
                end = self.event()
                stream.copy((), (), end)
                if not self.passes(end):
                    logging.getLogger("zcomm").warning("copies of %s wait for a rank that is gone", self.core.name)
            except _core.CudaError as error:
                logging.getLogger("zcomm").warning("copies of %s did not end: %s", self.core.name, error)

    def close(self) -> None:
        self.drain()
        for tensor in self._locked:
            self._unlock(tensor)
        self._locked.clear()
        self._adopted.clear()


def own_pages(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate zeros, [count], that begin on a page and share no page with other memory.

    Pages are locked as a whole, once.
    """
    nbytes = _core.page_nbytes()
    page = nbytes // dtype.itemsize
    whole = torch.zeros(-(-count // page) * page + page, dtype=dtype)
    begin = -whole.data_ptr() % nbytes // dtype.itemsize
    return whole[begin : begin + count]


def open_lane(device: torch.device) -> DeviceLane | None:
    """Open the lane of ``device``; None for the CPU.

    Raises: NotImplementedError in a build without CUDA, or for another kind of device; CudaError without driver.
    """
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        raise NotImplementedError(f"device {device}: zcomm trains on the CPU and on CUDA devices")
    index = torch.cuda.current_device() if device.index is None else device.index
    return DeviceLane(torch.device("cuda", index), _core.cuda_device(index))


def for_params(named: Iterable[tuple[str, torch.Tensor]], device: torch.device | str | None = None) -> Lane:
    """Open the lane of ``device``, or of the tensors' device: the CPU's if they are there, or have no memory yet.

    Raises: ValueError naming two tensors on different devices; as open_lane.
    """
    first: tuple[str, torch.device] | None = None
    for name, tensor in named:
        if tensor.is_meta or (device is not None and tensor.device.type == "cpu"):
            continue
        if first is None:
            first = name, tensor.device
        elif tensor.device != first[1]:
            raise ValueError(
                f"{first[0]} is on {first[1]}, {name} on {tensor.device}; one optimizer has one device: move the model "
                "there as a whole, or give each part an optimizer of its own"
            )
    if device is None:
        return open_lane(Lane.device if first is None else first[1]) or Lane()
    wanted = torch.device(device)
    if first is not None and str(first[1]) != str(wanted) and first[1].type != str(wanted):
        raise ValueError(
            f"{first[0]} is on {first[1]}, but device={str(device)!r}; leave device out, or move the model"
        )
    return open_lane(wanted if first is None else first[1]) or Lane()
