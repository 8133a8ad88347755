"""UnitPool: memory of gathered units of stage 3, its assignment to units, and its filling.

Assembly chooses one for the store: ``host`` (slots of host memory) or ``device`` (slots on a device). UnitManager
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
from zcomm.memory.device_streams import NO_PEERS, Peers
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.split_units import UnitChoice
from zcomm.zero.rows.reader import RowReader
from zcomm.zero.rows.weight import RowWeight, Stretch
from zcomm.zero.sharded.address_checks import AddressChecks
from zcomm.zero.units.unit import Unit

_IN_STEP = (
    "stage 3 by units: all ranks must run the same modules in the same order; code that differs between ranks "
    "(generate(), evaluation) goes inside of zcomm.zero.GatheredParameters(model), and experts into one unit "
    "(zero.Units(leaf=), set_z3_leaf_modules()); reads of whole weights (state_dict(), p.norm()) run on all ranks"
)


def add_remedy(error: BaseException) -> None:
    """Append to a gather's error that ranks must run the same modules. The error of a dead rank is unchanged."""
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

    dtype: of the weights. prefetch: units gathered ahead, or prefetch_nbytes: their bytes. host_ranks: ranks of the job
    on this host.
    """

    params: Sequence[nn.Parameter]
    geometry: Geometry
    comm: Communicator
    dtype: torch.dtype
    choices: Sequence[UnitChoice]
    prefetch: int
    prefetch_nbytes: int | None
    host_ranks: int = 1

    def make_units(self) -> list[Unit]:
        return make_units(self.choices, self.geometry, self.dtype.itemsize)

    def make_views(self, unit: Unit, flat: torch.Tensor) -> None:
        """Let the unit's parameters be views of ``flat``."""
        unit.span = (flat.data_ptr(), flat.data_ptr() + unit.nbytes)
        unit.views = [
            (self.params[param], self.geometry.view(flat[begin:], param))
            for bucket, begin in unit.bucket_begins()
            for param in bucket.params
            if bucket.index == self.geometry.places[param].bucket  # a parameter in blocks is never whole
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
        """Numbers of the units that the pass is expected to use next; empty if unknown."""

    def drop(self, unit: Unit) -> None:
        """Change GATHERED -> SHARDED."""

    def join(self, unit: Unit) -> None:
        """Wait for ``unit.gathering``."""


class UnitPool(ABC):
    """Memory for ``units``. owner: set by UnitManager. rows: memory of weights that are gathered by rows.

    editing: the program has changed weights since the last gather. home: tier of shards without offload.
    """

    owner: UnitOwner
    rows: RowReader
    units: list[Unit]
    device: torch.device
    home = "device"
    on_device = False
    copies_whole = False  # whether units are copied to a device from host memory that has them whole
    editing = False
    address_checks = AddressChecks()
    peers: Peers = NO_PEERS  # between the ranks' devices, if units are gathered by it

    @abstractmethod
    def take(self, unit: Unit, must: bool) -> bool:
        """Assign memory to the unit; return False if all memory for it is in use. must: evict a prefetched unit that
        is not used yet, if necessary."""

    @abstractmethod
    def add(self, unit: Unit) -> None:
        """Add memory for the unit, because all memory for it is in use. Collective if ranks share memory."""

    @abstractmethod
    def fill(self, unit: Unit) -> None:
        """Start to gather the unit into its memory."""

    @abstractmethod
    def wait(self, unit: Unit) -> None:
        """Wait until ``fill`` is done; on a device torch's stream waits for copies."""

    def is_waiting(self) -> bool:
        """Return True if ``close`` would wait for other ranks."""
        return False

    def give_up(self) -> None:  # noqa: B027
        """Leave the other ranks: their shards will not arrive."""

    @abstractmethod
    def map(self, unit: Unit) -> None:
        """Map the unit's filled memory behind its addresses."""

    @abstractmethod
    def give_back(self, unit: Unit) -> None:
        """Change GATHERED, or GATHERING -> SHARDED: the unit's memory is free for other units."""

    @abstractmethod
    def reset(self, unit: Unit) -> None:
        """Release all memory of the unit, in any state that an interrupt left."""

    @abstractmethod
    def count_free(self) -> None:
        """Find the memory that no unit holds, after ``reset``."""

    @property
    @abstractmethod
    def gives_way(self) -> bool:
        """Return True if a unit may lose its memory to another one within a step."""

    @property
    @abstractmethod
    def slot_nbytes(self) -> int:
        """Bytes for whole units that are accounted to this rank."""

    @property
    def window_nbytes(self) -> int:
        """Bytes of host memory that copies of units to a device pass through."""
        return 0

    @property
    def waited_s(self) -> float:
        """Seconds of waiting for other ranks, without the seconds in ``join``."""
        return 0.0

    @property
    def allocation_count(self) -> int:
        """Allocations ever made by a communicator of its own."""
        return 0

    # Hooks for a device; on the CPU no copy is pending, and a unit's addresses never change.

    def slot_of(self, unit: Unit) -> object:
        """Return the slot that views saved by autograd from now on refer to; None: the addresses never change."""
        return None

    def return_to(self, unit: Unit, slot: object) -> None:  # noqa: B027
        """Let the next gather fill ``slot``, from ``slot_of``, because backward is about to use such views."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait until no copy of weights is pending."""

    def wait_copied(self, unit: Unit) -> None:  # noqa: B027
        """Wait until no copy of the unit's shards of this rank is pending."""

    def begin_edit(self) -> None:  # noqa: B027
        """Prepare for a change of weights between passes, which other ranks may still read."""

    def end_edits(self) -> None:  # noqa: B027
        """Let other ranks read changed weights. Collective if weights were changed."""

    def publish(self) -> None:  # noqa: B027
        """Let other ranks read the weights after a step. Collective."""

    def end_step(self) -> None:  # noqa: B027
        """End the step: all units are SHARDED, and no live graph has views of them."""

    @abstractmethod
    def close(self) -> None: ...
