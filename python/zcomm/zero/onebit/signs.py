"""average_signs: the ranks' average of tensors that travel with one bit per element, with error feedback.

[Note: signs] It is ``all_reduce(codec="sign")``. Each rank adds its error to its tensor, and encodes it in world_size
parts. Rank r receives part r of every rank and averages the decoded parts in rank order. It adds the error of its own
part, and encodes that again for all ranks. So all ranks decode the same bits. Both errors are added to the next
tensors: nothing is lost. Bytes sent per rank: 1/32 of an all_reduce of fp32. A world of one sends and encodes nothing.
Source: Tang et al. (arXiv:2102.02888), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zcomm import _core
from zcomm.comm.codec import Codec
from zcomm.comm.communicator import Communicator

_SIGN = Codec("sign")


@dataclass(frozen=True)
class Signed:
    """A tensor that is averaged: flat ``value``, fp32 [count], replaced by the average.

    worker: error of the first encoding, fp32 [count]. server: of the second one, fp32 [elements of this rank's part].
    mask: None, or uint8 [count / 8]: bit k % 8 of byte k / 8 is 0 if element k counts as 0 and stays 0.
    """

    value: torch.Tensor
    worker: torch.Tensor
    server: torch.Tensor
    mask: torch.Tensor | None = None


def part_of(count: int, rank: int, world_size: int) -> slice:
    """Return the elements of a tensor of ``count`` that rank ``rank`` averages: the last ranks may have fewer."""
    begin, size = _core.all_reduce_part(count, rank, world_size)
    return slice(begin, begin + size)


def server_error(count: int, comm: Communicator) -> torch.Tensor:
    """Return zeros for ``Signed.server`` of a tensor of ``count`` elements."""
    part = part_of(count, comm.rank, comm.world_size)
    return torch.zeros(part.stop - part.start)


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Return a flat bool mask as bits, uint8."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def _unpacked(bits: torch.Tensor, count: int) -> torch.Tensor:
    found = (bits.view(-1, 1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return found.view(-1)[:count].bool()


def average_signs(comm: Communicator, tensors: Sequence[Signed], name: str) -> int:
    """Replace the values of ``tensors`` by the ranks' averages. Collective: tensors of the same counts on each rank.

    Returns: the bytes of the encoded tensors, once for each encoding.
    """
    if comm.world_size == 1:
        for each in tensors:
            if each.mask is not None:
                each.value.masked_fill_(~_unpacked(each.mask, each.value.numel()), 0.0)
        return 0
    error = [each.worker for each in tensors], [each.server for each in tensors]
    masks = None
    if any(each.mask is not None for each in tensors):  # then all have one
        masks = [_all(each.value.numel()) if each.mask is None else each.mask for each in tensors]
    comm.all_reduce([each.value for each in tensors], "avg", codec=_SIGN, error=error, mask=masks, name=name)
    every = range(comm.world_size)
    parts = (part_of(each.value.numel(), rank, comm.world_size) for each in tensors for rank in every)
    return 2 * sum(_SIGN.encoded_nbytes(part.stop - part.start) for part in parts)


def _all(count: int) -> torch.Tensor:
    return torch.full((-(-count // 8),), 255, dtype=torch.uint8)
