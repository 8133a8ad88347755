"""send and recv of CUDA tensors, by way of the host: over the group's communicator there.

Only two ranks need to call, so no communicator between the devices is made for it. A message comes after what the
current stream of the call has been given. It is in the receiver's tensor when the work has ended, on whatever stream.
Thread rule: as the group's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from zcomm.torch_backend._staging import checked


def taken_home(tensors: Sequence[torch.Tensor], streams: Any) -> list[torch.Tensor]:
    """Copies in page-locked host memory. The host waits for the current stream. streams: of the device.

    Raises: ValueError for tensors on several devices.
    """
    dense = _on_one_device("send", tensors, streams.device)
    return [streams.page_locked(tensor).copy_(tensor) for tensor in dense]


class Landing:
    """Page-locked host memory that a message to a device arrives in. Arguments and errors: as taken_home."""

    def __init__(self, tensors: Sequence[torch.Tensor], streams: Any) -> None:
        self._targets = _on_one_device("recv", tensors, streams.device)
        self.host = [streams.page_locked(target) for target in self._targets]
        self._before = streams.record()

    def finish(self) -> None:
        """Bring it to the device; the host waits for that."""
        self._before.synchronize()  # the stream of the call may still use the tensors
        for target, host in zip(self._targets, self.host, strict=True):
            target.copy_(host)


def _on_one_device(what: str, tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    for tensor in tensors:
        if tensor.device != device:
            raise ValueError(f"{what}: a tensor is on {tensor.device}, others are on {device}")
    return [checked(what, tensor).detach() for tensor in tensors]
