"""Races in a trace of all accesses to memory while a model trains on a device.

The device itself records work submitted to streams. The test records accesses of torch, of the communicator and of the
CPU's step. Torch's stream is a stream of the simulated device, so the host does not wait for it. The numbers are
meaningless, but the order is a GPU's. A race is a pair of unordered accesses, even if they did not overlap in this run.
Then waits are removed one by one, and each removal must cause a race.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import zcomm
import zcomm_testing
from device_jobs import Job
from test_corners import WIDTH, Net, loss_of
from tiers import one_in
from zcomm.memory import device_streams
from zcomm.memory.device_streams import CopyStream
from zcomm.zero.gradients import pinned
from zcomm.zero.gradients.accumulators import Accumulators
from zcomm.zero.gradients.device_slots import DeviceSlots
from zcomm.zero.gradients.device_sums import DeviceSumsTransport
from zcomm.zero.gradients.host import HostTransport
from zcomm.zero.gradients.last_pass import LastPassTransport
from zcomm.zero.gradients.norm import DeviceSquares, Squares
from zcomm.zero.gradients.pinned import D2HTransport
from zcomm.zero.gradients.used_up import UsedUpTransport
from zcomm.zero.optim_state.device import StagedState
from zcomm.zero.optim_state.ram import ShardState
from zcomm.zero.params.device import Checksums, DeviceStore
from zcomm.zero.params.device_shards import DeviceShards
from zcomm.zero.schedule.behind import Behind
from zcomm.zero.schedule.forward import InForward
from zcomm.zero.steps.step import OptimizerStep
from zcomm.zero.units.device import DeviceMemory
from zcomm.zero.units.fillers import FromDevices, FromHost
from zcomm.zero.units.store import UnitStore
from zcomm.zero.worker import Moment, Worker

Wrap = Callable[[type, str, Callable[..., Any]], None]


class Lane(simulated.SimulatedLane):
    """Torch's current stream is not the host."""

    def __init__(self, device: torch.device, core: Any, trace: Any) -> None:
        super().__init__(device, core)
        self.stream = core.make_stream()
        self.trace = trace

    def empty(self, count: int, dtype: torch.dtype, what: str) -> torch.Tensor:
        """Record a write of the memory's last owner, because torch reuses memory before that owner's work has run."""
        memory = super().empty(count, dtype, what)
        if memory.nbytes:
            self.trace.touch(self.stream, memory.data_ptr(), memory.nbytes, "w", f"the last owner of {what}")
        return memory

    def current(self) -> Any:
        return self.stream

    def drain(self) -> None:
        super().drain()
        self.stream.synchronize()  # torch gives memory to others in the order of its stream; the host does so at once


