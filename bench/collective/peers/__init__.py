"""Other libraries that are timed beside zcomm, in the same processes. Each is absent with a reason, or a Peer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from collective.operations import Operation

NAMES = ("gloo", "openmpi", "mpich", "deepspeed-shm", "torch", "nccl")
"""nccl: torch.distributed's, on CUDA tensors (--backend cuda_ipc or nccl).
torch: not a peer but torch.distributed's call with backend "zcomm", that is, what a PyTorch program pays."""


class Absent(Exception):
    """Error: the peer is not in this machine or this build; the text has the reason."""


class Peer(Protocol):
    def call(self, operation: Operation, redop: str, inp: Tensor, out: Tensor) -> Callable[[], object] | None:
        """Return the operation on these buffers (in == out where it works in place).

        None: the peer has no such operation.
        """

    def close(self) -> None: ...


def open_peer(name: str, rank: int, world: int) -> Peer:
    """Open a peer. Collective. Raises: Absent."""
    if name in ("openmpi", "mpich"):
        from collective.peers.mpi import MpiPeer

        return MpiPeer(name, world)
    if name == "deepspeed-shm":
        from collective.peers.deepspeed_shm import DeepSpeedPeer

        return DeepSpeedPeer(rank, world)
    from collective.peers.torch_distributed import TorchPeer

    return TorchPeer("zcomm" if name == "torch" else name, rank, world)
