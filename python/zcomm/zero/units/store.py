"""UnitStore: the parameter store of stage 3 by units: parameters live as shards in a source.

UnitManager (life.py) decides when a unit is whole; UnitPool (memory.py) holds its memory.
Thread rule: methods on the main thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import psutil
import torch

from zcomm.memory.device_streams import Peers
from zcomm.zero.layout.flat import WHOLE_SHARD, FlatBucket
from zcomm.zero.params.device_shards import DeviceShards
from zcomm.zero.params.stores import ParameterStore, StoreForm
from zcomm.zero.sharded.closed import ClosedShards
from zcomm.zero.sharded.source import Act
from zcomm.zero.units.gather import ShardGather
from zcomm.zero.units.life import UnitManager
from zcomm.zero.units.memory import UnitPlan, UnitPool
from zcomm.zero.units.row_weights import RowWeights
from zcomm.zero.units.unit import Unit
from zcomm.zero.units.weights import UnitWeights
from zcomm.zero.update_hooks import UpdateHooks

ROOM = 0.8  # of free memory that weights may take in close()
_CPU = torch.device("cpu")


class UnitStore(ParameterStore):
    """Sharded parameters, gathered unit by unit. tiers: tier of each bucket's shard.

    on_device: numbers of the buckets with weights, gradients and state only on the devices. shards: weights that are
    resident on the device; empty: all are on the host.
    """

    def __init__(
        self,
        plan: UnitPlan,
        tiers: Sequence[str],
        gather: ShardGather,
        memory: UnitPool,
        updates: UpdateHooks,
        on_device: Collection[int] = (),
        shards: Sequence[DeviceShards] = (),
    ) -> None:
        super().__init__(StoreForm(plan.params, plan.geometry, plan.comm, plan.dtype, tiers))
        self._host_ranks = plan.host_ranks
        self.on_device = frozenset(on_device)
        self._on_device = shards
        self.gather, self.source, self.memory = gather, gather.source, memory
        self._updates = updates
        self.weights = UnitWeights(self, plan.params, [place.shape for place in plan.geometry.places])
        self.life = UnitManager(plan, memory, gather, self.weights, updates)
        self.units = self.life.units
        self.weights.row_weights = RowWeights(memory, self.weights, updates, self.alone)

    def open(self, names: Sequence[str], edit: Callable[[int, Act], None], read: Callable[[int], torch.Tensor]) -> None:
        """Set the names of the parameters, and the ways to this rank's elements. edit: see UnitWeights. read: returns
        an exact weight, whole; collective."""
        self.weights.open(names, edit)
        self._read = read

    def start_thread(self) -> None:
        """Start the gathering thread now, so that an interrupt cannot hit its start later."""
        self.gather.submit(int).result()

    # --- memory -----------------------------------------------------------------------------------------------

    def _kept(self, bucket: FlatBucket) -> int:
        return bucket.shard_count

    @property
    def nbytes_by_tier(self) -> dict[str, int]:
        tiers = super().nbytes_by_tier
        rest, home = tiers.pop("device", 0), self.memory.home
        tiers[home] = tiers.get(home, 0) + rest
        return {**tiers, "cpu": tiers.get("cpu", 0) + sum(each.followed_nbytes for each in self._on_device)}

    @property
    def changing_nbytes(self) -> int:
        """Bytes of the trained shards on a drive."""
        trained = (bucket for bucket in self._geometry.buckets if self.tier_of(bucket) == "nvme")
        return sum(bucket.shard_count for bucket in trained) * self._dtype.itemsize

    @property
    def slot_nbytes(self) -> int:
        return self.memory.slot_nbytes

    @property
    def window_nbytes(self) -> int:
        return self.source.window_nbytes + self.memory.window_nbytes

    @property
    def allocation_count(self) -> int:
        return self.memory.allocation_count

    @property
    def waited_s(self) -> float:  # type: ignore[override]
        return self.life.waited_s + self.memory.waited_s + self.source.waited_s

    @property
    def moved_nbytes(self) -> int:  # type: ignore[override]
        return self.gather.moved_nbytes

    @property
    def base_nbytes(self) -> int:  # type: ignore[override]
        return self.gather.bases.nbytes

    # --- a step -----------------------------------------------------------------------------------------------

    @property
    def peers(self) -> Peers:
        return self.memory.peers

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        return self.source.begin(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self.save(bucket, weight)
        for index in bucket.params:
            if bucket.index == self._geometry.spans(index)[-1].bucket:  # its first value is complete
                self.weights.start(index, self._dtype, self.memory.device)

    def iter_shards(self, reverse: bool = False) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        self._updates.before_shards()
        self.life.invalidate()
        self._used()
        for bucket, weight in self.source.iter_shards(reverse):
            self.memory.wait_copied(self.units[bucket.unit])
            yield bucket, weight

    @property
    def overlaps(self) -> bool:  # type: ignore[override]
        return self.alone and self.memory.copies_whole

    def _used(self) -> None:
        """Order updates after the work submitted to torch's stream so far, because it uses the old weights."""
        for shards in self._on_device:
            shards.used()

    def _arrive(self) -> None:
        """Order later work of torch's stream after the updates, so that it sees the new weights."""
        for shards in self._on_device:
            shards.arrive()

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        self._updates.before_shards()
        return self.source.load(bucket)

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        return self.source.read(bucket, part)

    def save(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self._used()
        self.source.commit(bucket, weight)

    def renew(self) -> None:
        self.life.invalidate()
        self.source.renew()

    def spread(self) -> None:
        self.memory.editing = False
        self.life.invalidate()  # the next gather brings the new shards
        self.gather.bases.change()
        self.memory.publish()
        self._arrive()

    def publish(self) -> None:
        super().publish()
        self.gather.bases.rewrite()  # a load, or an edit of the program

    def clear_interrupted(self) -> None:
        self.weights.hooks.clear_interrupted()

    def read_ahead(self) -> None:
        if self.source.on_drive and not self._on_device:  # a gather between devices may raise, and step() has ended
            self.life.read_ahead()

    def synchronize(self) -> None:
        if self.memory.on_device:
            self.life.invalidate()
            self.memory.synchronize()

    def count_change(self) -> None:
        self.changes += 1
        self.weights.changed()

    def device_shard(self, bucket: FlatBucket) -> torch.Tensor:
        return self._on_device[0].device_shard(bucket)

    # --- the program's parameters -----------------------------------------------------------------------------

    def adopt(self, param: int, value: torch.Tensor) -> None:
        self._params[param].data = value

    def detached(self) -> Iterator[int]:
        self.memory.address_checks.check()
        self.weights.take_back(self.life.units)
        return iter(())

    @property
    def alone(self) -> bool:
        return bool(self._comm.world_size == 1)

    def after_edit(self) -> None:
        """Order later work of torch's stream after a change of this rank's elements of a parameter."""
        self._arrive()

    def unit_of(self, param: int) -> Unit:
        return self.units[self._geometry.bucket_of(param).unit]

    def full(self, param: int) -> torch.Tensor:
        unit, whole = self.unit_of(param), self._params[param]
        if id(whole) in self.life.held:
            return whole.detach().clone()
        by_rows = self.weights.row_weights.whole(whole)
        if by_rows is not None:
            return by_rows
        if self.life.running:
            self.life.use(unit)  # the next pass uses it at this point again
        elif self.gather.codec is not None:  # the units have decoded weights
            self._updates.before_shards()
            return self._read(param)
        else:
            self.life.ensure(unit)
        return next(view for other, view in unit.views if other is whole).clone()

    def _begin_hold(self, param: int) -> None:
        self.weights.hold(param)
        self.life.held.add(id(self._params[param]))

    def is_whole(self, param: int) -> bool:
        return super().is_whole(param) or self.unit_of(param).plain

    def _own(self, param: int) -> torch.Tensor:
        self.life.held.discard(id(self._params[param]))
        return self.weights.release(param, self.unit_of(param))

    def is_waiting(self) -> bool:
        gathering = (unit.gathering for unit in self.life.units)
        return self.memory.is_waiting() or any(call is not None and not call.done() for call in gathering)

    def give_up(self) -> None:
        self.gather.close()
        self.memory.give_up()

    def close(self) -> None:
        self.gather.end_thread()
        values = self._last_values()
        shards = None if values else self._last_shards()
        self.life.end()
        self.weights.close(values, shards)
        self.source.close()
        self.gather.close()
        self.memory.close()

    def _last_values(self) -> dict[int, torch.Tensor]:
        """Return the whole parameters by number, if this rank can read them and memory has room; else none."""
        values: dict[int, torch.Tensor] = {}
        need, device = self._geometry.every_count * self._dtype.itemsize, self.memory.device
        room = ROOM * free_nbytes(device)
        if device.type == "cpu":
            room = min(room, self.room)
        if not self.keeps_weights or need > room:
            return values
        with torch.no_grad():
            try:
                for bucket in self._geometry.every:
                    whole = self.source.load(bucket) if bucket.parts == 1 else self.source.whole(bucket)
                    if whole is None or (self._comm.world_size > 1 and self.weights.edits):
                        return {}
                    for index in bucket.params:
                        span, shape = self._geometry.span_in(bucket, index), self._geometry.places[index].shape
                        if index not in values:
                            values[index] = torch.empty(shape, dtype=whole.dtype, device=device)
                        into = values[index].view(-1)[span.begin : span.begin + span.count]
                        into.copy_(whole[span.offset : span.offset + span.count])
            except Exception as error:
                logging.getLogger("zcomm").warning("close(): the weights cannot be kept: %s", error)
                return {}
        return values

    def _last_shards(self) -> ClosedShards | None:
        """Return this rank's shards for the next optimizer of the model, if memory has room for them."""
        every = self._geometry.every
        need, room = sum(bucket.shard_count for bucket in every) * self._dtype.itemsize, ROOM * free_nbytes(_CPU)
        room = min(room / self._host_ranks, self.room)
        if not self.keeps_weights or self.age is None or need > room or not every:
            return None
        try:
            with torch.no_grad():
                shards = {bucket.index: self.source.load(bucket).to(_CPU, copy=True) for bucket in every}
        except Exception as error:
            logging.getLogger("zcomm").warning("close(): this rank's shards cannot be kept: %s", error)
            return None
        age = f"{self.age} and {self.weights.edits} changes of weights"
        return ClosedShards(self._geometry, self._dtype, shards, age, self.groups)


def host_nbytes() -> int:
    """Return the bytes of memory of this host, or of the cgroup that this process may fill, if that is less."""
    total = int(psutil.virtual_memory().total)
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def free_nbytes(device: torch.device) -> int:
    """Return the bytes that an allocation on ``device`` finds free. On a CUDA device torch's cached memory counts as
    used."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
