"""Messages of CUDA tensors through the host: a host communicator moves copies in page-locked memory.

A message runs after the work already queued on the call's current stream. A receive is copied to the device on the
current stream of the waiting thread. Only two ranks call, so nothing collective is created.
Thread rule: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zcomm.comm.cuda_streams import Streams


def copied_to_host(tensors: Sequence[torch.Tensor], streams: Streams) -> list[torch.Tensor]:
    """Copy the device's ``tensors`` to the host; blocks until the current stream has finished."""
    return [streams.page_locked(tensor).copy_(tensor.detach()) for tensor in tensors]


class DeviceRecv:
    """Host memory that receives a message for the device's ``tensors``."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        self._targets = [tensor.detach() for tensor in tensors]
        self._streams = streams
        self._stream = streams.current()  # of the call
        self._before = streams.record()
        self.host = [streams.page_locked(target) for target in self._targets]

    def finish(self) -> None:
        """Copy the received message to the device, on the current stream."""
        self._streams.wait(self._before)  # the stream of the call may still use the tensors
        for target, host in zip(self._targets, self.host, strict=True):
            target.copy_(host, non_blocking=True)

    def finish_where_called(self) -> None:
        """Run finish() on the stream that was current at the call."""
        with self._streams.on(self._stream):
            self.finish()
