"""CUDA tensors of a process group: a separate communicator, opened by the first collective on them.

It is cuda_ipc or nccl, as "auto" chooses (docs/backends.md). Calls and works are ordered by streams, as torch's users
expect: an operation runs after the work on the current stream, ``work.wait()`` makes the current stream wait for its
end, Futures carry the streams' events. Invariant: all CUDA tensors of a group on this rank are on one device.
Thread rule: as the group's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from zcomm import _core
from zcomm.bootstrap.join import Joined
from zcomm.comm import cuda_streams
from zcomm.comm.device_p2p import DeviceRecv, copied_to_host
from zcomm.comm.work import CoreWork, DeviceWork, current_stream
from zcomm.torch_backend.group import ProcessGroup
from zcomm.torch_backend.issue import Start
from zcomm.torch_backend.ops.messages import Messages
from zcomm.torch_backend.ops.movements import Movements
from zcomm.torch_backend.ops.reductions import Reductions
from zcomm.torch_backend.staging import checked
from zcomm.torch_backend.work import Done, Ended, Pending


class Streams(cuda_streams.Streams):
    """Streams of the device, with one of the group's own, and Futures."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._side: torch.cuda.Stream | None = None

    def side(self) -> Any:
        """Return a context of the group's own stream, for the completer's thread.

        A wait on it blocks no stream of the program.
        """
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)
        return self.on(self._side)

    def future(self) -> Any:
        """Create a Future that carries the current streams of the thread that completes it."""
        return torch.futures.Future(devices=[self.device])


class DevicePending(Pending):
    """An operation in flight. The first thread to finish it records its end; other waiters' streams wait for that."""

    __slots__ = ("_end", "_streams")

    def __init__(self, streams: Streams, *operation: Any) -> None:
        self._streams = streams
        self._end: Any = None
        super().__init__(*operation)

    def _bring_back(self) -> None:
        super()._bring_back()
        self._end = self._streams.record()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        super().wait(timeout)
        self._follow()
        return True

    def get_future(self) -> Any:
        self._follow()
        return super().get_future()

    def _follow(self) -> None:
        if self._end is not None:
            self._streams.wait(self._end)

    def finish_in_background(self, seconds: float | None, before_future: Callable[[], None]) -> None:
        with self._streams.side():
            self.finish(seconds, before_future)

    def open_after_end(self, future: Any, gate: Any) -> None:
        with self._streams.side():
            self.finish()
            self._follow()
            super().open_after_end(future, gate)

    def new_future(self) -> Any:
        return self._streams.future()


class DeviceHalf(Reductions, Movements, Messages):
    """The collectives of a group on its CUDA tensors, and its messages if the communicator has its own (nccl)."""

    def __init__(self, joined: Joined, timeout_s: float, streams: Streams) -> None:
        self._open(joined.core, timeout_s)
        self._joined = joined
        self.streams = streams
        self.device = streams.device
        self._torch_device = joined.device
        self.has_messages = joined.messenger is None

    def _name_stream(self) -> None:
        _core.set_call_stream(current_stream(self._torch_device))

    def _is_simple(self, opts: Any) -> bool:
        self._name_stream()
        return super()._is_simple(opts)

    def _started(self, starts: Sequence[Start]) -> CoreWork:
        return DeviceWork(super()._started(starts), None, self._torch_device)

    def _start_elsewhere(self) -> Callable[[], None]:
        return partial(_core.set_call_stream, current_stream(self._torch_device))

    def _issue(self, what: str, opts: Any, outputs: Sequence[torch.Tensor], *rest: Any, **more: Any) -> Done | Pending:
        for tensor in tensors_in((outputs, rest, more.get("keep"))):
            if tensor.device != self.device:
                raise ValueError(f"{what}: a tensor is on {tensor.device}, others are on {self.device}")
        self._name_stream()
        return super()._issue(what, opts, outputs, *rest, **more)

    def _work_for(self, tensors: Sequence[torch.Tensor]) -> Callable[..., Pending]:
        return partial(DevicePending, self.streams)

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> Pending:
        self._name_stream()
        return super().send(tensors, dst, tag)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> Pending:
        self._name_stream()
        return super().recv(tensors, src, tag)

    def _handle(self, core_work: _core.Work) -> CoreWork:
        return DeviceWork(core_work, None, self._torch_device)

    def close(self) -> None:
        self._close()
        for mesh in self._joined.meshes:
            mesh.leave()


