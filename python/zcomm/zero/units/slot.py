"""Slots: memory that units of stage 3 are gathered into, one at a time.

A slot is filled at addresses of its own. A second mapping of its pages is placed at its unit's addresses. If the system
can move mappings, the second mapping is kept aside while no unit is whole in the slot. Moving a mapping takes
microseconds; creating one costs work for each page.
Invariant: also after an interrupt of ``map`` or ``unmap``, ``unmap`` leaves nothing mapped, and ``map`` the slot.
Thread rule: ``map`` and ``unmap`` on the main thread; ``flat`` on any.
"""

from __future__ import annotations

import enum
from typing import Any

import torch

from zcomm import _core
from zcomm.comm.tensors import tensor_of


class _Mapping(enum.Enum):
    """Place of the second mapping."""

    ASIDE = "kept for the next unit"
    MAPPED = "behind a unit's addresses"
    UNKNOWN = "there is none yet, or it was on its way"


class Slot:
    """A slot: the bytes [begin, begin + nbytes) of ``memory``, which is shared memory. Both are multiples of the page
    size."""

    def __init__(self, memory: Any, begin: int, nbytes: int) -> None:
        self._memory = memory
        self._begin = begin
        self._nbytes = nbytes
        self._mapping = _Mapping.UNKNOWN
        self._aside = _core.AddressRange(nbytes) if _core.moves_mappings() else None

    def flat(self, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the slot's first ``nbytes``, at its own addresses."""
        return tensor_of(self._memory, torch.uint8)[self._begin : self._begin + nbytes].view(dtype)

    def map(self, addresses: _core.AddressRange, offset: int) -> None:
        """Map the whole slot at ``offset``."""
        if self._aside is None:
            self._map(addresses, offset)
            return
        if self._mapping is not _Mapping.ASIDE:
            self._map(self._aside, 0)
        self._mapping = _Mapping.UNKNOWN
        addresses.take(offset, self._aside, 0, self._nbytes)
        self._mapping = _Mapping.MAPPED

    def unmap(self, addresses: _core.AddressRange, offset: int) -> None:
        """Unmap the slot at ``offset``."""
        if self._aside is None or self._mapping is not _Mapping.MAPPED:
            addresses.unmap(offset, self._nbytes)
            return
        self._mapping = _Mapping.UNKNOWN
        self._aside.take(0, addresses, offset, self._nbytes)
        self._mapping = _Mapping.ASIDE

    def forget(self, addresses: _core.AddressRange, offset: int) -> None:
        """Unmap the pages at ``offset``, in any state that an interrupt left."""
        self._mapping = _Mapping.UNKNOWN
        addresses.unmap(offset, self._nbytes)

    def _map(self, addresses: _core.AddressRange, offset: int) -> None:
        addresses.alias(offset, self._memory, self._begin, self._nbytes)
