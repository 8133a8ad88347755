"""StepOptions: comparison of the options of a step, which a program may have changed on some ranks only.

Each rank updates the elements that it owns by its own options, so different ones would mix without a sign. A rank's
word in the norm's message is a multiple of the digest of its options. The words of all ranks add up to 0 if the digests
are equal. So every rank finds a difference in the same message, without another collective.
"""

from __future__ import annotations

import hashlib
import marshal
import re
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.agree import all_values

UPDATED = "; weights were updated by these options, so load a checkpoint (opt.load) on all ranks, or start again"
_SHOWN = 4


class StepOptions:
    """The options of one optimizer's steps. names, values: list them, in an order that is the same on all ranks.

    refusal: the error of this rank's options, which the other ranks do not know yet.
    """

    def __init__(self, comm: Communicator, names: Callable[[], list[str]], values: Callable[[], list[Any]]) -> None:
        self._comm, self._names, self._values = comm, names, values
        self.refusal: Exception | None = None

    def digest(self) -> int:
        """Compute 48 bits of the options and the refusal. Cost: about 0.3 us per option.

        A rank that refuses adds its number: otherwise equal refusals of all ranks would look like none.
        """
        every = [*self._values(), self._refused(), self._comm.rank if self.refusal is not None else None]
        try:
            data = marshal.dumps(every, 2)  # in this version equal values are equal bytes
        except ValueError:  # a tensor, or another object
            data = marshal.dumps(plain_value(every), 2)
        return int.from_bytes(hashlib.blake2b(data, digest_size=6).digest(), "little")

    def word(self) -> int:
        """Return this rank's term of a sum over the ranks, which is 0 if all digests are equal."""
        ranks = self._comm.world_size
        if ranks == 1:
            return 0
        return self.digest() * (ranks - 1 if self._comm.rank == 0 else -1)

    def raise_difference(self, more: str = "") -> None:
        """Raise if the ranks have different options. Collective.

        more: added to the text. Raises: ValueError naming options, values and ranks. If the options are equal and some
        ranks refuse theirs: on these their own error, on the others a RuntimeError that names the rank.
        """
        own = dict(zip(self._names(), plain_value(self._values()), strict=True))
        found = all_values(self._comm, [own, self._refused()], "options of a step")
        differences = _differences([options for options, _ in found])
        if differences:
            rest = len(differences) - _SHOWN
            text = ", ".join(differences[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
            raise ValueError(
                f"step(): {text}: the ranks would update their elements by different options, so set the same value "
                "on all ranks (a schedule that follows the loss needs its mean over the ranks: zcomm.all_reduce(loss, "
                f"'avg')){more}"
            ) from self.refusal
        if self.refusal is not None:
            raise self.refusal
        for rank, (_, refused) in enumerate(found):
            if refused:
                raise RuntimeError(f"step() failed on rank {rank}: {refused}{more}")

    def _refused(self) -> str:
        return "" if self.refusal is None else f"{type(self.refusal).__name__}: {self.refusal}"


def plain_value(value: Any) -> Any:
    """Return numbers, texts and lists of them for a value that was made alike on the ranks."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, (tuple, list)):
        return [plain_value(each) for each in value]
    return float(value) if isinstance(value, Real) else plain_text(value)


def plain_text(value: Any) -> str:
    """Return text that is equal on ranks that made the same value: without addresses, and sets in order (hashes of
    strings differ between processes)."""
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(plain_text, value))) + "}"
    return re.sub(r"(?: object)? at 0x[0-9a-fA-F]+", "", str(value))


def _differences(options: Sequence[dict[str, Any]]) -> list[str]:
    """Describe differences, such as "lr of group 0 is 0.1 on rank 0 and 1.0 on rank 1"."""
    found = []
    for name in dict.fromkeys(name for each in options for name in each):
        ranks: list[tuple[Any, list[int]]] = []  # of each value
        for rank, each in enumerate(options):
            value = each.get(name)
            same = next((numbers for other, numbers in ranks if other == value or repr(other) == repr(value)), None)
            if same is None:
                ranks.append((value, [rank]))
            else:
                same.append(rank)
        if len(ranks) > 1:
            found.append(f"{name} is " + " and ".join(f"{value} on {_ranks(numbers)}" for value, numbers in ranks))
    return found


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (", ..." if len(numbers) > _SHOWN else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
