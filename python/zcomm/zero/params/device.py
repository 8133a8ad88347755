"""Weights of a model on a device, stages 0 to 2: whole on the device, and on the host, which steps update.

[Note: weights to a device] The parameters are views of one flat tensor on the device. Steps change the host's weights
(``host``: one copy for its ranks, or a copy each). As soon as a bucket's own part is updated, the lane's ``h2d`` stream
copies it to the device, during the next bucket's update. The parts of other ranks follow after their updates: a barrier
(or all_gather) for each bucket, which runs concurrently with the update. The device's weights are overwritten only
after the work that torch's stream had when the update began. ``arrive`` makes that stream wait for the new ones. The
host only waits for other ranks. Buckets on devices (schedule/on_device.py) have no weights on the host
and no part in updates: their parts are copied from device to device.
The program may edit the parameters on the device. Before an update, and before the host's weights are changed
otherwise, this rank's part of each edited bucket is copied to the host. Version counters name edited parameters, and
checksums ([Note: edits on a device]) the other edits. An update that begins while gradients are in flight uses the
checksums of the time at which backward began. The checksums of ``step()`` are compared after the update: an edit
between the two raises.
[Note: edits on a device] ``p.data.mul_()``, DLPack and kernels of the program write to weights without a version
counter. So after each publish kernels on torch's stream compute a checksum of this rank's part of each bucket. They do
so again at the next step, or as a backward pass begins, and the host compares the two. The host only waits for the
words of a comparison, which follow only work that a step waits for.
Cost: each ``publish`` and ``look`` reads this rank's weights on the device once. 16 bytes per bucket are copied to the
host.
Thread rule: one thread at a time; an update and the ``publish`` after it may run on another thread than ``arrive``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from zcomm import _core
from zcomm.comm.work import Work
from zcomm.memory.device_streams import NO_PEERS, DeviceLane, NoPeers, Peers, own_pages
from zcomm.zero.layout.flat import WHOLE_SHARD, FlatBucket
from zcomm.zero.params.stores import FlatStore, HostStore, SharedStore, StoreForm
from zcomm.zero.update_hooks import UpdateHooks


class Checksums:
    """The checksums of ``parts``: by number of the bucket, this rank's weights on the device."""

    def __init__(self, parts: Mapping[int, torch.Tensor], lane: DeviceLane) -> None:
        self._parts, self._lane = dict(parts), lane
        self._places = {bucket: place for place, bucket in enumerate(self._parts)}
        count = len(self._parts)
        self._words = lane.empty(2 * count, torch.int64, "checksums of parameters")  # published ones first
        self._here = lane.lock(own_pages(4 * count)).view(torch.int64)[: 2 * count]
        self._summed, self._ready = lane.event(), lane.event()

    def publish(self, buckets: Collection[int]) -> None:
        """Record the checksums of ``buckets``, on torch's stream. Does not wait."""
        self._sum(0, buckets)

    def look(self) -> None:
        """Start to compare all buckets with their published checksums. Does not wait."""
        if not self._parts:
            return
        self._sum(len(self._parts), self._parts)
        self._lane.h2d.copy([(self._here, self._words)], [self._summed], self._ready)

    def changed(self) -> set[int]:
        """Return the buckets that differed at the last ``look``. Waits until that has run. Raises: PeerLost."""
        self._wait()
        known, now = self._here.view(2, -1).tolist()
        return {bucket for bucket, place in self._places.items() if known[place] != now[place]}

    def looked(self) -> dict[int, int]:
        """Return the checksums of the last ``look``, by bucket. Waits as ``changed``."""
        self._wait()
        now = self._here.view(2, -1)[1].tolist()
        return {bucket: now[place] for bucket, place in self._places.items()}

    def differs(self, bucket: int) -> bool:
        """Return True if the bucket differs from its published checksum. Waits for torch's stream."""
        if bucket not in self._parts:
            return False
        place, count = self._places[bucket], len(self._parts)
        self._sum(count, [bucket])
        return self._words[place].item() != self._words[count + place].item()

    def _wait(self) -> None:
        self._lane.wait(self._ready)

    def _sum(self, begin: int, buckets: Collection[int]) -> None:
        stream, first = self._lane.current(), self._words.data_ptr() + 8 * begin
        for event in (self._summed, self._ready):
            stream.wait(event)
        words = {bucket: first + 8 * self._places[bucket] for bucket in buckets if bucket in self._parts}
        if words and len(words) == len(self._parts):
            stream.fill(first, 0, 8 * len(words))
        else:
            for word in words.values():
                stream.fill(word, 0, 8)
        for bucket, word in words.items():
            part = self._parts[bucket]
            _core.stream_checksum(stream, word, part.data_ptr(), part.nbytes)
        stream.record(self._summed)


