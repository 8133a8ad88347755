"""Slots of stage 3: mapped at a unit's addresses and unmapped again, despite interrupts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zcomm
from zcomm import _core
from zcomm.comm.tensors import tensor_of
from zcomm.zero.units.slot import Slot

PAGE = _core.page_nbytes()
NBYTES = 3 * PAGE
OFFSETS = (0, _core.table_nbytes())


@pytest.fixture(params=["moved", "mapped anew"])
def slot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slot]:
    """Provide the second slot of a memory with two."""
    if request.param == "mapped anew":
        monkeypatch.setattr(_core, "moves_mappings", lambda: False)
    elif not _core.moves_mappings():
        pytest.skip("Linux before 5.13")
    comm = zcomm.init()
    yield Slot(comm._core.allocate(2 * NBYTES), NBYTES, NBYTES)
    zcomm.shutdown()


@pytest.fixture
def addresses() -> _core.AddressRange:
    """Return the addresses of two units."""
    return _core.AddressRange(2 * _core.table_nbytes())


def is_behind(slot: Slot, addresses: _core.AddressRange, offset: int) -> bool:
    there, here = tensor_of(addresses.memory(offset, NBYTES), torch.uint8), slot.flat(NBYTES, torch.uint8)
    here[::PAGE] += 1
    there[1::PAGE] += 3
    return torch.equal(there, here)


def is_mapped(addresses: _core.AddressRange, offset: int) -> bool:
    """Return whether its pages can be read."""
    start = tensor_of(addresses.memory(offset, NBYTES), torch.uint8).data_ptr()
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, rights = line.split()[:2]
            low, high = (int(word, 16) for word in span.split("-"))
            if low < start + NBYTES and start < high and rights.startswith("r"):
                return True
    return False


def test_shown_and_hidden(slot: Slot, addresses: _core.AddressRange) -> None:
    for offset in (*OFFSETS, *OFFSETS):
        assert not is_mapped(addresses, offset)
        slot.map(addresses, offset)
        assert is_behind(slot, addresses, offset)
        slot.unmap(addresses, offset)
    slot.unmap(addresses, OFFSETS[0])  # again
    assert not any(is_mapped(addresses, offset) for offset in OFFSETS)
    slot.map(addresses, OFFSETS[1])
    assert is_behind(slot, addresses, OFFSETS[1])


class Breaking:
    """Addresses with a move that is interrupted before it or after it."""

    def __init__(self, plain: Any, after: bool) -> None:
        self._plain = plain
        self._after = after

    def take(self, offset: int, source: Any, *rest: int) -> None:
        if self._after:
            self._plain.take(offset, source, *rest)
        raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


@pytest.mark.parametrize("slot", ["moved"], indirect=True)
@pytest.mark.parametrize("after", [False, True])
def test_interrupts(slot: Slot, addresses: _core.AddressRange, after: bool) -> None:
    one, other = OFFSETS
    with pytest.raises(KeyboardInterrupt):
        slot.map(Breaking(addresses, after), one)  # type: ignore[arg-type]
    slot.unmap(addresses, one)
    assert not is_mapped(addresses, one)
    slot.map(addresses, other)
    assert is_behind(slot, addresses, other)

    plain, slot._aside = slot._aside, Breaking(slot._aside, after)  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        slot.unmap(addresses, other)
    slot._aside = plain
    slot.unmap(addresses, other)
    assert not is_mapped(addresses, other)
    slot.map(addresses, one)
    assert is_behind(slot, addresses, one)
