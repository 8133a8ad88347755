"""Faults in each mode of sums and updates, and in each phase of training: no half step counts, and no rank hangs.

Either the step did not happen, and training continues to the bits of an undisturbed run. Or all ranks, and later calls,
raise an error that names the failed operation. After a load of the last checkpoint, the bits equal that run's.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.assemble
import zcomm.zero.cache.swap
import zcomm.zero.layout.sections
import zcomm.zero.layout.tiles
import zcomm.zero.optim_state.nvme
from tiers import one_in, slow
from zcomm.zero import full_optim_state, full_param, set_full_param
from zcomm.zero.cache.swap import Swap
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
WIDTH, STEPS = 32, 5
NVME = Case(3, "nvme", 0.004, gradients="nvme")
MODES = {
    "cpu, step": replace(NVME, gradients="cpu"),
    "cpu, forward": replace(NVME, gradients="cpu", update="forward"),
    "nvme, step": NVME,
    "nvme, forward": replace(NVME, update="forward"),
    "nvme, backward": replace(NVME, update="backward"),  # the first two steps are watched
}


@dataclass(frozen=True)
class Fault:
    """The ``good``-th following operation, "read" or "write", fails or is late. key: prefix of its key.

    code: errno of the error that its Work raises; refused: the call raises it. stall_s: seconds of delay instead.
    """

    what: str
    key: str
    code: int = errno.EIO
    good: int = 0
    refused: bool = False
    stall_s: float = 0.0


class BadWork:
    """A read or write that has failed, or that ends late."""

    def __init__(self, fault: Fault, key: str, work: Any) -> None:
        self._fault, self._key, self._work, self._end = fault, key, work, time.monotonic() + fault.stall_s

    def done(self) -> bool:
        return time.monotonic() >= self._end

    def wait(self, timeout: float | None = None) -> None:
        if self._work is None:
            raise OSError(self._fault.code, f"{self._fault.what} of key {self._key!r} at offset 0", "/drive/data")
        left = self._end - time.monotonic()
        if timeout is not None and timeout < left:
            time.sleep(timeout)
            raise TimeoutError("not done")
        time.sleep(max(0.0, left))
        self._work.wait()


class BadSwap(Swap):
    """Its drive has one fault at a time, once."""

    fault: Fault | None = None
    left = 0
    spared: tuple[str, ...] = ()  # how keys begin that may be read ahead, and not be used: such an error is not met

    @classmethod
    def arm(cls, fault: Fault | None, spared: tuple[str, ...] = ()) -> None:
        cls.fault, cls.left, cls.spared = fault, 0 if fault is None else fault.good, spared

    def _meets(self, what: str, key: str) -> Fault | None:
        fault = BadSwap.fault
        if fault is None or fault.what != what or not key.startswith(fault.key):
            return None
        if what == "read" and key.startswith(BadSwap.spared):
            return None
        BadSwap.left -= 1
        if BadSwap.left >= 0:
            return None
        BadSwap.fault = None
        if fault.refused:
            raise OSError(fault.code, f"{what} of key {key!r} at offset 0", "/drive/data")
        return fault

    def _made(self, what: str, key: str, act: Callable[[], Any]) -> Any:
        fault = self._meets(what, key)
        if fault is None:
            return act()
        if not fault.stall_s:
            return BadWork(fault, key, None)
        work = act()
        work._work = BadWork(fault, key, work._work)
        return work

    def read(self, key: str, ptr: int, nbytes: int) -> Any:
        return self._made("read", key, lambda: super(BadSwap, self).read(key, ptr, nbytes))

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        return self._made("write", key, lambda: super(BadSwap, self).write(key, ptr, nbytes))


class Net(nn.Module):
    """Blocks, of which the last is used in every other pass: then its update is made when sums are about to change."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.rare = nn.ModuleList((nn.Linear(WIDTH, WIDTH),))  # a unit

    def forward(self, x: torch.Tensor, rarely: bool) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.rare[0](x) if rarely else x