class DeviceProcessGroup(ProcessGroup):
    """A group that also serves CUDA tensors."""

    _half: DeviceHalf | None = None
    _is_bound = False  # to a device, on all ranks: the half has been there from the start

    _serves = ("cpu", "cuda")

    def _half_for(self, device: torch.device) -> DeviceHalf:
        """Return the half for CUDA tensors. Collective at first: every rank has called one on CUDA tensors."""
        if self._half is None:
            self._half = self._open_half(device)
            self._half._coalesced = None if self._coalesced is None else []
        if self._half.device != device:
            raise ValueError(
                f"a tensor is on {device}, but this group's CUDA tensors are on {self._half.device} on this rank; "
                "one device per rank (torch.cuda.set_device)"
            )
        return self._half

    def _open_half(self, device: torch.device) -> DeviceHalf:
        from zcomm.backends.devices import choose

        control = self._join("meeting/cuda", self._rank, self._size, self._deadline_s)
        return DeviceHalf(choose(control, device), self._deadline_s, Streams(device))

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Done | Pending:
        """Start a barrier, also one of the current streams once the group has met CUDA tensors."""
        if self._half is None:
            return super().barrier(opts, timeout)
        number = self._flight.number
        work = self._half.barrier(opts, timeout)
        if isinstance(work, Done) and self._flight.has_copies:  # all ranks have issued the same operations
            self._flight.finish_up_to(number)
        return work

    def eager_connect_single_device(self, device: Any) -> None:
        """Connect the devices of a group that is bound to them: torch calls it for ``device_id=``. Collective.

        If no backend joins them, it does nothing, and the first collective on CUDA tensors raises why.
        """
        if torch.device(device).type == "cuda":
            self._bind(torch.device(device))

    def _bind(self, device: torch.device) -> None:
        with suppress(NotImplementedError):  # on all ranks
            self._is_bound = self._half_for(device).has_messages

    # --- messages: of a bound group between the devices over nccl, else over the host's communicator ------------
    #     The first collective opens the half at different times on different ranks, so a message cannot ask for it.

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> Pending:
        device = device_of(tensors)
        if device is None:
            return super().send(tensors, dst, tag)
        if self._is_bound:
            return self._half_for(device).send(on_one_device("send", tensors, device), dst, tag)
        return super().send(copied_to_host(on_one_device("send", tensors, device), self._streams(device)), dst, tag)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> Pending:
        device = device_of(tensors)
        if device is None:
            return super().recv(tensors, src, tag)
        if self._is_bound:
            return self._half_for(device).recv(on_one_device("recv", tensors, device), src, tag)
        device_recv = DeviceRecv(on_one_device("recv", tensors, device), self._streams(device))
        return self._receive(device_recv.host, src, tag, tensors, device_recv.finish)

    def _work_for(self, tensors: Sequence[torch.Tensor]) -> Callable[..., Pending]:
        device = device_of(tensors)
        return Pending if device is None else partial(DevicePending, self._streams(device))

    def _streams(self, device: torch.device) -> Streams:
        return self._half.streams if self._half is not None and self._half.device == device else Streams(device)

    # --- coalescing: messages are the host's, collectives the devices' ------------------------------------------

    def _start_coalescing(self, device: Any = None) -> None:
        super()._start_coalescing(device)
        if self._half is not None:
            self._half._coalesced = []

    def _end_coalescing(self, device: Any = None) -> Done | Pending:
        half = self._half
        works = [] if half is None else half._coalesced or []
        if half is not None:
            half._coalesced = None
        if not works:
            return super()._end_coalescing(device)
        messages, self._coalesced = self._coalesced or [], None
        works = [*works, *messages]
        return works[0] if len(works) == 1 else _AllOf(works)

    def abort(self) -> None:
        """End both halves, as ProcessGroup.abort does."""
        half, self._half = self._half, None
        if half is not None:
            half.close()
        super().abort()


class _AllOf(Ended):
    """Works that end together."""

    __slots__ = ("_works",)

    def __init__(self, works: Sequence[Pending]) -> None:
        super().__init__([tensor for work in works for tensor in work.result()])
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return all(work.is_success() for work in self._works)

    def exception(self) -> Any:
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def get_future(self) -> Any:
        return torch.futures.collect_all([work.get_future() for work in self._works]).then(
            lambda own: [tensor for future in own.value() for tensor in future.value()]
        )


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)


def on_one_device(what: str, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return dense tensors, of any strides. Raises: ValueError for one elsewhere, NotImplementedError as `checked`."""
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"{what}: a tensor is on {tensor.device}, others are on {device}")
    return [checked(what, tensor) for tensor in tensors]


def device_of(values: Any) -> torch.device | None:
    """Return the device of the first tensor in nested lists, if it is on CUDA."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device if value.is_cuda else None
        if isinstance(value, (list, tuple)) and value and (found := device_of(value)) is not None:
            return found
    return None


def _dispatched(name: str) -> Callable[..., Any]:
    on_cpu, on_device = getattr(ProcessGroup, name), getattr(DeviceHalf, name)

    def call(self: DeviceProcessGroup, *arguments: Any, **options: Any) -> Any:
        device = device_of(arguments) or device_of(options.values())
        return (
            on_cpu(self, *arguments, **options)
            if device is None
            else on_device(self._half_for(device), *arguments, **options)
        )

    call.__name__ = name
    return call


_names = {name for name in (*vars(Reductions), *vars(Movements)) if not name.startswith("_")} - {"barrier"}
for _name in _names | {"_reduce_scatter_base", "_allgather_base"}:
    setattr(DeviceProcessGroup, _name, _dispatched(_name))
