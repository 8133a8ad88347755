"""Messages of CUDA tensors by way of the host: page-locked memory there is what a communicator of the host moves.

A message comes after what the current stream of the call has been given. The current stream of the thread that waits
for a receive brings it to the device. Only two ranks call, so nothing collective is made for it.
Thread rule: one thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zcomm.comm.cuda_streams import Streams


def copied_to_host(tensors: Sequence[torch.Tensor], streams: Streams) -> list[torch.Tensor]:
    """Return copies of the device's ``tensors`` on the host, which waits for its current stream."""
    return [streams.page_locked(tensor).copy_(tensor.detach()) for tensor in tensors]


class DeviceRecv:
    """Memory of the host that a message to the device's ``tensors`` arrives in."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Streams) -> None:
        self._targets = [tensor.detach() for tensor in tensors]
        self._streams = streams
        self._stream = streams.current()  # of the call
        self._before = streams.record()
        self.host = [streams.page_locked(target) for target in self._targets]

    def finish(self) -> None:
        """Copy what has arrived to the device, on the current stream."""
        self._streams.wait(self._before)  # the stream of the call may still use the tensors
        for target, host in zip(self._targets, self.host, strict=True):
            target.copy_(host, non_blocking=True)

    def finish_where_called(self) -> None:
        """Run finish() on the stream that was current at the call."""
        with self._streams.on(self._stream):
            self.finish()