def bits_of(opt: Any) -> str:
    """Return a digest of weights and state."""
    arrays = {
        f"{n}.{key}": value.reshape(-1)
        for n, entry in opt.state_dict()["state"].items()
        for key, value in entry.items()
    }
    return digest({**opt.full_state_dict(), **arrays})


class Training:
    """One optimizer, its model, and the phases of a step."""

    def __init__(self, case: Case, folder: Path, **more: Any) -> None:
        torch.manual_seed(3)
        self.net, self.case = Net(), case
        clip_norm = None if case.update == "backward" else 0.5
        options = {"lr": 1e-2, "clip_norm": clip_norm, **case.arguments(), **more}
        self.opt: Any = zcomm.ZeroOptimizer(self.net, nvme_path=folder, **options)
        self.loss: torch.Tensor | None = None
        self.number = 0

    def forward(self) -> None:
        generator = torch.Generator().manual_seed(7 * self.number + zcomm.rank())
        self.loss = self.net(torch.randn(3, WIDTH, generator=generator), self.number % 2 == 0).square().mean()

    def backward(self) -> None:
        assert self.loss is not None
        loss, self.loss = self.loss, None
        loss.backward()

    def step(self) -> None:
        self.opt.step()

    def end(self) -> None:
        self.opt.zero_grad()
        self.number += 1

    def run(self, until: int) -> None:
        while self.number < until:
            self.forward()
            self.backward()
            self.step()
            self.end()

    def bits(self) -> str:
        return bits_of(self.opt)


