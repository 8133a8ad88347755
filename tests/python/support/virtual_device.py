"""A device in virtual time: a model trains on a simulated device, and its calls are told to the clocks.

The calls are those that take time, wait, or end waits, seen at the core's boundary if possible. So a new transport, or
another order of updates, needs no change here. Times of Python, of the device's own kernels (squares, checksums, sums)
and of copies of at most SMALL bytes are left out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import simulated
from virtual_time import Use, VirtualTime
from zcomm import _core
from zcomm.memory import device_streams
from zcomm.zero import worker
from zcomm.zero.gradients.norm import Squares
from zcomm.zero.params.shards import RamSource
from zcomm.zero.params.sources import Sources
from zcomm.zero.rules.rule import FusedRule

SMALL = 1024  # bytes: words of checksums and of sums of squares
BACKWARD = 3.0  # forwards that a backward pass takes, with its recomputation
_NBYTES = {_core.DType.bfloat16: 2, _core.DType.float16: 2, _core.DType.float32: 4}


@contextmanager
def on_device(clocks: VirtualTime) -> Iterator[None]:
    """Let optimizers of models on the CPU that are built in the block be on a device, in virtual time."""
    with pytest.MonkeyPatch.context() as patch:
        _install(clocks, patch)
        try:
            yield
        finally:
            clocks.stop()


def _install(clocks: VirtualTime, patch: pytest.MonkeyPatch) -> None:
    """Let the calls tell ``clocks``."""
    streams: dict[int, tuple[Any, str]] = {}  # by id(), with the resource that its copies use

    def open_lane(where: torch.device) -> simulated.SimulatedLane:
        lane = simulated.SimulatedLane(torch.device("cpu"), simulated.device(1, 0.0))
        for stream, name in ((lane.d2h._core, "down"), (lane.h2d._core, "up"), (lane.current(), "compute")):
            streams[id(stream)] = stream, name
        return lane

    def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], None]:
        """Let ``told(original, *args)`` stand for ``owner.name``."""

        def install(told: Callable[..., Any]) -> None:
            original = getattr(owner, name)
            patch.setattr(owner, name, lambda *args, **options: told(original, *args, **options))

        return install

    patch.setattr(device_streams, "open_lane", open_lane)

    # The device.

    @around(_core.Stream, "copy")
    def _(original: Any, stream: Any, dst: int, src: int, nbytes: int) -> None:
        name = streams[id(stream)][1]
        clocks.ask(name, Use(name, nbytes if nbytes > SMALL else 0))
        original(stream, dst, src, nbytes)

    @around(_core.Stream, "record")
    def _(original: Any, stream: Any, event: Any) -> None:
        clocks.ask(streams[id(stream)][1], clocks.new_point(event))
        original(stream, event)

    @around(_core.Stream, "wait")
    def _(original: Any, stream: Any, event: Any) -> None:
        clocks.ask(streams[id(stream)][1], *clocks.waits(event))
        original(stream, event)

    @around(_core.Event, "wait_for")
    def _(original: Any, event: Any, patience_s: float) -> Any:
        clocks.wait(event)
        return original(event, patience_s)

    # The communicator of one rank: its thread runs its operations in order.

    numbers: dict[int, int] = {}

    def communicator(core: Any) -> str:
        return f"communicator {numbers.setdefault(id(core), len(numbers))}"

    @around(_core.Communicator, "after")
    def _(original: Any, core: Any, event: Any, *later: bool) -> Any:
        clocks.ask(communicator(core), *clocks.waits(event))
        return original(core, event, *later)

    @around(_core.Communicator, "reduce_scatter")
    def _(original: Any, core: Any, *args: Any) -> Any:
        work = original(core, *args)
        spans, _, dtype, _, out_dtype, accumulate = args[:6]
        nbytes = _NBYTES[dtype] + _NBYTES[out_dtype] * (1 + accumulate)  # read the slot, add to the sum
        use = Use("host", nbytes * sum(number for _, number in spans))
        clocks.ask(communicator(core), use, clocks.new_point(work))
        return work

    # A drive: operations on one key run in the order of their calls.

    keys: dict[tuple[int, str], Any] = {}

    def move(resource: str, original: Any, swap: Any, key: str, ptr: int, nbytes: int) -> Any:
        work = original(swap, key, ptr, nbytes)
        before, keys[id(swap), key] = keys.get((id(swap), key)), work
        clocks.ask("", *clocks.waits(before), Use(resource, nbytes), clocks.new_point(work))
        return work

    around(_core.SwapFile, "read")(lambda *args: move("read", *args))
    around(_core.SwapFile, "write")(lambda *args: move("write", *args))

    # Waits for operations, and questions without a wait. One that has ended in virtual time really ends soon.

    ended = _core.Work.done

    @around(_core.Work, "wait")
    def _(original: Any, work: Any, timeout: float | None = None) -> None:
        clocks.wait(work)
        while timeout is not None and not ended(work):
            time.sleep(0.0005)
        original(work, timeout)

    for owner in (_core.Work, _core.Event, worker.Moment):

        @around(owner, "done")
        def _(original: Any, asked: Any) -> bool:
            passed = clocks.has_passed(asked)
            while passed and not original(asked):
                time.sleep(0.0005)
            return bool(original(asked)) if passed is None else passed

    # Threads.

    @around(worker.Worker, "submit")
    def _(original: Any, thread: Any, *args: Any) -> Any:
        clocks.submit(thread._name)
        return original(thread, *args)

    @around(worker, "_run")
    def _(original: Any, *args: Any) -> None:
        clocks.begin_call()
        original(*args)
        clocks.end_call()

    @around(worker.Moment, "reach")
    def _(original: Any, moment: worker.Moment) -> None:
        clocks.reach(moment)
        original(moment)

    @around(worker.Moment, "wait")
    def _(original: Any, moment: worker.Moment) -> None:
        clocks.expect(moment)
        clocks.wait(moment)
        original(moment)

    # Host memory, by count of bytes: updates, squares of sums, copies of weights.

    @around(FusedRule, "step")
    def _(original: Any, rule: FusedRule, form: Any, part: Any, hyper: Any) -> None:
        nbytes = part.grad.itemsize + (0 if part.addend is None else part.addend.itemsize)
        nbytes += 2 * (part.weight.itemsize + form.element_nbytes)
        clocks.use("host", nbytes * (part.end - part.begin))
        original(rule, form, part, hyper)

    @around(Squares, "add")
    def _(original: Any, squares: Squares, bucket: Any, shard: torch.Tensor) -> None:
        clocks.use("host", shard.nbytes)
        original(squares, bucket, shard)

    def copies(original: Any, source: Any, bucket: Any, copy: torch.Tensor) -> Any:
        clocks.use("host", 2 * copy.nbytes)
        return original(source, bucket, copy)

    around(RamSource, "fetch")(copies)
    around(Sources, "keep")(copies)


def watch(model: nn.Module, clocks: VirtualTime) -> None:
    """Note forward and backward of the modules that have parameters of their own."""

    def forward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        amount = sum(param.numel() for param in module.parameters(recurse=False))
        clocks.ask("compute", Use("compute", amount))
        if output.requires_grad:
            output.register_hook(lambda grad: clocks.ask("compute", Use("compute", BACKWARD * amount)))

    for module in model.modules():
        if module._parameters:
            module.register_forward_hook(forward)
