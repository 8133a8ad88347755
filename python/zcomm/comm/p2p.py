"""Messages between two ranks: send and recv, concurrent with the collectives and not ordered with them.

CUDA tensors travel between the devices if the device communicator has messages of its own (nccl). Otherwise they travel
through the host, over the host communicator that the device communicator was built on.
"""

from __future__ import annotations

import contextlib
from typing import Literal, overload

import torch

from zcomm import _core
from zcomm.comm.calls import Buckets, Calls, listed
from zcomm.comm.cuda_streams import Streams
from zcomm.comm.device_p2p import DeviceRecv, copied_to_host
from zcomm.comm.tensors import check_buffers, core_dtype, count_written, refuse_weights, spans
from zcomm.comm.work import DeviceWork, Work, wait_on_current_stream


class RecvWork(Work):
    """A receive in flight; ``source`` is the sender's rank once it is done."""

    __slots__ = ("_source",)

    def __init__(self, core: _core.Work, keep_alive: object, source: _core.Source) -> None:
        super().__init__(core, (keep_alive, source))
        self._source = source

    @property
    def source(self) -> int:
        return self._source.rank


class DeviceRecvWork(RecvWork):
    """A receive for a device: ``wait()`` copies it on the current stream; if dropped, the call's stream copies it."""

    __slots__ = ("_device_recv",)
    ends_in_wait = True

    def __init__(self, core: _core.Work, device_recv: DeviceRecv, source: _core.Source) -> None:
        super().__init__(core, device_recv, source)
        self._device_recv: DeviceRecv | None = device_recv

    def wait(self, timeout: float | None = None) -> None:
        super().wait(timeout)
        device_recv, self._device_recv = self._device_recv, None
        if device_recv is not None:
            device_recv.finish()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # a destructor cannot raise
            if self._device_recv is not None:
                self._core.wait()
                self._device_recv.finish_where_called()


class StreamRecvWork(RecvWork):
    """A receive between devices: it ends on a stream, as a DeviceWork does."""

    __slots__ = ("_device",)

    def __init__(self, core: _core.Work, keep_alive: object, source: _core.Source, device: str) -> None:
        super().__init__(core, keep_alive, source)
        self._device = device

    def wait(self, timeout: float | None = None) -> None:
        wait_on_current_stream(self._core, self._device, timeout)
        self._keep_alive = None


def streams_of(device: str) -> Streams | None:
    """Return the streams of ``device``; None for the CPU."""
    return None if device == "cpu" else Streams(torch.device(device))


class Messages(Calls):
    def _host_streams(self) -> Streams | None:
        """Return the streams of messages that pass through the host; None for others.

        Messages between devices: the next call runs after the work already on the current stream.
        """
        if self._device == "cpu" or self._messenger is not self._core:
            return streams_of(self._device)
        self._name_stream()
        return None

    def send(self, buckets: Buckets, dst: int, tag: int = 0, async_op: bool = False, *, name: str = "") -> Work | None:
        """Send a tensor, or a list as one message, to rank ``dst``.

        Messages of one pair and tag (>= 0) match in call order. Both sides pass the same dtype and total count.
        A small message is sent without waiting for its recv; a large one waits for it. CUDA tensors are read after the
        work already queued on the current stream. Backend nccl sends them between the devices: the host waits for the
        recv to be called and for no device. With other backends the host waits for the current stream and copies them;
        they may be changed as soon as this returns.
        Returns: a Work if ``async_op``. Raises: ValueError, CollectiveMismatch, PeerLost, TimeoutError.
        """
        tensors = listed("send", buckets)
        dtype = core_dtype(check_buffers("send", tensors, self._device))
        streams = self._host_streams()
        if streams is not None:
            tensors = copied_to_host(tensors, streams)
        work = self._messenger.send(spans(tensors), dtype, dst, tag, name, async_op)
        if work is None:
            return None
        on_host = self._device == "cpu" or streams is not None
        return Work(work, tensors) if on_host else DeviceWork(work, tensors, self._device)

    @overload
    def recv(
        self,
        buckets: Buckets,
        src: int | None = ...,
        tag: int = ...,
        async_op: Literal[False] = ...,
        *,
        name: str = ...,
    ) -> int: ...
    @overload
    def recv(
        self, buckets: Buckets, src: int | None = ..., tag: int = ..., *, async_op: Literal[True], name: str = ...
    ) -> RecvWork: ...
    @overload
    def recv(
        self, buckets: Buckets, src: int | None = ..., tag: int = ..., async_op: bool = ..., *, name: str = ...
    ) -> int | RecvWork: ...

    def recv(
        self, buckets: Buckets, src: int | None = None, tag: int = 0, async_op: bool = False, *, name: str = ""
    ) -> int | RecvWork:
        """Receive a message into a tensor or a list of them.

        src: the sender; None for the first message with this tag from any rank. CUDA tensors are written on the current
        stream of the call, or of the Work's ``wait()``, after the work already queued on the call's stream.
        Returns: the sender's rank, or a Work with ``.source`` if ``async_op``. Raises: as send.
        """
        if async_op:
            refuse_weights("recv", buckets)
        tensors = listed("recv", buckets)
        dtype = core_dtype(check_buffers("recv", tensors, self._device))
        if src is not None and not 0 <= src < self.world_size:
            raise ValueError(f"recv: src={src} is not a rank of a world of size {self.world_size}")
        streams, source = self._host_streams(), _core.Source()
        device_recv = None if streams is None else DeviceRecv(tensors, streams)
        host = tensors if device_recv is None else device_recv.host
        work = self._messenger.recv(spans(host), dtype, -1 if src is None else src, tag, name, async_op, source)
        if work is not None:
            count_written(tensors)
            if device_recv is not None:
                return DeviceRecvWork(work, device_recv, source)
            if self._device == "cpu":
                return RecvWork(work, tensors, source)
            return StreamRecvWork(work, tensors, source, self._device)
        if device_recv is not None:
            device_recv.finish()
        count_written(tensors)
        return source.rank