def small_spans(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(zcomm.zero.layout.sections, "PAGE_NBYTES", 512)  # else rank 0 has all of these buckets
    patch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", 192)
    patch.setattr(zcomm.zero.optim_state.nvme, "SPAN_TILES", 2)
    patch.setattr(zcomm.zero.optim_state.nvme, "WINDOWS", 4)
    patch.setattr(zcomm.zero.assemble, "Swap", BadSwap)


def wanted_bits(case: Case, base: Path, **more: Any) -> str:
    twin = Training(case, base / "twin", **more)
    twin.run(STEPS)
    found = twin.bits()
    twin.opt.close()
    return found


def go_on(train: Training, base: Path, code: int) -> str:
    """Continue as a program would after an error: again, if no data is lost; otherwise from the checkpoint."""
    try:
        train.opt.zero_grad()
        train.run(STEPS)
        return "again"
    except (RuntimeError, OSError) as error:
        assert "load a checkpoint" in str(error) or f"[Errno {code}]" in str(error), str(error)
    with pytest.raises((RuntimeError, OSError)):  # by now all ranks know
        train.step()
    for what, call in (
        ("step", train.step),
        ("save", lambda: train.opt.save(base / "other")),
        ("state_dict", train.opt.state_dict),
        ("full_state_dict", train.opt.full_state_dict),
        ("values", lambda: full_param(train.net.blocks[0].weight)),
    ):
        with pytest.raises(RuntimeError, match=rf"^{what}.*half way.*load a checkpoint"):
            call()
    train.opt.load(base / "good")
    train.number = 2
    train.run(STEPS)
    return "loaded"


Look = Callable[[Training, Path], Any]
PHASES: dict[str, Look] = {
    "forward": lambda train, base: train.forward(),
    "backward": lambda train, base: (train.forward(), train.backward(), train.step()),
    "step": lambda train, base: train.step(),
    "amid backward": lambda train, base: (train.backward(), train.step()),
    "end": lambda train, base: (train.step(), train.end()),
    "full_param": lambda train, base: full_param(train.net.blocks[3].weight),
    "set_full_param": lambda train, base: set_full_param(train.net.blocks[3].weight, torch.zeros(WIDTH, WIDTH)),
    "state": lambda train, base: full_optim_state(train.net.rare[0].weight, "exp_avg"),
    "state_dict": lambda train, base: train.opt.state_dict(),
    "gathered": lambda train, base: zcomm.zero.GatheredParameters(train.net).__enter__(),
    "eval": lambda train, base: torch.no_grad()(train.forward)(),
    "save": lambda train, base: train.opt.save(base / "other"),
    "join": lambda train, base: join_and_go_on(train),
    "load": lambda train, base: train.opt.load(base / "good"),
}


def join_and_go_on(train: Training) -> None:
    """Join rank by rank: an error of only this rank reaches the others in the next forward."""
    try:
        train.opt.join()
    except OSError:
        assert train.opt._train.poison.unreported
    train.forward()


def run_to_step(train: Training) -> None:
    train.forward()
    train.backward()


# Calls before the fault, so that load() has no pending update of the previous step.
PREPARATIONS: dict[str, Callable[[Training], Any]] = {
    # So that the fault hits the call, and not the reads ahead for the next forward.
    **dict.fromkeys(("full_param", "set_full_param"), lambda train: train.opt._parts.store.gather.synchronize()),
    "amid backward": Training.forward,
    "step": run_to_step,
    "end": run_to_step,
    "load": lambda train: full_param(train.net.rare[0].weight),
}
STATE, WEIGHTS, SUMS = "state.", "parameters.", "gradients."
SCENES: list[tuple[str, str, Fault, str]] = [
    # mode, phase, fault; how training goes on
    ("cpu, step", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ("nvme, step", "forward", Fault("read", WEIGHTS, refused=True), "again"),
    ("nvme, step", "backward", Fault("write", SUMS, errno.ENOSPC, good=1), "again"),
    ("nvme, step", "backward", Fault("write", SUMS, refused=True), "again"),
    ("nvme, forward", "backward", Fault("write", SUMS, good=2), "again"),
    ("cpu, step", "step", Fault("read", STATE, good=3), "loaded"),
    ("cpu, step", "step", Fault("write", WEIGHTS, errno.ENOSPC, refused=True), "loaded"),
    ("nvme, step", "step", Fault("read", SUMS, good=1), "loaded"),
    ("nvme, step", "step", Fault("write", STATE, errno.ENOSPC), "loaded"),
    ("cpu, forward", "forward", Fault("read", STATE, good=2), "loaded"),
    ("nvme, forward", "forward", Fault("read", SUMS), "loaded"),
    ("nvme, forward", "forward", Fault("write", WEIGHTS, errno.ENOSPC, good=1), "loaded"),
    *(  # of units that have been updated, and are gathered again in backward
        ("nvme, forward", "forward", Fault("write", WEIGHTS, good=good), "loaded") for good in (3, 7)
    ),
    ("nvme, forward", "backward", Fault("read", STATE, good=100), "loaded"),  # of units that no forward used
    ("nvme, forward", "full_param", Fault("read", STATE, good=3), "loaded"),
    ("cpu, forward", "state", Fault("write", STATE), "loaded"),
    ("nvme, forward", "state_dict", Fault("read", SUMS, good=1), "loaded"),
    ("nvme, forward", "gathered", Fault("read", STATE), "loaded"),
    ("cpu, forward", "eval", Fault("read", STATE, good=4), "loaded"),
    ("nvme, forward", "save", Fault("write", WEIGHTS, errno.ENOSPC), "loaded"),
    ("nvme, forward", "join", Fault("read", SUMS, good=2), "loaded"),
    ("nvme, backward", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ("nvme, backward", "amid backward", Fault("read", WEIGHTS, good=4), "loaded"),
    ("nvme, backward", "amid backward", Fault("read", WEIGHTS, good=4, refused=True), "loaded"),
    ("nvme, backward", "backward", Fault("read", STATE), "loaded"),
    ("nvme, backward", "backward", Fault("read", STATE, good=3, refused=True), "loaded"),
    ("nvme, backward", "backward", Fault("write", STATE, errno.ENOSPC, good=1), "loaded"),
    ("nvme, backward", "backward", Fault("write", WEIGHTS, errno.ENOSPC), "loaded"),
    ("nvme, backward", "backward", Fault("write", WEIGHTS, good=2, refused=True), "loaded"),
    ("nvme, backward", "end", Fault("write", WEIGHTS), "loaded"),  # the next pass waits for it
    ("nvme, backward", "step", Fault("read", STATE), "loaded"),
    ("nvme, backward", "full_param", Fault("read", WEIGHTS), "again"),
    ("nvme, step", "set_full_param", Fault("read", WEIGHTS), "loaded"),
    ("nvme, step", "state", Fault("read", STATE), "again"),
    ("nvme, backward", "gathered", Fault("read", WEIGHTS, good=1), "again"),
    ("nvme, backward", "save", Fault("read", WEIGHTS, good=1), "again"),
    ("nvme, backward", "eval", Fault("read", WEIGHTS, good=3), "again"),
    ("nvme, backward", "load", Fault("write", STATE), "loaded"),
    ("nvme, forward", "load", Fault("write", WEIGHTS, errno.ENOSPC), "loaded"),
]


def met(
    mode: str, phase: str, fault: Fault, way: str, folder: str, failing: int, backend: str | None = None, **more: Any
) -> None:
    """Train to the checkpoint after two steps, and one step further. Then the fault comes, on one rank."""
    comm, base, case = zcomm.init(*filter(None, [backend]), timeout=20), Path(folder), MODES[mode]
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        wanted = wanted_bits(case, base, **more)
        train = Training(case, base / "drive", **more)
        train.run(2)
        train.opt.save(base / "good")
        train.run(3)
        PREPARATIONS.get(phase, lambda train: None)(train)
        if comm.rank == failing:
            if fault.good >= 100:
                fault = replace(fault, good=own_operations(train, fault))
            rare = [unit for unit in train.opt._open_parts.store.units if unit.name.startswith("rare")]
            BadSwap.arm(fault, tuple(f"{WEIGHTS}{bucket.index}." for unit in rare for bucket in unit.buckets))
        with pytest.raises((OSError, RuntimeError)) as told:
            PHASES[phase](train, base)
            train.run(STEPS)
        words = str(told.value)
        if comm.rank == failing:
            assert (f"{fault.what} of key '{fault.key}" in words and "/drive/data" in words) or "half way" in words, (
                words
            )
        else:
            assert f"rank {failing}" in words or "half way" in words, words
        assert BadSwap.fault is None, "it has come"
        assert go_on(train, base, fault.code) == way
        assert train.bits() == wanted
        train.opt.close()
    zcomm.shutdown()


def own_operations(train: Training, fault: Fault) -> int:
    """Count the operations of the fault's kind before the last bucket's: that of a block that the next forward does
    not use."""
    spans = train.opt._parts.state.kinds[0]._swapped
    last = set(train.opt._parts.geometry.unit_buckets[-1])
    return sum(bucket not in last for bucket, _, _ in spans)


@pytest.mark.parametrize(("mode", "phase", "fault", "way"), one_in(4, 1, SCENES, lambda each: slow(*each)))
def test_alone(tmp_path: Path, mode: str, phase: str, fault: Fault, way: str) -> None:
    met(mode, phase, fault, way, str(tmp_path), 0)


@pytest.mark.parametrize(("mode", "phase", "fault", "way"), one_in(8, 3, SCENES, lambda each: slow(*each)))
def test_on_one_of_two_ranks(run_ranks: Run, tmp_path: Path, mode: str, phase: str, fault: Fault, way: str) -> None:
    run_ranks(met, 2, mode, phase, fault, way, str(tmp_path), 1)


def met_over_tcp(mode: str, phase: str, fault: Fault, way: str, folder: str) -> None:
    """Do so between ranks without shared memory, with units of bounded size."""
    met(mode, phase, fault, way, folder, 1, "tcp", units=zcomm.zero.Units(max_bytes=4 * (WIDTH + 1) * WIDTH))


@pytest.mark.parametrize(
    ("mode", "phase", "fault", "way"),
    [
        ("nvme, forward", "forward", Fault("read", STATE, good=1), "loaded"),
        ("nvme, backward", "amid backward", Fault("write", STATE, errno.ENOSPC, good=1), "loaded"),
        ("nvme, backward", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ],
)
def test_over_tcp(run_ranks: Run, tmp_path: Path, mode: str, phase: str, fault: Fault, way: str) -> None:
    run_ranks(met_over_tcp, 2, mode, phase, fault, way, str(tmp_path))


def unsettled(folder: str, failing: int, kept: bool) -> None:
    """Fail an update that waits from the last watched step, in the next backward pass, which updates. All ranks raise.

    kept: units stay whole, so that no gather tells the other ranks.
    """
    units = zcomm.zero.Units(resident=tuple(f"blocks.{number}" for number in range(5)) if kept else ())
    comm, base, case = zcomm.init(timeout=20), Path(folder), replace(MODES["nvme, backward"], prefetch=0)

    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        ends = []
        for fails in (False, True):
            train = Training(case, base / "drive", units=units)
            train.number = 1
            train.run(2)
            train.opt.save(base / "good")
            train.run(3)
            train.forward()
            assert train.opt._parts.updates._left, "the update of a block that this forward does not use"
            if fails:
                if comm.rank == failing:
                    BadSwap.arm(Fault("read", STATE))
                with pytest.raises((OSError, RuntimeError)) as told:
                    train.backward()
                    assert kept
                    train.step()
                assert not isinstance(told.value, TimeoutError), "no rank waits for the deadline"
                words = str(told.value)
                assert f"read of key '{STATE}" in words and (comm.rank == failing or f"rank {failing}" in words), words
                for call in (train.opt.zero_grad, train.step, train.opt.state_dict):
                    with pytest.raises(RuntimeError, match="load a checkpoint"):
                        call()
                train.opt.load(base / "good")
                train.number = 2
                train.run(3)
                train.forward()
            train.backward()
            assert train.opt._parts.updates.pending
            train.step()
            train.end()
            train.run(STEPS)
            ends.append(train.bits())
            train.opt.close()
        assert ends[0] == ends[1]
    zcomm.shutdown()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_that_waits_fails_in_backward(run_ranks: Run, tmp_path: Path, world_size: int, kept: bool) -> None:
    run_ranks(unsettled, world_size, str(tmp_path), world_size - 1, kept)


# --- a drive that stalls, and one that is full ------------------------------------------------------------------------


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def stalled(mode: str, fault: Fault, folder: str) -> None:
    """Rank 1's drive takes more than two deadlines for one operation."""
    comm, base, case, log = zcomm.init(timeout=fault.stall_s / 2.25), Path(folder), MODES[mode], Lines()
    logging.getLogger("zcomm").addHandler(log)
    with pytest.MonkeyPatch.context() as patch:
        small_spans(patch)
        patch.setattr(zcomm.zero.cache.swap, "STALL_WARN_S", 0.5)
        wanted = wanted_bits(case, base)
        train = Training(case, base / "drive")
        train.run(2)
        if comm.rank == 1:
            BadSwap.arm(fault)
        train.run(STEPS)
        assert BadSwap.fault is None and train.bits() == wanted
        told = [line for line in log.lines if "the drive stalls" in line]
        assert bool(told) == (comm.rank == 1)
        assert all(f"{fault.what} of key '{fault.key}" in line and " bytes) in " in line for line in told)
        assert all(str(base / "drive") in line for line in told)
        train.opt.close()
    logging.getLogger("zcomm").removeHandler(log)
    zcomm.shutdown()


STALLS = [
    ("nvme, step", Fault("write", STATE, good=2, stall_s=30.0)),
    ("nvme, forward", Fault("write", WEIGHTS, stall_s=30.0)),
    ("nvme, forward", Fault("read", SUMS, stall_s=30.0)),
    ("nvme, backward", Fault("write", WEIGHTS, stall_s=30.0)),
    ("nvme, backward", Fault("write", STATE, good=1, stall_s=30.0)),
]


@pytest.mark.parametrize(
    ("mode", "fault"),
    [
        slow("cpu, step", Fault("read", WEIGHTS, good=1, stall_s=9.0)),
        slow("nvme, step", Fault("write", SUMS, stall_s=9.0)),
        slow("nvme, forward", Fault("read", STATE, good=2, stall_s=9.0)),
        ("nvme, backward", Fault("read", STATE, good=2, stall_s=9.0)),
        *(slow(*each) for each in STALLS),
    ],
)
def test_a_stalled_drive_is_a_wait(run_ranks: Run, tmp_path: Path, mode: str, fault: Fault) -> None:
    run_ranks(stalled, 2, mode, fault, str(tmp_path))
