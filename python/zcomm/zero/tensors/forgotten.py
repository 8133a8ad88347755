"""Changes inside GatheredParameters without modifier_rank: forgotten at its end, which is logged once.

A change in place increments the version counter of a parameter, and ``param.data = t`` changes its address. A change in
place of ``param.data`` does neither. So weights in host memory are also compared with this rank's part of the store.
That reads them once, in stage 3 by units 1/N of them. Values before ZeroOptimizer have no shards, so a sum of their
bits is compared. The checks are local. They stop after the first report, and after a step inside the context.
"""

from __future__ import annotations

import logging

import torch

from zcomm.zero.parts import Parts
from zcomm.zero.tensors.shard_io import pieces

_reported: list[str] = []  # the parameters that this process has named
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ForgottenChanges:
    """The state of parameters when a context began. always: watch them also after a report."""

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._sharded: list[tuple[Parts, int, tuple[int, int], int | None, int]] = []
        self._made: list[tuple[torch.Tensor, int]] = []

    def watch(self, parts: Parts, index: int) -> None:
        """Begin to watch an open parameter, unless a context around this one has opened it."""
        holds = parts.store.hold_count(index)
        if (self._always or not _reported) and holds <= 1:
            param = parts.store.parameter(index)
            bits = _sum_of_bits(param) if self._always and holds else None
            self._sharded.append((parts, index, (param._version, param.data_ptr()), bits, parts.store.changes))

    def watch_made(self, param: torch.Tensor) -> None:
        """Begin to watch a parameter of zero.Init that no ZeroOptimizer has."""
        if not _reported:
            self._made.append((param, _sum_of_bits(param)))

    def report(self) -> None:
        """Log a warning that names the first parameter that has changed."""
        name = "" if _reported else self.first()
        if name:
            _reported.append(name)
            logging.getLogger("zcomm").warning(
                "GatheredParameters: changes of %s inside of the context are forgotten at its end, because "
                "modifier_rank is None: give the rank that has the new values, GatheredParameters(..., "
                "modifier_rank=0). This is logged once",
                name,
            )

    def first(self) -> str:
        """Return the name of the first parameter that has changed, or ""."""
        for parts, index, then, bits, changes in self._sharded:
            if parts.store.changes != changes:
                continue  # a step, or a nested context, has changed the shards
            param = parts.store.parameter(index)
            if (param._version, param.data_ptr()) != then or _differs(parts, index):
                return parts.names[index]
            if bits is not None and _sum_of_bits(param) != bits:
                return parts.names[index]
        for made, before in self._made:
            if _sum_of_bits(made) != before:
                return f"a parameter of shape {tuple(made.shape)}"
        return ""


def _differs(parts: Parts, index: int) -> bool:
    """Return True if a weight in host memory differs in any bit from this rank's part in the store."""
    data, kept = parts.store.parameter(index).data, parts.store.kept(index)
    if data.shape != parts.geometry.places[index].shape or data.dtype != parts.state.form.dtype:
        return True
    if not data.is_cpu or parts.store.tier_of(parts.geometry.bucket_of(index)) == "nvme":
        return False
    flat = data.reshape(-1)
    if kept is not None:
        return not torch.equal(_bits(kept.reshape(-1)), _bits(flat))
    return any(
        not torch.equal(_bits(parts.store.read(piece.bucket)[piece.tile][piece.inside]), _bits(flat[piece.flat]))
        for piece in pieces(parts, index)
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(_INTEGERS[tensor.itemsize])


def _sum_of_bits(param: torch.Tensor) -> int:
    data = param.data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8 if data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 else 0
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum(dtype=torch.int64))