class Watched:
    """A trace, and the patches that record into it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trace: Any = zcomm_testing.Trace()
        self._patch = monkeypatch
        self._operations = 0  # of the communicator: a queue each, one after the other
        self._queue_of: dict[int, str] = {}  # by host slot
        monkeypatch.setattr(device_streams, "open_lane", self._open)
        # Torch's operations run at once, and not in the order of its stream: values mean nothing here.
        monkeypatch.setattr(OptimizerStep, "_report_nonfinite", lambda *_: None)
        self._tell_gradients()
        self._tell_steps()
        self._tell_threads()

    def _open(self, where: torch.device) -> Lane:
        device = zcomm_testing.record_device(zcomm_testing.simulated_device(seed=3, max_delay_s=0.0002), self.trace)
        self.lane = Lane(torch.device("cpu"), device, self.trace)
        return self.lane

    def touch(self, actor: Any, tensor: torch.Tensor, access: str, label: str) -> None:
        if tensor.nbytes:
            with (
                torch._C.DisableTorchFunctionSubclass()
            ):  # a stand-in's memory, which holds nothing, has an address, too
                self.trace.touch(actor, tensor.data_ptr(), tensor.nbytes, access, label)

    def around(self, owner: type, name: str, told: Callable[..., Any]) -> None:
        """``told(original, self, *args)`` stands for a method."""
        original = getattr(owner, name)
        self._patch.setattr(owner, name, lambda this, *args: told(original, this, *args))

    def _tell_gradients(self) -> None:
        def enter(original: Any, this: Any, bucket: int) -> None:
            original(this, bucket)
            self.touch(
                self.lane.stream,
                this.of(this._geometry.buckets[bucket]),
                "w",
                f"gradients into the slot of bucket {bucket}",
            )

        def reduce(original: Any, this: Any, bucket: Any, accumulate: bool) -> None:
            number = this.slots.number[bucket.index]
            queue, self._operations = f"operation {self._operations}", self._operations + 1
            self._queue_of[number] = f"operation {self._operations}"
            self.trace.order(queue, self._queue_of[number])
            self.trace.order(None, self._queue_of[number])
            self.trace.order(this._copied[number], self._queue_of[number])
            original(this, bucket, accumulate)
            self.touch(self._queue_of[number], this.slot(bucket), "r", f"reduce bucket {bucket.index}")
            self.touch(self._queue_of[number], this.sums[bucket.index], "rw", f"add bucket {bucket.index}")

        def wait(original: Any, this: Any, number: int) -> None:
            waits = this._works[number] is not None
            original(this, number)
            if waits:
                self.trace.order(self._queue_of[number], None)

        self.around(DeviceSlots, "enter", enter)
        self.around(HostTransport, "reduce", reduce)
        self.around(HostTransport, "wait", wait)

    def _tell_steps(self) -> None:
        def tile(original: Any, this: Any, shard: Any, state: torch.Tensor, part: slice) -> None:
            self.touch(None, shard.weight[part], "rw", f"step of bucket {shard.bucket}: weight")
            for term in (shard.grad, shard.addend):
                if term is not None:
                    self.touch(None, term[part], "r", f"step of bucket {shard.bucket}: gradient")
            original(this, shard, state, part)

        def add_words(original: Any, this: Any, words: torch.Tensor, *counted: bool) -> None:
            self.touch(None, words, "r", "norm")
            original(this, words, *counted)

        def compared(original: Any, this: Any) -> Any:
            equal = type(original(this))()
            self.touch(None, this._here, "r", "checksums")
            return equal

        self.around(Checksums, "changed", compared)
        self.around(Checksums, "looked", compared)
        self.around(ShardState, "_step_tile", tile)
        self.around(Squares, "add_words", add_words)

    def _tell_threads(self) -> None:
        """Record that a call follows its submission, and a wait the moment that it waits for."""
        moments: list[Moment] = []  # kept, so that no other one has the id of one

        def submit(original: Any, this: Any, function: Callable[..., Any], *args: Any) -> Any:
            begin = f"call {len(moments)}"
            self.trace.order(None, begin)

            def run(*args: Any) -> Any:
                self.trace.order(begin, None)
                return function(*args)

            call = original(this, run, *args)
            moments.append(call)
            return call

        def reach(original: Any, this: Moment) -> None:
            moments.append(this)
            self.trace.order(None, f"moment {id(this)}")
            original(this)

        def wait(original: Any, this: Moment) -> None:
            original(this)
            self.trace.order(f"moment {id(this)}", None)

        def complete(original: Any, this: Any, bucket: Any = None) -> None:
            original(this, bucket)
            if bucket is not None:
                self.trace.order(None, f"sum of bucket {bucket.index}")

        def update(original: Any, this: Any, bucket: Any) -> None:  # which it has found in a heap
            self.trace.order(f"sum of bucket {bucket.index}", None)
            original(this, bucket)

        self.around(Accumulators, "finish", complete)
        self.around(InForward, "_update_part", update)
        self.around(Worker, "submit", submit)
        self.around(Moment, "reach", reach)
        self.around(Moment, "wait", wait)

    def tell_model(self, model: nn.Module) -> None:
        """Record that forward and backward read the weights at their addresses in forward."""

        def enter(module: nn.Module, args: Any) -> None:
            for name, param in module.named_parameters(recurse=False):
                self.touch(self.lane.stream, param.data, "r", f"forward reads {name}")

        def leave(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            data = [(name, param.data) for name, param in module.named_parameters(recurse=False)]

            def backward(grad: torch.Tensor) -> None:
                for name, where in data:
                    self.touch(self.lane.stream, where, "r", f"backward reads {name}")

            if output.requires_grad:
                output.register_hook(backward)

        for module in model.modules():
            if module._parameters:
                module.register_forward_pre_hook(enter)
                module.register_forward_hook(leave)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    yield Watched(monkeypatch)
    zcomm.shutdown()


def train(job: Job, folder: str, watched: Watched, steps: int = 4) -> list[Any]:
    """Return the races of a short training."""
    torch.manual_seed(0)
    net = Net(job.kind)
    if job.kind == "unused":
        net.extra = nn.Linear(WIDTH, WIDTH)
    opt = job.build(net, folder)
    watched.tell_model(net)
    for number in range(steps * job.accum):
        loss = loss_of(net, 0, number)
        if job.kind == "unused" and number % 2 == 0:  # the last weights of all are used now and then
            loss = loss + net.extra(torch.ones(1, WIDTH)).square().mean()
        opt.backward(loss)
        if number % 2:  # reads weights that no gradient tells of
            with torch.no_grad():
                loss_of(net, 0, 100 + number)
        opt.step()
        opt.zero_grad()
    opt.close()
    assert watched.trace.operations > 100 * steps
    found: list[Any] = watched.trace.races()
    return found


JOBS = [
    Job(0), Job(2), Job(2, clip=1.0), Job(2, clip=1.0, accum=2), Job(2, behind=True),
    Job(1, "nvme", behind=True, accum=2), Job(3), Job(3, prefetch=3), Job(3, "nvme", prefetch=0),
    Job(3, kind="twice"), Job(3, kind="checkpoint"),
    Job(2, kind="unused", behind=True), Job(3, kind="unused", prefetch=3),
    Job(0, None, accum=2), Job(2, "mixed", clip=1.0), Job(2, fraction=0.5, behind=True, precision="bf16"), Job(3, None),
    Job(3, "mixed", mixed=True), Job(3, "cpu", mixed=True, prefetch=0),
    Job(3, "mixed", kind="unused", mixed=True, prefetch=3), Job(3, "nvme", accum=2, gradients="device", clip=1.0),
    Job(2, accum=2, gradients="device", behind=True), Job(1, accum=3, gradients="device"), Job(2, accum=2),
    Job(3, update="forward"), Job(2, behind=True, clip=1.0),
    Job(3, kind="unused", prefetch=3, accum=2, update="forward"), Job(2, update="backward"),
    Job(2, "nvme", kind="unused", update="backward"), Job(1, fraction=0.5, precision="bf16", update="backward"),
]  # fmt: skip


@pytest.mark.parametrize("job", one_in(2, 0, JOBS), ids=str)
def test_nothing_races(tmp_path: Path, watched: Watched, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "playing", lambda: True)
    races = train(job, str(tmp_path), watched)
    assert not races, "\n".join(map(str, races[:5]))


def _drop_wait(owner: Any, name: str) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(owner, name, lambda *args: None)


def _without(place: str) -> Callable[[pytest.MonkeyPatch], None]:
    """``CopyStream.copy`` that forgets the events of one kind. place: the method that makes the copies."""

    def change(patch: pytest.MonkeyPatch) -> None:
        owner, method = {
            "reduce": (D2HTransport, "copy_down"),
            "land": (LastPassTransport, "start"),
            "sum": (DeviceSumsTransport, "_land"),
            "send": (DeviceStore, "_send"),
            "copy": (FromHost, "_copy"),
            "sums": (DeviceSquares, "send"),
            "checksums": (Checksums, "look"),
            "piece": (StagedState, "_step_piece"),
            "follow": (DeviceShards, "follow"),
            "stay": (FromDevices, "start"),
        }[place]
        original, copy = getattr(owner, method), CopyStream.copy
        forgets = [False]

        def inside(this: Any, *args: Any) -> Any:
            forgets[0] = True
            try:
                return original(this, *args)
            finally:
                forgets[0] = False

        patch.setattr(owner, method, inside)
        patch.setattr(
            CopyStream,
            "copy",
            lambda this, copies, after, *done: copy(this, copies, [] if forgets[0] else after, *done),
        )

    return change


def _no_wait_in(owner: type, method: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Torch's stream waits for nothing inside of a method."""

    class Deaf:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def wait(self, event: Any) -> None:
            pass

        def record(self, event: Any) -> None:
            self._stream.record(event)

    def change(patch: pytest.MonkeyPatch) -> None:
        original, current = getattr(owner, method), Lane.current
        deaf = [False]

        def inside(this: Any, *args: Any) -> Any:
            deaf[0] = True
            try:
                return original(this, *args)
            finally:
                deaf[0] = False

        patch.setattr(owner, method, inside)
        patch.setattr(Lane, "current", lambda this: Deaf(current(this)) if deaf[0] else current(this))

    return change


