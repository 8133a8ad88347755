"""Changes inside GatheredParameters without modifier_rank: forgotten at its end, which is logged once.

A change in place increments the version counter of a parameter, and ``param.data = t`` changes its address. A change in
place of ``param.data`` does neither, so a sum of the bits is compared, too: 8 bytes at a time, in every tier. It misses
a permutation of such pieces. The checks are local. They stop after a step inside the context and, unless ``always``,
after the first report.
"""

from __future__ import annotations

import logging

import torch

from zcomm.zero.parts import Parts

_reported: list[str] = []  # the parameters that this process has named


class ForgottenChanges:
    """The state of parameters when a context began. always: watch them also after a report."""

    def __init__(self, always: bool = False) -> None:
        self._always = always
        self._kept: list[tuple[Parts, int, tuple[int, int, int], int]] = []
        self._made: list[tuple[torch.Tensor, int]] = []
        self._whole: list[tuple[Parts, str, torch.Tensor, tuple[int, int, int], int]] = []

    def watch(self, parts: Parts, index: int) -> None:
        """Begin to watch a parameter, unless a context around this one has opened it."""
        if (self._always or not _reported) and parts.store.hold_count(index) <= 1:
            self._kept.append((parts, index, _state(parts.store.parameter(index)), parts.store.changes))

    def watch_whole(self, parts: Parts, name: str, param: torch.Tensor) -> None:
        """Begin to watch a parameter of the model that the store does not have."""
        self._whole.append((parts, name, param, _state(param), parts.store.changes))

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
        for parts, index, then, changes in self._kept:  # a step, or a nested context, may have changed the weights
            if parts.store.changes == changes and _state(parts.store.parameter(index)) != then:
                return parts.names[index]
        for parts, name, param, then, changes in self._whole:
            if parts.store.changes == changes and _state(param) != then:
                return name
        for made, before in self._made:
            if _sum_of_bits(made) != before:
                return f"a parameter of shape {tuple(made.shape)}"
        return ""


def _state(param: torch.Tensor) -> tuple[int, int, int]:
    return param._version, param.data_ptr(), _sum_of_bits(param)


def _sum_of_bits(param: torch.Tensor) -> int:
    data = param.data.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    whole = data.numel() // 8 * 8 if data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0 else 0
    return int(data[:whole].view(torch.int64).sum()) + int(data[whole:].sum(dtype=torch.int64))
