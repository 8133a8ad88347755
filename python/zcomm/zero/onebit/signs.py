"""average_signs: the ranks' average of tensors that travel with one bit per element, with error feedback.

[Note: signs] Two encodings. Each rank adds its error to its tensor, and encodes it in world_size parts. Rank r receives
part r of every rank and averages the decoded parts in rank order. It adds the error of its own part, and encodes that
again for all ranks. So all ranks decode the same bits. Both errors are added to the next tensors: nothing is lost. An
encoded part is signs and one scale, the root mean square (include/zcomm/codec.hpp). Bytes sent per rank: 1/32 of an
all_reduce of fp32.
Source: Tang et al. (arXiv:2102.02888), section 4.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from zcomm import _core
from zcomm.comm.communicator import Communicator

_SIGN = _core.Codec(_core.CodecKind.sign, 1)
_ALIGN = 64  # elements between the beginnings of parts, bytes between encoded parts


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

    def mask_from(self, begin: int) -> int:
        """Return the address of the mask from element ``begin`` on."""
        return 0 if self.mask is None else self.mask.data_ptr() + begin // 8


def part_of(count: int, rank: int, world_size: int) -> slice:
    """Return the elements of a tensor of ``count`` that rank ``rank`` averages: the last ranks may have fewer."""
    size = -(-count // (world_size * _ALIGN)) * _ALIGN
    return slice(min(rank * size, count), min((rank + 1) * size, count))


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Return a flat bool mask as bits, uint8."""
    bits = torch.nn.functional.pad(mask.to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def average_signs(comm: Communicator, tensors: Sequence[Signed], name: str) -> int:
    """Replace the values of ``tensors`` by the ranks' averages. Collective: tensors of the same counts on each rank.

    Returns: the bytes of the encoded tensors, once for each encoding.
    """
    ranks, own = comm.world_size, comm.rank
    parts = [[part_of(t.value.numel(), rank, ranks) for rank in range(ranks)] for t in tensors]
    sizes = [[_SIGN.encoded_nbytes(part.stop - part.start) for part in each] for each in parts]
    sent = [_encoded_room(sum(size[rank] for size in sizes)) for rank in range(ranks)]
    for rank in range(ranks):
        at = sent[rank].data_ptr()
        for tensor, part, size in zip(tensors, parts, sizes, strict=True):
            _encode(tensor.value[part[rank]], tensor.worker[part[rank]], tensor.mask_from(part[rank].start), at)
            at += size[rank]
    received = [_encoded_room(sent[own].numel()) for _ in range(ranks)]
    if ranks > 1:
        comm.all_to_all(received, sent, name=f"{name}: signs of ranks")
    else:
        received = sent
    block = max(sum(size[rank] for size in sizes) for rank in range(ranks))
    whole = _encoded_room(block * ranks)
    at = 0
    for tensor, part, size in zip(tensors, parts, sizes, strict=True):
        mean, mask = tensor.value[part[own]], tensor.mask_from(part[own].start)
        if mean.numel():
            inputs = [each.data_ptr() + at for each in received]
            _core.decode(_SIGN, mean.data_ptr(), inputs, mean.numel(), divide_by=float(ranks), mask=mask)
            _encode(mean, tensor.server, mask, whole.data_ptr() + own * block + at)
        at += size[own]
    if ranks > 1:
        comm.all_gather(whole[own * block : (own + 1) * block], out=whole, name=f"{name}: signs of the average")
    for rank in range(ranks):
        at = whole.data_ptr() + rank * block
        for tensor, part, size in zip(tensors, parts, sizes, strict=True):
            out = tensor.value[part[rank]]
            if out.numel():
                _core.decode(_SIGN, out.data_ptr(), [at], out.numel(), mask=tensor.mask_from(part[rank].start))
            at += size[rank]
    return sum(map(sum, sizes)) + whole.numel()


def _encode(value: torch.Tensor, error: torch.Tensor, mask: int, out: int) -> None:
    if value.numel():
        f32 = _core.DType.float32
        _core.encode(_SIGN, out, value.data_ptr(), f32, value.numel(), error.data_ptr(), f32, mask=mask)


def _encoded_room(nbytes: int) -> torch.Tensor:
    """Return zeros at an aligned address."""
    room = torch.zeros(nbytes + _ALIGN, dtype=torch.uint8)
    begin = -room.data_ptr() % _ALIGN
    return room[begin : begin + nbytes]