def _both(*changes: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        for each in changes:
            each(patch)

    return change


def _no_sums(patch: pytest.MonkeyPatch) -> None:
    """Let the thread of a step wait for no sum."""
    begin = Behind._begin

    def deaf(this: Behind) -> None:
        begin(this)
        for moment in this._summed:
            patch.setattr(moment, "wait", lambda: None)

    patch.setattr(Behind, "_begin", deaf)


def _no_updates(patch: pytest.MonkeyPatch) -> None:
    """Let no module wait for its update; the last bucket's takes until its module has run."""
    step, asked = ShardState._step_tile, threading.Event()

    def need(this: Behind, buckets: Any) -> None:
        for bucket in this._waiting.intersection(buckets):
            this._store.arrive_bucket(bucket)
            this._waiting.discard(bucket)
            if bucket == len(this._summed) - 1:
                asked.set()

    def slow(this: Any, shard: Any, *args: Any) -> None:
        if shard.bucket == len(this.counts) - 1:
            asked.wait(1.0)  # after the last step no module runs
            asked.clear()
        step(this, shard, *args)

    patch.setattr(Behind, "need", need)
    patch.setattr(ShardState, "_step_tile", slow)


def _no_join(patch: pytest.MonkeyPatch) -> None:
    """No call waits for a step with a last bucket that takes until the next backward pass has reduced something."""
    step, reduce = ShardState._step_tile, LastPassTransport.start
    reduced = threading.Event()

    def slow(this: Any, shard: Any, *args: Any) -> None:
        if shard.bucket == len(this.counts) - 1:
            reduced.clear()
            reduced.wait(3.0)  # after the last step nothing is
        step(this, shard, *args)

    def note(this: Any, *args: Any) -> None:
        reduce(this, *args)
        reduced.set()

    patch.setattr(ShardState, "_step_tile", slow)
    patch.setattr(LastPassTransport, "start", note)
    patch.setattr(Behind, "settle", lambda this: None)


def _skips(patch: pytest.MonkeyPatch) -> None:
    """Every second step is skipped, as one with a norm that is not finite: it waits for no gradient."""
    run, calls = OptimizerStep.run, [0]

    def skips(this: OptimizerStep) -> None:
        calls[0] += 1
        if calls[0] % 2:
            run(this)

    patch.setattr(OptimizerStep, "run", skips)


def _and(*changes: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: [change(patch) for change in changes] and None


def _few_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pinned, "HOST_SLOTS_NBYTES", 1)


def _no_landing(patch: pytest.MonkeyPatch) -> None:
    """Let updates in backward begin before their gradient has come."""
    patch.setattr(UsedUpTransport, "land", lambda this, bucket: this.slot(bucket))


SUMS, SLOTS = Job(2, accum=2, gradients="device", clip=1.0), Job(2, update="backward")
WAITS: dict[str, tuple[Job, Callable[[pytest.MonkeyPatch], None]]] = {
    "a slot is filled before its last copy has left": (Job(2), _no_wait_in(DeviceSlots, "enter")),
    "a slot leaves before it is full": (Job(2), _without("land")),
    "a slot leaves for a sum before it is full": (Job(2, accum=2, clip=1.0), _without("reduce")),
    "weights come while the old ones are used": (Job(2), _without("send")),
    "forward begins before the weights have come": (Job(2), _no_wait_in(DeviceStore, "_await")),
    "a module runs before its weights have come": (Job(2, behind=True), _no_wait_in(DeviceStore, "_await")),
    "a unit is used before it has come": (Job(3), _no_wait_in(DeviceMemory, "wait")),
    "a unit comes into a place in use": (Job(3), _without("copy")),
    "the step begins before the last unit was read": (  # a sum of squares would come behind it, on the same stream
        Job(3, kind="unused", prefetch=3, accum=2, clip=1.0),
        _both(_drop_wait(UnitStore, "synchronize"), _drop_wait(FromHost, "wait_copied")),
    ),
    "a unit is stepped while it is copied": (
        Job(3, kind="unused", prefetch=3, accum=2),
        _drop_wait(FromHost, "wait_copied"),
    ),
    "a unit is stepped by a gather while it is copied": (
        Job(3, kind="unused", prefetch=3, accum=2, update="forward"),
        _drop_wait(FromHost, "wait_copied"),
    ),
    "a unit comes before its step": (
        Job(3, update="forward"),
        lambda patch: patch.setattr(InForward, "waits", False),
    ),
    "a module runs before its step": (Job(2, behind=True), _no_updates),
    "sums of squares come before they are there": (Job(2, None), _without("sums")),
    "sums of squares are added before they have come": (Job(2, None), _drop_wait(DeviceSquares, "_wait")),
    "sums of what leaves come before they are there": (Job(2, clip=1.0), _without("sums")),
    "checksums come before they are there": (Job(2), _without("checksums")),
    "checksums are compared before they have come": (Job(2), _drop_wait(Checksums, "_wait")),
    "the step begins before a gradient has landed": (Job(2, clip=1.0), _drop_wait(LastPassTransport, "finish")),
    "the step begins before a sum is complete": (
        Job(2, accum=2, optimizer="nadam"),  # an update that adds no last pass
        _drop_wait(D2HTransport, "finish"),
    ),
    "the step begins before the last pass has landed": (Job(2, accum=2), _drop_wait(LastPassTransport, "finish")),
    "the last pass lands while its slot is added": (Job(2, accum=2), _drop_wait(LastPassTransport, "wait")),
    "a sum leaves before it is complete": (SUMS, _without("sum")),
    "the step begins before a sum has landed": (SUMS, _drop_wait(DeviceSumsTransport, "finish")),
    "a sum changes before it has left": (SUMS, _and(_skips, _drop_wait(DeviceSumsTransport, "_wait_for_copy"))),
    "the thread begins before a gradient has landed": (Job(2, behind=True), _no_sums),
    "a gather's thread begins before a gradient has landed": (
        Job(3, update="forward"),
        _drop_wait(LastPassTransport, "finish"),
    ),
    "an update in backward begins before its gradient has landed": (SLOTS, _no_landing),
    "a slot is filled before its gradient is used up": (SLOTS, _and(_few_slots, _drop_wait(UsedUpTransport, "wait"))),
    "weights come while backward uses the old ones": (SLOTS, _without("send")),
    "weights go home before they are stepped": (Job(3, None), _without("piece")),
    "weights are used before they are home": (Job(3, None), _drop_wait(StagedState, "_await")),
    "a shard that stays is renewed while a unit takes it": (Job(3, "cpu", mixed=True), _without("follow")),
    "a unit takes what stays while it is stepped": (Job(3, None, mixed=True), _without("stay")),
    "gradients are written while the step reads them": (
        Job(2, kind="unused", behind=True, clip=1.0),
        _no_join,
    ),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_taken_away_is_missed(
    tmp_path: Path, watched: Watched, wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "playing", lambda: True)
    job, change = WAITS[wait]
    change(monkeypatch)
    assert train(job, str(tmp_path), watched), "no check missed it"


def test_a_skipped_step_does_not_race(tmp_path: Path, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "playing", lambda: True)
    _skips(monkeypatch)
    races = train(SUMS, str(tmp_path), watched)
    assert not races, "\n".join(map(str, races[:5]))
