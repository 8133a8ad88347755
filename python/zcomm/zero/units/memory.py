"""UnitPool: where units of stage 3 are whole, which of them has memory, and how that is filled.

The store is given one at assembly: ``host`` (slots of host memory) or ``device`` (slots on a device). UnitManager
decides when a unit is gathered and dropped.
Thread rule: as UnitManager.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from zcomm import _core
from zcomm.comm.communicator import Communicator
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.unit_choice import UnitChoice
from zcomm.zero.rows.reader import RowReader, RowWeight, Stretch
from zcomm.zero.sharded.address_checks import AddressChecks
from zcomm.zero.units.unit import Unit

_IN_STEP = (
    "stage 3 by units: all ranks must run the same modules in the same order; code that differs between ranks "
    "(generate(), evaluation) goes inside of zcomm.zero.GatheredParameters(model), and experts into one unit "
    "(zero.Units(leaf=), set_z3_leaf_modules()); reads of whole weights (state_dict(), p.norm()) run on all ranks"
)


def add_remedy(error: BaseException) -> None:
    """Say in an error of a gather what ranks must do alike. That of a rank that died stays as it is."""
    left = isinstance(error, _core.PeerLost) and " left " in str(error)
    if left or isinstance(error, (_core.CollectiveMismatch, TimeoutError)):
        error.args = (f"{error}; {_IN_STEP}",)


def make_units(choices: Sequence[UnitChoice], geometry: Geometry, itemsize: int) -> list[Unit]:
    """Return the units of a model, with weights of ``itemsize`` bytes."""
    units = []
    for index, choice in enumerate(choices):
        buckets = [geometry.every[bucket] for bucket in geometry.unit_buckets[index]]
        units.append(Unit(index, choice, buckets, sum(bucket.count for bucket in buckets) * itemsize))
    return units


@dataclass(frozen=True)
class UnitPlan:
    """The units of a model. choices: in the numbering of ``geometry.unit_buckets``; unit 0 is the root.

    dtype: of the weights. prefetch: units gathered ahead, or prefetch_nbytes: their bytes.
    """

    params: Sequence[nn.Parameter]
    geometry: Geometry
    comm: Communicator
    dtype: torch.dtype
    choices: Sequence[UnitChoice]
    prefetch: int
    prefetch_nbytes: int | None

    def make_units(self) -> list[Unit]:
        return make_units(self.choices, self.geometry, self.dtype.itemsize)

    def make_views(self, unit: Unit, flat: torch.Tensor) -> None:
        """Let the unit's parameters be views of ``flat``."""
        unit.span = (flat.data_ptr(), flat.data_ptr() + unit.nbytes)
        unit.views = [
            (self.params[param], self.geometry.view(flat[begin:], param))
            for bucket, begin in unit.bucket_begins()
            for param in bucket.params
            if bucket.index == self.geometry.places[param].bucket  # one in blocks is never whole there
        ]

    def row_weights(self, units: Sequence[Unit]) -> list[RowWeight]:
        """Return the weights of ``units`` that are gathered by rows."""
        found = []
        for unit in units:
            if unit.by_rows:
                (index,) = unit.buckets[0].params
                stretches = [
                    Stretch(
                        self.geometry.every[span.bucket], span.begin, span.begin + span.count, span.offset - span.begin
                    )
                    for span in self.geometry.spans(index)
                ]
                shape = self.geometry.places[index].shape
                found.append(RowWeight(self.params[index], index, unit.index, unit.name, shape, stretches))
        return found


class UnitOwner(Protocol):
    """The methods of UnitManager that a memory calls."""

    in_use: Unit | None  # prefetch must not take its memory

    @property
    def coming(self) -> Sequence[int]:
        """Numbers of the units that the pass will use next, as far as that is known."""

    def drop(self, unit: Unit) -> None:
        """Change GATHERED -> SHARDED."""

    def join(self, unit: Unit) -> None:
        """Wait for ``unit.gathering``."""


class UnitPool(ABC):
    """Memory for ``units``. owner: set by UnitManager. rows: memory of weights that are gathered by rows.

    editing: the program has changed weights since the last gather. home: tier of shards that are not offloaded.
    """

    owner: UnitOwner
    rows: RowReader
    units: list[Unit]
    device: torch.device
    home = "device"
    on_device = False
    editing = False
    address_checks: AddressChecks | None = None  # None: in host memory, where bytes are compared at once

    @abstractmethod
    def take(self, unit: Unit, must: bool) -> bool:
        """Give the unit memory; return False if all that it could have is in use. must: a prefetched unit, not yet
        used, gives way."""

    @abstractmethod
    def add(self, unit: Unit) -> None:
        """Add memory for the unit, as all that it could have is in use. Collective where ranks share it."""

    @abstractmethod
    def fill(self, unit: Unit) -> None:
        """Start to bring the unit into its memory."""

    @abstractmethod
    def wait(self, unit: Unit) -> None:
        """Wait until ``fill`` is done; on a device torch's stream waits for copies."""

    def is_waiting(self) -> bool:
        """Return True if ``close`` would wait for other ranks."""
        return False

    def give_up(self) -> None:  # noqa: B027
        """Leave the other ranks: what they were to bring does not come."""

    @abstractmethod
    def map(self, unit: Unit) -> None:
        """Put the unit's memory, which has been filled, behind its addresses."""

    @abstractmethod
    def give_back(self, unit: Unit) -> None:
        """Change GATHERED, or GATHERING -> SHARDED: the unit's memory is free for others."""

    @abstractmethod
    def reset(self, unit: Unit) -> None:
        """Give up all memory that the unit has, whatever an interrupt has left."""

    @abstractmethod
    def count_free(self) -> None:
        """Find the memory that no unit has, after ``reset``."""

    @property
    @abstractmethod
    def gives_way(self) -> bool:
        """Return True if a unit may lose its memory to another one within a step."""

    @property
    @abstractmethod
    def slot_nbytes(self) -> int:
        """Bytes for whole units that count for this rank."""

    @property
    def window_nbytes(self) -> int:
        """Bytes of host memory that units of a device come by."""
        return 0

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for other ranks, beside those in ``join``."""
        return 0.0

    @property
    def allocation_count(self) -> int:
        """Allocations ever made by a communicator of its own."""
        return 0

    # Hooks for a device; on the CPU nothing is on its way, and a unit's addresses are always its own.

    def slot_of(self, unit: Unit) -> object:
        """Return where views that autograd saves now will look for the unit's parameters; None: always the same."""
        return None

    def return_to(self, unit: Unit, slot: object) -> None:  # noqa: B027
        """Let the next gather bring the unit to ``slot``, from ``slot_of``: backward is about to use such views."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait until no copy of weights is on its way."""

    def begin_edit(self) -> None:  # noqa: B027
        """Prepare for a change of weights between passes, which other ranks may still read."""

    def end_edits(self) -> None:  # noqa: B027
        """Let other ranks read what was changed. Collective where weights were changed."""

    def publish(self) -> None:  # noqa: B027
        """Let other ranks read the weights after a step. Collective."""

    def end_step(self) -> None:  # noqa: B027
        """All units are SHARDED, and no graph is alive that has views of them."""

    @abstractmethod
    def close(self) -> None: ...
