"""Offload of activations: tensors that autograd saves for backward wait in pinned host memory or in a swap file.

[Note: saved storages] Autograd saves tensors; their storages use the memory. The first saved tensor of a storage
offloads all of it (a queue of slices is one copy). Backward recreates the storage, once for all tensors that need it,
with the same strides, offsets, conjugate and negative bits: the same values. Parameters, their views, small storages,
sparse and quantized tensors and subclasses are not offloaded. Buffers return to a pool as backward drops used tensors,
so a training loop allocates only in its first steps. To NVMe, writes run behind the forward, at most WRITES at a time.
Reads run ahead of the backward: the storages that were saved before the needed one.
[Note: activations of a device] Copies run on separate streams ([Note: lane]). A storage is kept until its copy to the
host has ended. When LEAVING copies are in flight, torch's stream waits for the oldest, and its storage is freed. In
backward the copies of the next READS storages are already in flight. A reused buffer waits, on the device, for the
previous copy from it. The host waits only for the drive: tier "nvme" writes a storage after its copy to the host.
Thread rule: autograd may unpack on other threads; a lock covers the pool. Source:
torch.autograd.graph.saved_tensors_hooks; activation offload as in ZeRO-Infinity (arXiv:2104.07857) section 5.2.2.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zcomm import _core
from zcomm.comm.work import Work
from zcomm.memory import device_streams
from zcomm.memory.device_streams import DeviceLane
from zcomm.memory.pinned import PinnedArena
from zcomm.memory.swap_file import StrPath, SwapFile

WRITES = 4  # writes of storages in flight to the drive
READS = 2  # storages read ahead
LEAVING = 4  # copies of storages in flight from a device
KNOWN = 4096  # remembered storages before entries of freed ones are removed


class _Held:
    """One offloaded storage: in ``buffer``, in the swap file under ``key``, or in both for a while."""

    def __init__(self, owner: offload_activations, number: int, nbytes: int, device: torch.device) -> None:
        self.owner, self.number, self.nbytes, self.device = owner, number, nbytes, device
        self.buffer: torch.Tensor | None = None
        self.key = ""
        self.write: Work | None = None
        self.read: tuple[torch.Tensor, Work] | None = None
        self.before: weakref.ref[_Held] | None = None
        self.kept: torch.Tensor | None = None  # the storage, while it leaves a device
        self.left: _core.Event | None = None
        self.back: tuple[torch.Tensor, _core.Event] | None = None  # copied, or being copied, to the device
        self._made: StorageWeakRef | None = None

    def storage(self) -> torch.UntypedStorage:
        """Return the recreated storage, creating it at the first call."""
        made = self._made
        alive = None if made is None else torch.UntypedStorage._new_with_weak_ptr(made.cdata)
        if alive is not None:
            found: torch.UntypedStorage = alive
            return found
        storage = self.owner._bring(self).untyped_storage()
        self._made = StorageWeakRef(storage)
        return storage

    def __del__(self) -> None:
        self.owner._drop(self)


class _View:
    """Stand-in that autograd keeps instead of a tensor."""

    __slots__ = ("dtype", "held", "is_conj", "is_neg", "offset", "size", "stride")

    def __init__(self, tensor: torch.Tensor, held: _Held) -> None:
        self.held, self.dtype = held, tensor.dtype
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()  # of a view: the storage lacks both

    def tensor(self) -> torch.Tensor:
        """Recreate the tensor over its storage."""
        empty = torch.empty(0, dtype=self.dtype, device=self.held.device)
        tensor = empty.set_(self.held.storage(), self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch._neg_view(tensor) if self.is_neg else tensor


class offload_activations:
    """Context that offloads tensors saved for backward to another tier until backward needs them.

    Use: ``with zcomm.offload_activations(): loss = model(x)``.
    tier: "cpu" (pinned host memory) or "nvme" (a swap file below ``nvme_path``, a directory or one per drive).
    min_nbytes: smaller storages are not offloaded. keep: a module, or tensors, that are not offloaded either (buffers,
    inputs in long use); parameters and their views never are. Gradients have the same bits. Activation checkpointing
    inside, reentrant or not, keeps its inputs in the tier. Create one object and enter it in each step, so that its
    buffers are reused. Memory: all saved storages, in the tier. Backward restores one storage at a time (nvme: READS
    more ahead, and WRITES buffers in host memory). ``close()`` frees all, once no graph needs it.

    Raises: ValueError for an unknown tier, min_nbytes below 0, nvme without a path; OSError from the pinned budget and
    the swap file. The forward raises NotImplementedError for a nested tensor of layout torch.strided.
    """

    _on_meta = False  # offloads tensors without memory, for a plan

    def __init__(
        self,
        tier: str = "cpu",
        *,
        min_nbytes: int = 2**20,
        nvme_path: StrPath | Sequence[StrPath] | None = None,
        keep: nn.Module | Iterable[torch.Tensor] = (),
    ) -> None:
        if tier not in ("cpu", "nvme"):
            raise ValueError(f"offload_activations: tier={tier!r}; use 'cpu' or 'nvme'")
        if min_nbytes < 0:
            raise ValueError(f"offload_activations: min_nbytes={min_nbytes} must be at least 0")
        if tier == "nvme" and nvme_path is None:
            raise ValueError("offload_activations: tier='nvme' needs nvme_path, a directory on the drive")
        self._min_nbytes = min_nbytes
        self._swap = SwapFile(nvme_path) if tier == "nvme" and nvme_path is not None else None
        self._arena: PinnedArena | None = PinnedArena()
        kept = [*keep.parameters(), *keep.buffers()] if isinstance(keep, nn.Module) else list(keep)
        self._keep = {tensor.untyped_storage()._cdata: tensor for tensor in kept}
        self._lock = threading.RLock()
        # By size; the event of their last copy.
        self._free: dict[int, list[tuple[torch.Tensor, _core.Event | None]]] = {}
        self._lanes: dict[torch.device, DeviceLane | None] = {}
        self._leaving: deque[weakref.ref[_Held]] = deque()
        self._free_keys: dict[int, list[str]] = {}
        self._known: dict[int, tuple[StorageWeakRef, int, weakref.ref[_Held]]] = {}
        self._writing: deque[weakref.ref[_Held]] = deque()
        self._last: weakref.ref[_Held] | None = None
        self._hooks: list[Any] = []
        self._count = self._nbytes = self._peak = 0

    def __enter__(self) -> offload_activations:
        if self._arena is None:
            raise RuntimeError("these offload_activations are closed")
        self._hooks.append(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        self._hooks[-1].__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        self._hooks.pop().__exit__(*raised)
        if not self._hooks:
            self._known.clear()

    def stats(self) -> dict[str, int]:
        """Return sizes and a count.

        offloaded_nbytes: in the tier now; peak_nbytes: at most; offloaded_count: storages since the start;
        buffer_nbytes: pinned host memory, used and free; swap_nbytes: reserved on the drive.
        """
        with self._lock:
            return {
                "offloaded_nbytes": self._nbytes,
                "peak_nbytes": self._peak,
                "offloaded_count": self._count,
                "buffer_nbytes": self._arena.stats()["used_nbytes"] if self._arena is not None else 0,
                "swap_nbytes": self._swap.stats()["reserved_nbytes"] if self._swap is not None else 0,
            }

    def close(self) -> None:
        """Free buffers and swap file. Idempotent.

        Graphs that still need their buffers keep those in host memory. A graph with storages on the drive cannot run
        backward any more.
        """
        with self._lock:
            self._leaving.clear()
            for lane in self._lanes.values():
                if lane is not None:
                    lane.close()
            self._free.clear()
            self._writing.clear()
            self._arena = None
            if self._swap is not None:
                self._swap.close()

    # --- forward ----------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> Any:
        if not self._wanted(tensor):
            return tensor
        with self._lock:
            return _View(tensor, self._held(tensor))

    def _wanted(self, tensor: torch.Tensor) -> bool:
        if tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
            return False  # parameters and other kinds of tensors
        if tensor.is_meta and not self._on_meta:
            return False
        if tensor.is_nested:
            raise NotImplementedError(
                "offload_activations: a nested tensor of layout torch.strided is saved for backward, and torch gives "
                "its storage no sizes; use layout=torch.jagged, which is not offloaded, or leave the context for it"
            )
        if tensor.is_quantized or tensor._is_zerotensor():
            return False  # scales are not in the storage; zeros have none
        base = tensor._base
        storage = tensor.untyped_storage()
        return (
            storage.nbytes() >= max(self._min_nbytes, 1)
            and not isinstance(base, nn.Parameter)
            and storage._cdata not in self._keep
        )

    def _held(self, tensor: torch.Tensor) -> _Held:
        storage, version = tensor.untyped_storage(), tensor._version
        known = self._known.get(storage._cdata)
        if known is not None and not known[0].expired() and known[1] == version:
            held = known[2]()
            if held is not None:
                return held
        self._count += 1
        held = _Held(self, self._count, storage.nbytes(), tensor.device)
        self._nbytes += held.nbytes
        self._peak = max(self._peak, self._nbytes)
        buffer, busy = self._take(held.nbytes)
        held.buffer = buffer
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        lane = self._lane(tensor.device)
        if lane is not None:
            self._leave(held, flat, busy, lane)
        else:
            buffer.copy_(flat)
            if self._swap is not None:
                self._send(held, buffer)
        if len(self._known) >= KNOWN:  # of a block that is never left
            self._known = {key: entry for key, entry in self._known.items() if entry[2]() is not None}
        self._known[storage._cdata] = (StorageWeakRef(storage), version, weakref.ref(held))
        held.before, self._last = self._last, weakref.ref(held)
        return held

    def _lane(self, device: torch.device) -> DeviceLane | None:
        if device not in self._lanes:
            self._lanes[device] = device_streams.open_lane(device)
        return self._lanes[device]

    def _leave(self, held: _Held, flat: torch.Tensor, busy: _core.Event | None, lane: DeviceLane) -> None:
        held.kept, held.left = flat, lane.event()
        assert held.buffer is not None
        after = [lane.recorded(lane.event()), *([] if busy is None else [busy])]
        lane.d2h.copy([(held.buffer, flat)], after, held.left)
        self._leaving.append(weakref.ref(held))
        while self._leaving:
            oldest = self._leaving[0]()
            if oldest is not None and oldest.left is not None:
                if not oldest.left.done() and len(self._leaving) <= LEAVING:
                    break
                self._landed(oldest, lane)
            self._leaving.popleft()

    def _landed(self, held: _Held, lane: DeviceLane) -> None:
        """Free the storage for reuse by later work on torch's stream."""
        assert held.left is not None
        lane.current().wait(held.left)
        held.kept = None
        if self._swap is not None and held.buffer is not None and not held.key:
            held.left.synchronize()
            self._send(held, held.buffer)

    def _take(self, nbytes: int) -> tuple[torch.Tensor, _core.Event | None]:
        """Return a buffer, and the event after which it may be written."""
        free = self._free.get(nbytes)
        if free:
            return free.pop()
        assert self._arena is not None
        return self._arena.empty(nbytes, torch.uint8), None

    def _give(self, buffer: torch.Tensor, busy: _core.Event | None = None) -> None:
        if self._arena is not None:
            self._free.setdefault(buffer.numel(), []).append((buffer, busy))

    def _send(self, held: _Held, buffer: torch.Tensor) -> None:
        assert self._swap is not None
        keys = self._free_keys.setdefault(held.nbytes, [])
        held.key = keys.pop() if keys else f"activation.{held.number}"
        held.write = self._swap.write(held.key, buffer)
        self._writing.append(weakref.ref(held))
        while len(self._writing) > WRITES:
            oldest = self._writing.popleft()()
            if oldest is not None:
                self._sent(oldest)

    def _sent(self, held: _Held) -> None:
        """Wait until the storage is on the drive, and free its buffer."""
        if held.write is not None:
            held.write.wait()
            held.write = None
        if held.buffer is not None:
            self._give(held.buffer, held.left if held.back is None else held.back[1])
            held.buffer = None

    # --- backward ---------------------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _View):
            return packed  # type: ignore[no-any-return]
        with self._lock, torch.no_grad():
            return packed.tensor()

    def _bring(self, held: _Held) -> torch.Tensor:
        lane = self._lane(held.device)
        if lane is not None:
            return self._bring_back(held, lane)
        if held.buffer is not None:
            out = torch.empty(held.nbytes, dtype=torch.uint8, device=held.device)
            out.copy_(held.buffer)
        else:
            reading = held.read or self._fetch(held)
            held.read = None
            reading[1].wait()
            out = reading[0].to(held.device)
        for earlier in self._earlier(held):
            if earlier.buffer is None and earlier.read is None and earlier._made is None:
                earlier.read = self._fetch(earlier)
        return out

    @staticmethod
    def _earlier(held: _Held) -> Iterator[_Held]:
        """Yield the READS storages that were saved before it."""
        before = held.before
        for _ in range(READS):
            earlier = before() if before is not None else None
            if earlier is None:
                return
            yield earlier
            before = earlier.before

    def _bring_back(self, held: _Held, lane: DeviceLane) -> torch.Tensor:
        """Copy a storage back to a device; torch's stream waits for the copy."""
        self._send_back(held, lane)
        assert held.back is not None
        out, came = held.back
        lane.current().wait(came)
        held.back = None
        if held.buffer is not None:  # it is read again if the storage is needed again; then for others
            held.left = came
        for earlier in self._earlier(held):
            if earlier.back is None and earlier._made is None:
                if earlier.buffer is None and earlier.read is None:
                    earlier.read = self._fetch(earlier, lane)
                elif earlier.buffer is not None or (earlier.read is not None and earlier.read[1].done()):
                    self._send_back(earlier, lane)
        return out

    def _send_back(self, held: _Held, lane: DeviceLane) -> None:
        """Start the copy to the device, unless it has begun."""
        if held.back is not None:
            return
        came, source = lane.event(), held.buffer
        if source is None:
            reading = held.read or self._fetch(held, lane)
            held.read = None
            reading[1].wait()
            source = reading[0]
        out = lane.empty(held.nbytes, torch.uint8, "activations")
        after = [lane.recorded(lane.event()), *([] if held.left is None else [held.left])]
        lane.h2d.copy([(out, source)], after, came)
        held.back = out, came
        if held.buffer is None:
            self._give(source, came)

    def _fetch(self, held: _Held, lane: DeviceLane | None = None) -> tuple[torch.Tensor, Work]:
        """Start reading a storage from the drive; for a device into a pinned buffer."""
        assert self._swap is not None
        if lane is None:
            out = torch.empty(held.nbytes, dtype=torch.uint8, device=held.device)
        else:
            out, busy = self._take(held.nbytes)
            if busy is not None:
                busy.synchronize()
        return out, self._swap.read(held.key, out)

    def _drop(self, held: _Held) -> None:
        """Free the buffer and key of a storage that is no longer needed."""
        with self._lock:
            self._nbytes -= held.nbytes
            if self._arena is None:
                return
            lane = self._lanes.get(held.device)
            if lane is not None:  # torch may reuse the memory after its stream has waited
                for event in (held.left if held.kept is not None else None, held.back and held.back[1]):
                    if event is not None:
                        lane.current().wait(event)
            self._sent(held)
            if held.read is not None:
                held.read[1].wait()
                if lane is not None:
                    self._give(held.read[0])
            if held.key:
                self._free_keys[held.nbytes].append(held.key)