class DeviceStore(FlatStore):
    """A store on a device, before a store of the host.

    host: holds the weights on the host. No parameter points at it. updates: notified of each bucket that is sent.
    on_device: numbers of buckets that ``host`` does not hold. peers: joins the ranks' devices, if several have such
    buckets.
    """

    overlaps = True

    def __init__(
        self,
        form: StoreForm,
        host: HostStore,
        lane: DeviceLane,
        updates: UpdateHooks,
        on_device: Collection[int] = (),
        peers: Peers = NO_PEERS,
    ) -> None:
        super().__init__(form)
        geometry, dtype = form.geometry, form.dtype
        self._peers = peers
        self._spreading: list[Work] = []  # of buckets on devices
        self.on_device = frozenset(on_device)
        self._host, self._lane, self._updates = host, lane, updates
        lane.lock(host._flat)
        self._flat = lane.buffer(peers, geometry.every_count, dtype, "parameters")
        self._used = lane.event()  # torch's stream has used the old weights
        self._ready = [lane.event() for _ in geometry.every]  # the bucket's new weights are on the device
        self.all_ready = lane.event()
        self._others: deque[tuple[FlatBucket, Work]] = deque()  # their other parts are still to be sent
        self._stepped = False
        self._versions = [-1] * len(form.params)  # of the parameters when their weights were published last
        on_host = [bucket for bucket in geometry.every if bucket.index not in self.on_device]
        with_masters = geometry.every if dtype == torch.float16 else on_host  # that follow an edit
        self._checksums = Checksums({bucket.index: self.device_shard(bucket) for bucket in with_masters}, lane)
        self._new: set[int] = set()  # buckets with new weights, and without a published checksum
        self._looked = False  # since the weights were published, or edits taken
        self._merged = True  # the host has the program's edits: nothing is published yet
        self._taken: set[int] = set()  # buckets with edits, as they were taken last
        self._seen: dict[int, int] = {}  # checksums of the look before that
        self._versions_seen = self._versions_taken = self._versions  # at that look, and then
        self._behind: set[int] = set()  # buckets on the device with masters that do not follow their edits yet
        self.looks_early = True  # next backward pass: its step does not wait until it has ended on the device

    def begin(self, bucket: FlatBucket) -> torch.Tensor:
        if bucket.index in self.on_device:
            return torch.empty_like(self.device_shard(bucket), device="cpu")
        return self._host.begin(bucket)

    def commit(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        self.save(bucket, weight)
        super().commit(bucket, weight)

    def load(self, bucket: FlatBucket) -> torch.Tensor:
        if bucket.index in self.on_device:
            return self.device_shard(bucket).to("cpu", copy=True)
        if not self._merged:
            self.take_edits()
        return self._host.load(bucket)

    def save(self, bucket: FlatBucket, weight: torch.Tensor) -> None:
        if bucket.index in self.on_device:
            self.device_shard(bucket).copy_(weight)
        else:
            self._host.save(bucket, weight)

    def read(self, bucket: FlatBucket, part: slice = WHOLE_SHARD) -> torch.Tensor:
        if bucket.index in self.on_device or self.edited(bucket):
            return self.device_shard(bucket)[part].to("cpu", copy=True)
        return self._host.read(bucket, part)

    # --- edits of the program ---------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        self._looked = False
        if self.looks_early:
            self.look_for_edits()

    def look_for_edits(self) -> None:
        self._checksums.look()
        self._versions_looked = [param._version for param in self._params]
        self._looked = True

    def edited(self, bucket: FlatBucket) -> bool:
        if self._merged:
            return bucket.index in self._behind
        return any(self._moved(index) for index in bucket.params) or self._checksums.differs(bucket.index)

    def _moved(self, param: int) -> bool:
        """Return True if the parameter's version counter has moved since its weights were published."""
        return self._params[param]._version != self._versions[param]

    def take_edits(self, settle: Callable[[], None] | None = None) -> None:
        if not self._looked:
            self.look_for_edits()
        self._taken, self._seen = self._checksums.changed(), self._checksums.looked()
        self._versions_seen = self._versions_looked
        self._looked = False
        for bucket in self._geometry.every:
            if any(self._moved(index) for index in bucket.params):
                self._taken.add(bucket.index)
        self._versions_taken = [param._version for param in self._params]
        if settle is not None and any(bucket not in self.on_device for bucket in self._taken):
            settle()
        for bucket in self._geometry.every:
            if bucket.index in self._taken and bucket.index not in self.on_device:
                self._host.load(bucket).copy_(self.device_shard(bucket))
        self._behind.update(self._taken.intersection(self.on_device))
        self._merged = True

    def edited_late(self) -> list[int]:
        now, found = self._checksums.looked(), list[int]()
        for bucket in self._geometry.every:
            moved = any(self._params[index]._version != self._versions_taken[index] for index in bucket.params)
            taken = any(self._versions_taken[index] != self._versions_seen[index] for index in bucket.params)
            if moved or (not taken and now.get(bucket.index) != self._seen.get(bucket.index)):
                found += bucket.params
        return found

    def count_change(self) -> None:
        super().count_change()
        self._versions = [param._version for param in self._params]

    def adopt(self, param: int, value: torch.Tensor) -> None:
        super().adopt(param, value)
        self._versions[param] = -1
        self._looked = False  # a look before this has the checksum of the replaced weights

    def device_shard(self, bucket: FlatBucket) -> torch.Tensor:
        return self._bucket(bucket)[bucket.part]

    def spread_on_device(self, bucket: FlatBucket) -> None:
        mine = self.device_shard(bucket)
        if isinstance(self._peers, NoPeers) or mine.numel() == bucket.count:
            return
        name = f"parameters of bucket {bucket.index}"
        _, work = self._peers.all_gather([mine], out=[self._bucket(bucket)], async_op=True, name=name)
        assert isinstance(work, Work)
        self._spreading.append(work)

    def arrive_on_device(self) -> None:
        while self._spreading:
            self._spreading.pop(0).wait()

    # --- a step -----------------------------------------------------------------------------------------------

    def used(self) -> None:
        """Record that torch's stream so far uses the old weights: an update follows, on any thread."""
        self._use_up()
        self._stepped = True

    def _use_up(self) -> None:
        self._lane.recorded(self._used)
        self._new = {bucket.index for bucket in self._geometry.every}

    def iter_shards(self, reverse: bool = False) -> Iterator[tuple[FlatBucket, torch.Tensor]]:
        for bucket, weight in self._host.iter_shards(reverse):
            yield bucket, weight
            self.updated(bucket)

    def updated(self, bucket: FlatBucket) -> None:
        """Send this rank's new part of the bucket, which a step has changed on the host, to the device."""
        mine = bucket.part
        self._send(bucket, mine)
        if mine.stop - mine.start < bucket.count:
            self._others.append((bucket, self._spread(bucket)))
        else:
            self._updates.sent(bucket.index)
        while self._others and self._others[0][1].done():
            self._send_others(*self._others.popleft())

    def _spread(self, bucket: FlatBucket) -> Work:
        """Start to let every rank of the host see all parts of a bucket."""
        name = f"parameters of bucket {bucket.index}"
        work: Work | None
        if isinstance(self._host, SharedStore):
            work = self._comm.barrier(name=name, async_op=True)
        else:
            whole = self._host._bucket(bucket)
            shards = [whole[bucket.part]]
            work = self._comm.all_gather(shards, out=[whole], async_op=True, name=name)[1]  # type: ignore[assignment]
        assert isinstance(work, Work)
        return work

    def _send_others(self, bucket: FlatBucket, spread: Work) -> None:
        spread.wait()
        mine = bucket.part
        self._send(bucket, slice(0, mine.start), slice(mine.stop, bucket.count))
        self._updates.sent(bucket.index)

    def _send(self, bucket: FlatBucket, *parts: slice) -> None:
        """Copy from the host to the device, after the last use of the old weights."""
        host, there = self._host._bucket(bucket), self._bucket(bucket)
        copies = [(there[part], host[part]) for part in parts]
        self._lane.h2d.copy(copies, [self._used], self._ready[bucket.index], self.all_ready)

    def spread(self) -> None:
        stepped, self._stepped = self._stepped, False
        if stepped:
            while self._others:
                self._send_others(*self._others.popleft())
            self._merged = self._looked = False
            self._behind.clear()
            return
        if not self._merged:
            self.take_edits()  # they are sent to the device again
        self._merged = self._looked = False
        self._host.spread()
        for bucket in self._geometry.every:
            if bucket.index in self.on_device:
                self.spread_on_device(bucket)
        self.arrive_on_device()
        self._use_up()
        for bucket in self._geometry.every:
            if bucket.index not in self.on_device:
                self._send(bucket, slice(0, bucket.count))
        self.arrive()

    def synchronize(self) -> None:
        self._lane.wait_for(self._lane.h2d)

    def renew(self) -> None:
        self._others.clear()
        self._spreading.clear()
        self._behind.clear()
        self._stepped, self._merged = False, True  # all will be loaded

    def arrive(self) -> None:
        self._await(self.all_ready)
        self._checksums.publish(self._new)
        self._new.clear()

    def arrive_bucket(self, bucket: int) -> None:
        """Let the stream of an update on another thread see one bucket, as ``arrive`` does."""
        self._await(self._ready[bucket])
        self._checksums.publish([bucket])
        self._new.discard(bucket)

    def _await(self, event: _core.Event) -> None:
        self._lane.current().wait(event)

    # --- memory -----------------------------------------------------------------------------------------------

    def _bucket(self, bucket: FlatBucket) -> torch.Tensor:
        return self._flat[bucket.begin : bucket.begin + bucket.count]

    @property
    def nbytes_by_tier(self) -> dict[str, int]:
        return {"device": self._flat.nbytes, "cpu": sum(self._host.nbytes_by_tier.values())}

    def is_waiting(self) -> bool:
        works = [*self._spreading, *(work for _, work in self._others)]
        return not all(work.done() for work in works)

    def close(self) -> None:
        """Leave the parameters as views of the device's memory, which only they use now. If other ranks have it open,
        the parameters get memory of their own."""
        self._others.clear()  # dropping a Work waits for it
        self._spreading.clear()
        if self._peers.world_size > 1:
            super().close()
            self._flat = self._flat.new_empty(0)
