"""Checks of weights in use on a device with addresses that the program knows, because writes to them would be lost.

Kernels on torch's stream compute a checksum when the program asks for an address, and another when the use of the
weight ends. The host compares them at the next step or look, because it must not wait for the device in forward. A
change can no longer be kept then, so it raises.
Thread rule: as UnitManager.
"""

from __future__ import annotations

import torch

from zcomm import _core
from zcomm.memory.device_streams import DeviceLane
from zcomm.zero.format_names import format_names

PAIRS = 4096  # begun or not compared yet


class AddressChecks:
    """Pairs of checksums, of a weight at the beginning and at the end of a use. The class itself is of host memory, and
    compares a pair as it ends."""

    def begin(self, weight: torch.Tensor) -> int:
        """Begin a pair. Returns: its number, for ``end`` or ``forget``. Raises: as ``check``, if no pair is free."""
        return _core.crc32c(torch.Tensor.data_ptr(weight), weight.nbytes)

    def end(self, number: int, weight: torch.Tensor, name: str) -> bool:
        """End a pair: the use of ``weight`` is over. Returns: whether it is known to have been written to."""
        return number != self.begin(weight)

    def forget(self, number: int) -> None:
        """Drop a pair from ``begin``."""

    def check(self) -> None:
        """Compare the ended pairs. Waits for torch's stream if there are any.

        Raises: RuntimeError naming the weights that were written to.
        """


class DeviceChecks(AddressChecks):
    """Pairs of checksums of weights on a device, by number."""

    def __init__(self, lane: DeviceLane) -> None:
        self._lane = lane
        self._words: torch.Tensor | None = None  # made by the first use
        self._free = list(range(PAIRS))
        self._ended: dict[int, str] = {}  # names of the weights

    def begin(self, weight: torch.Tensor) -> int:
        if self._words is None:
            self._words = self._lane.empty(2 * PAIRS, torch.int64, "checksums of weights in use")
        if not self._free:
            self.check()
        number = self._free.pop()
        self._lane.current().fill(self._word(number), 0, 16)
        self._add(self._word(number), weight)
        return number

    def end(self, number: int, weight: torch.Tensor, name: str) -> bool:
        self._add(self._word(number) + 8, weight)
        self._ended[number] = name
        return False

    def forget(self, number: int) -> None:
        self._free.append(number)

    def check(self) -> None:
        if not self._ended or self._words is None:
            return
        words, ended = self._words.view(-1, 2).tolist(), self._ended
        self._ended = {}
        self._free.extend(ended)
        written = list(dict.fromkeys(name for number, name in ended.items() if words[number][0] != words[number][1]))
        if written:
            raise RuntimeError(
                f"{format_names(written)}: written to by address (data_ptr(), DLPack, a kernel) while the module ran: "
                "stage 3 by units on a device cannot keep that; change weights between passes, on all ranks"
            )

    def _word(self, number: int) -> int:
        assert self._words is not None
        return self._words.data_ptr() + 16 * number

    def _add(self, word: int, weight: torch.Tensor) -> None:
        _core.stream_checksum(self._lane.current(), word, torch.Tensor.data_ptr(weight), weight.nbytes)
