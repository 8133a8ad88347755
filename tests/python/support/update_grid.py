"""One grid of updates: modes (tiers and moments), places (models, memory, devices) and faults, with one runner.

A row trains until its fault comes, and the runner judges how training continues. The reference is the same training
with updates in step() and without the fault, to the bit.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.assemble
import zcomm.zero.layout.sections
import zcomm.zero.layout.tiles
import zcomm.zero.optim_state.nvme
from simulated import on_device
from zcomm.zero import StepUndoneError, Units, full_optim_state, full_param, set_full_param
from zcomm.zero.cache.swap import Swap
from zcomm.zero.optim_state.ram import ShardState
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
WIDTH, UP, SEED = 32, 2112, 7
STATE, WEIGHTS, SUMS = "state.", "parameters.", "gradients."

# --- models -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Blocks, and a unit that every other pass uses: its update runs when sums are about to change."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.rare = nn.ModuleList((nn.Linear(WIDTH, WIDTH),))

    def forward(self, x: torch.Tensor, rarely: bool = True) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.rare[0](x) if rarely else x


class Tied(Net):
    """Net with a tied weight, a frozen block, and one that no pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[3].weight = self.blocks[1].weight
        self.blocks[2].requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)


class Wide(nn.Module):
    """Linears that are gathered by rows, and a unit that every other pass uses. late: called in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, UP) for _ in range(4))  # two blocks of rows each
        self.rare = nn.ModuleList((nn.Linear(WIDTH, WIDTH),))
        self.late: Callable[[torch.Tensor], Any] | None = None

    def forward(self, x: torch.Tensor, rarely: bool = True) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)).unflatten(-1, (-1, WIDTH)).mean(-2)
            if number == 0 and self.late is not None:
                x.register_hook(self.late)
        return self.rare[0](x) if rarely else x


class Words(nn.Module):
    """An embedding of blocks of 1024 rows, each a bucket, and Linears that are whole. One block has all tokens."""

    rows = 4096
    path: tuple[int, ...] = (0, 1, 2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.rows, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in set(self.path))
        self.rare = nn.ModuleList((nn.Linear(WIDTH, WIDTH),))

    def forward(self, x: torch.Tensor, rarely: bool = True) -> torch.Tensor:
        x = x + self.embed(1100 + (x[:, 0].abs() * 100).long() % 800)
        for number in self.path:
            x = torch.tanh(self.blocks[number](x))
        return self.rare[0](x) if rarely else x


class Again(Words):
    """Words with more rows, and with two Linears that a forward gathers twice."""

    rows = 12288
    path = (0, 1, 2, 0, 1, 3, 4)


# --- modes and places -------------------------------------------------------------------------------------------------

ROWS = Units(max_bytes=1088 * WIDTH * 4, rows=True)
FEW = Units(max_bytes=1024 * WIDTH * 4, rows=True)
NVME = Case(3, "nvme", 0.004, gradients="nvme")
FORWARD, BACKWARD = (replace(NVME, update=update) for update in ("forward", "backward"))
CPU, BF16, ATOMIC = replace(NVME, gradients="cpu"), replace(NVME, precision="bf16"), replace(NVME, atomic=True)
SMALL = Case(3, "nvme", 0.01, precision="bf16", update="auto")
CLIPPED: dict[str, Any] = {"clip_norm": 0.5}


def some(name: str, param: nn.Parameter) -> str:
    return "nvme" if "weight" in name else "cpu"


def half(name: str, param: nn.Parameter) -> str:
    return "cpu" if name.startswith(("blocks.1", "blocks.2", "rare")) else "nvme"


class Mixed(Net):
    """Net with a Linear that is gathered by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 2100, bias=False)

    def forward(self, x: torch.Tensor, rarely: bool = True) -> torch.Tensor:
        found: torch.Tensor = self.head(super().forward(x, rarely))
        return found


# Tiers and moment of updates, and options of Training. In update="backward" the first two steps are watched.
MODES: dict[str, tuple[Case, dict[str, Any]]] = {
    "cpu, step": (CPU, CLIPPED),
    "cpu, forward": (replace(CPU, update="forward"), CLIPPED),
    "nvme, step": (NVME, CLIPPED),
    "nvme, forward": (FORWARD, CLIPPED),
    "nvme, backward": (BACKWARD, {}),
    # The last watched step, number 2, leaves the update of ``rare`` to the next pass.
    "nvme, backward, left": (BACKWARD, {"first": 1, "prefetch": 0}),
    "nvme, backward, resident": (  # no gather tells the other ranks
        BACKWARD,
        {"first": 1, "prefetch": 0, "units": Units(resident=tuple(f"blocks.{number}" for number in range(5)))},
    ),
    "bf16, step": (BF16, {"clip_norm": 1.0}),
    "bf16, forward": (replace(BF16, update="forward"), {"clip_norm": 1.0}),
    "stage 0": (replace(SMALL, stage=0, offload=None), {"clip_norm": 1.0}),
    "stage 2": (replace(SMALL, stage=2, offload=None), {"clip_norm": 1.0}),
    "stage 2, nvme": (replace(SMALL, stage=2), {"clip_norm": 1.0}),
    "stage 3, auto": (SMALL, {"clip_norm": 1.0}),
    "atomic, step": (ATOMIC, CLIPPED),
    "atomic, step, one pass": (replace(ATOMIC, gradients="cpu", precision="bf16"), {}),
    "atomic, forward": (replace(ATOMIC, update="forward"), CLIPPED),
    "atomic, forward, sums in RAM": (replace(ATOMIC, update="forward", gradients="cpu", precision="bf16"), {}),
    "atomic, backward": (replace(ATOMIC, update="backward"), {}),
    "atomic, backward, bf16": (replace(ATOMIC, update="backward", precision="bf16"), {}),
}
# With Offload(atomic=True): state or weights in RAM, and the rules of optimizers.
IN_RAM: dict[str, tuple[Case, dict[str, Any]]] = {
    "fraction": (replace(MODES["atomic, backward"][0], fraction=0.4), {}),
    "optimizer in RAM": (MODES["atomic, forward"][0], {"tiers": {"optimizer": "cpu"}}),
    "weights in RAM": (MODES["atomic, backward"][0], {"tiers": {"params": half}}),
    "both by parameter": (MODES["atomic, forward"][0], {"tiers": {"params": half, "optimizer": some}}),
    "by rows": (ATOMIC, {"net": Mixed, "units": Units(max_bytes="160KiB", rows=True), "prefetch": 3}),
    "all in RAM": (
        replace(ATOMIC, update="forward", gradients="cpu", share_parameters=False),
        {"tiers": {"params": None, "optimizer": None, "gradients": None}},
    ),
}
RULES: dict[str, tuple[Case, dict[str, Any]]] = {
    "momentum": (MODES["atomic, backward"][0], {"optimizer": "sgd", "momentum": 0.9, "dampening": 0.5}),
    "nadam": (MODES["atomic, backward"][0], {"optimizer": torch.optim.NAdam}),
    "8bit": (MODES["atomic, forward"][0], {"optimizer": "adamw", "state_dtype": "8bit"}),
    "fp16": (MODES["atomic, backward"][0], {"precision": "fp16", "loss_scale": 64.0}),
    "lamb": (ATOMIC, {"optimizer": "lamb"}),
    "muon": (ATOMIC, {"optimizer": "muon"}),
}
MODES |= IN_RAM | RULES


@dataclass(frozen=True)
class Place:
    """Model and options of Training, which win over those of the mode, the backend, and elements of a tile."""

    options: dict[str, Any] = field(default_factory=dict)
    backend: str | None = None
    on_device: bool = False  # a simulated one, with late streams
    tile_count: int = 192


PLACES: dict[str, Place] = {
    "host": Place(),
    "device": Place(on_device=True),
    "tcp": Place({"units": Units(max_bytes=4 * (WIDTH + 1) * WIDTH)}, "tcp"),
    "tied": Place({"net": Tied}),
    # A bucket of rows is larger than others: it has some ten spans.
    "rows": Place({"net": Wide, "units": ROWS, "precision": "fp32"}, tile_count=1536),
    "few rows": Place({"net": Words, "units": FEW}, tile_count=1536),
    "used again": Place({"net": Again, "units": FEW, "prefetch": 0}, tile_count=1536),
    "8-bit blocks": Place(tile_count=256),
}


def run_at(place: str, world_size: int, run_ranks: Run, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Run a job on the ranks of a place and return its values."""
    if PLACES[place].on_device:
        return run_ranks(on_device, world_size, SEED, job, *args)
    return run_ranks(job, world_size, *args)


# --- faults -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """One operation that fails, is late, or ends the process, once, after ``good`` others.

    operation: "read" or "write" of a key that begins with ``key``, "tile" (the update of a tile) or "hook" (backward
    of the first block). code: errno of the OSError of its Work. refused: the call itself raises. stall_s: delay
    instead of an error. error: raised by the call instead of an OSError. kills: end the process. rank: index of the
    rank; None: all ranks.
    """

    operation: str
    key: str = ""
    code: int = errno.EIO
    good: int = 0
    refused: bool = False
    stall_s: float = 0.0
    error: type[BaseException] = OSError
    kills: bool = False
    rank: int | None = -1

    def made(self, key: str) -> BaseException:
        if self.error is not OSError:
            return self.error("on purpose")
        return OSError(self.code, f"{self.operation} of key {key!r} at offset 0", "/drive/data")

    def act(self, key: str) -> None:
        """Kill the process or raise, if the call itself does so."""
        if self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.refused or self.error is not OSError:
            raise self.made(key)

    def named(self, words: str) -> bool:
        """Return True if an error's words name this fault."""
        if self.error is not OSError:
            return "on purpose" in words
        return f"{self.operation} of key '{self.key}" in words and "/drive/data" in words

    def here(self) -> bool:
        """Return True on the rank of the fault."""
        return self.rank is None or zcomm.rank() == range(zcomm.world_size())[self.rank]


class FaultyWork:
    """A read or write that has failed, or that ends late."""

    def __init__(self, fault: Fault, key: str, work: Any) -> None:
        self._fault, self._key, self._work, self._end = fault, key, work, time.monotonic() + fault.stall_s

    def done(self) -> bool:
        return time.monotonic() >= self._end

    def wait(self, timeout: float | None = None) -> None:
        if self._work is None:
            raise self._fault.made(self._key)
        left = self._end - time.monotonic()
        if timeout is not None and timeout < left:
            time.sleep(timeout)
            raise TimeoutError("not done")
        time.sleep(max(0.0, left))
        self._work.wait()


class FaultySwap(Swap):
    """A swap file with one fault at a time."""

    fault: Fault | None = None
    left = 0
    spared: tuple[str, ...] = ()  # prefixes of keys that may be read ahead in vain, so that no call meets the error

    @classmethod
    def arm(cls, fault: Fault | None, spared: tuple[str, ...] = ()) -> None:
        cls.fault, cls.left, cls.spared = fault, 0 if fault is None else fault.good, spared

    @classmethod
    def due(cls, operation: str, key: str) -> Fault | None:
        """Return the fault if this is its operation, after it has killed or raised in the call."""
        fault = cls.fault
        if fault is None or fault.operation != operation or not key.startswith(fault.key):
            return None
        if operation == "read" and key.startswith(cls.spared):
            return None
        cls.left -= 1
        if cls.left >= 0:
            return None
        cls.fault = None
        fault.act(key)
        return fault

    def _made(self, operation: str, key: str, act: Callable[[], Any]) -> Any:
        fault = FaultySwap.due(operation, key)
        if fault is None:
            return act()
        if not fault.stall_s:
            return FaultyWork(fault, key, None)
        work = act()
        work._work = FaultyWork(fault, key, work._work)
        return work

    def read(self, key: str, ptr: int, nbytes: int) -> Any:
        return self._made("read", key, lambda: super(FaultySwap, self).read(key, ptr, nbytes))

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        return self._made("write", key, lambda: super(FaultySwap, self).write(key, ptr, nbytes))


_step_tile = ShardState._step_tile


def step_tile(*args: Any) -> None:
    FaultySwap.due("tile", "")
    _step_tile(*args)


@contextmanager
def small_spans(place: str = "host") -> Iterator[pytest.MonkeyPatch]:
    """Let small models have several shards, spans and windows, and faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm.zero.layout.sections, "PAGE_NBYTES", 512)  # else rank 0 has all of these buckets
        patch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", PLACES[place].tile_count)
        patch.setattr(zcomm.zero.optim_state.nvme, "SPAN_TILES", 2)
        patch.setattr(zcomm.zero.optim_state.nvme, "WINDOWS", 4)
        patch.setattr(zcomm.zero.assemble, "Swap", FaultySwap)
        patch.setattr(ShardState, "_step_tile", step_tile)
        yield patch


# --- training ---------------------------------------------------------------------------------------------------------


def bits_of(opt: Any) -> str:
    """Return a digest of weights and state."""
    state = {f"{n}.{k}": value for n, entry in opt.state_dict()["state"].items() for k, value in entry.items()}
    return digest({name: value.reshape(-1) for name, value in {**opt.full_state_dict(), **state}.items()})


# first: number of the first step. tiers: fields of Offload. always: every pass uses the rare unit.
TRAINING: dict[str, Any] = {"net": Net, "optimizer": "adamw", "tiers": {}, "first": 0, "always": False, "lr": 1e-2}


class Training:
    """One optimizer, its model, and the phases of a step. A step that runs again has the same batch."""

    def __init__(
        self, mode: str, folder: Path | str, place: str = "host", changed: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """Build both. changed: fields of the mode's Case; more: options, which win over those of the place."""
        self.case = case = replace(MODES[mode][0], **(changed or {}))
        self.scales = MODES[mode][0].atomic
        options = {**TRAINING, **case.arguments(), **MODES[mode][1], **PLACES[place].options, **more}
        net, optimizer, tiers, self.first, self.always = (options.pop(name) for name in list(TRAINING)[:5])
        torch.manual_seed(3)
        self.net: Any = net()
        if optimizer == "muon":
            for param in self.net.parameters():
                param.requires_grad_(param.ndim == 2)
        if tiers:
            options["offload"] = replace(options["offload"], **tiers)
        self.loss = torch.zeros(())
        self.opt: Any = zcomm.ZeroOptimizer(self.net, optimizer, nvme_path=folder, **options)

    @property
    def number(self) -> int:
        """Number of the next step."""
        return self.first + int(self.opt.step_count)

    def forward(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 * self.number + zcomm.rank())
        x = torch.randn(3, WIDTH, generator=generator).to(self.net.rare[0].weight.dtype)
        self.loss = self.net(x, self.always or self.number % 2 == 0).float().square().mean()
        return self.loss

    def backward(self) -> None:
        loss, self.loss = self.loss, torch.zeros(())
        if self.scales:
            self.opt.backward(loss)
        else:
            loss.backward()

    def step(self) -> None:
        self.opt.step()

    def half(self) -> None:
        """Run forward and backward."""
        self.forward()
        self.backward()

    def once(self) -> None:
        self.half()
        self.step()
        self.opt.zero_grad()

    def run(self, until: int) -> None:
        while self.number < until:
            self.once()

    def reach(self, number: int) -> None:
        """Run until ``number``, with all updates made."""
        self.run(number)
        full_param(self.net.rare[0].weight)

    def bits(self) -> str:
        return bits_of(self.opt)

    def counters(self) -> list[Any]:
        opt = self.opt
        steps = [group.get("step") for group in opt.param_groups]
        norm = None if opt.grad_norm is None else float(opt.grad_norm).hex()
        return [opt.step_count, opt.skipped_steps, opt.loss_scale, norm, steps, opt.updates]


Wanted = dict[int, tuple[str, list[Any]]]
_references: dict[Any, Wanted] = {}


def reference(
    mode: str, place: str, folder: Path, numbers: Iterable[int], kind: type[Training] = Training, **more: Any
) -> Wanted:
    """Return bits and counters after these numbers of steps, with updates in step() and without transactions.

    Each process trains once for equal arguments.
    """
    key = mode, place, *numbers, kind, str(more), zcomm.world_size()
    if key not in _references:
        twin = kind(mode, folder / "twin", place, {"atomic": False, "update": "step"}, **more)
        _references[key] = {}
        for number in numbers:
            twin.run(number)
            _references[key][number] = twin.bits(), twin.counters()
        twin.opt.close()
    return _references[key]


# --- phases of a row --------------------------------------------------------------------------------------------------


def join_and_go_on(train: Training) -> None:
    """Join rank by rank: an error of only this rank reaches the others in the next forward."""
    try:
        train.opt.join()
    except OSError:
        assert train.opt._train.poison.unreported
    train.forward()


Act = Callable[[Training, Path], Any]
PHASES: dict[str, Act] = {
    "forward": lambda train, base: train.forward(),
    "pass": lambda train, base: (train.half(), train.step()),
    "backward": lambda train, base: (train.backward(), train.step()),
    "left": lambda train, base: (train.backward(), pytest.fail("no gather of backward has told this rank")),
    "left, resident": lambda train, base: (train.backward(), train.step(), pytest.fail("step() has not raised")),
    "step": lambda train, base: train.step(),
    "end": lambda train, base: (train.step(), train.opt.zero_grad()),
    "two steps": lambda train, base: (train.once(), train.once()),
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


def leave_an_update(train: Training) -> None:
    train.forward()
    assert train.opt._parts.updates._left, "the update of a unit that this forward does not use"


# Calls before the fault.
PREPARATIONS: dict[str, Callable[[Training], Any]] = {
    # So that the fault hits the call, and not the reads ahead for the next forward.
    **dict.fromkeys(("full_param", "set_full_param"), lambda train: train.opt._parts.store.gather.synchronize()),
    **dict.fromkeys(("step", "end"), Training.half),
    **dict.fromkeys(("left", "left, resident"), leave_an_update),
    # So that no update of the previous step is pending.
    **dict.fromkeys(("load", "two steps"), lambda train: full_param(train.net.rare[0].weight)),
    "backward": Training.forward,
}

# --- the judge --------------------------------------------------------------------------------------------------------

# Mode, phase, fault, and how training continues: "again", "loaded" (calls raise until a load), "reloaded" (at once), or
# "undone" (the step did not happen).
Row = tuple[str, str, Fault, str]
FAULTY = 4  # number of the step that a fault undoes


def arm(train: Training, fault: Fault) -> None:
    """Let the fault come on its ranks."""
    if not fault.here():
        return
    if fault.operation == "hook":
        train.net.blocks[0].weight.register_hook(lambda grad: FaultySwap.due("hook", ""))
    if fault.good >= 100:
        fault = replace(fault, good=own_operations(train))
    rare = [unit for unit in getattr(train.opt._open_parts.store, "units", ()) if unit.name.startswith("rare")]
    FaultySwap.arm(fault, tuple(f"{WEIGHTS}{bucket.index}." for unit in rare for bucket in unit.buckets))


def own_operations(train: Training) -> int:
    """Count the spans of state before those of the last unit, which the next forward does not use."""
    spans = train.opt._parts.state.kinds[0]._swapped
    last = set(train.opt._parts.geometry.unit_buckets[-1])
    return sum(bucket not in last for bucket, _, _ in spans)


def strike(train: Training, phase: str, fault: Fault, base: Path, expected: Any, until: int) -> Any:
    """Run a phase, and further steps, until the fault comes. Returns: the error of this rank, which names the fault."""
    PREPARATIONS.get(phase, lambda train: None)(train)
    arm(train, fault)
    with pytest.raises(expected) as told:
        PHASES[phase](train, base)
        train.run(until)
    words, rank = str(told.value), range(zcomm.world_size())[fault.rank or 0]
    assert not isinstance(told.value, TimeoutError), "no rank waits for its deadline"
    assert fault.named(words) and (fault.here() or f"rank {rank}" in words), words
    assert not isinstance(told.value, OSError) or told.value.errno == fault.code
    assert FaultySwap.fault is None, "it has come"
    return told.value


def go_on(train: Training, base: Path, fault: Fault, cause: BaseException | None) -> str:
    """Continue as a program would after an error: again if no data is lost, otherwise from the checkpoint.

    cause: of the errors of later calls, if it is known.
    """
    manifest = (base / "good" / "manifest.json").read_bytes()
    try:
        train.opt.zero_grad()
        train.run(5)
        return "again"
    except (RuntimeError, OSError) as error:
        assert "load a checkpoint" in str(error) or f"[Errno {fault.code}]" in str(error), str(error)
    with pytest.raises((RuntimeError, OSError)):  # by now all ranks know
        train.step()
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("step", train.step),
        ("save", lambda: train.opt.save(base / "good")),
        ("save", lambda: train.opt.save(base / "good", wait=False)),
        ("state_dict", train.opt.state_dict),
        ("full_state_dict", train.opt.full_state_dict),
        ("load_state_dict", lambda: train.opt.load_state_dict({})),
        ("load", lambda: train.opt.load(base / "good", optimizer=False)),
        ("values", lambda: full_param(train.net.blocks[0].weight)),
    ]
    calls += [("zero_grad", train.opt.zero_grad), ("", train.forward)] if train.opt._parts.updates.pending else []
    for what, call in calls:
        with pytest.raises(RuntimeError, match=rf"^{what}.*half way.*load a checkpoint") as told:
            call()
        assert cause in (None, told.value.__cause__), repr(told.value.__cause__)
    with pytest.raises(OSError):
        train.opt.load(base / "nothing")
    if train.case.update != "backward":  # in which step() may tell the others an error of this rank
        with pytest.raises(RuntimeError, match="load a checkpoint"):
            train.step()
    assert (base / "good" / "manifest.json").read_bytes() == manifest
    train.opt.load(base / "good")
    return "loaded"


def is_as_before(train: Training, wanted: Wanted, number: int) -> None:
    """Check that training is where it was before step ``number``."""
    assert train.counters() == wanted[number][1]
    train.opt.zero_grad()
    assert train.bits() == wanted[number][0], "the step did not happen"


def meet(rows: list[Row], place: str, folder: str, known: dict[Any, Wanted]) -> dict[Any, Wanted]:
    """Meet the faults of rows, each with its own optimizer. known: references of earlier jobs. Returns: all references
    now."""
    _references.update(known)
    zcomm.init(*filter(None, [PLACES[place].backend]), timeout=20)
    with small_spans(place):
        for number, row in enumerate(rows):
            print("row", place, row, flush=True)
            meet_one(*row, place, Path(folder) / str(number))
    zcomm.shutdown()
    return _references


def meet_one(mode: str, phase: str, fault: Fault, way: str, place: str, base: Path) -> None:
    base.mkdir(exist_ok=True)
    end = 7 if way == "undone" else 5
    wanted = reference(mode, place, base, [0, FAULTY, end] if way == "undone" else [end])
    train = Training(mode, base / "drive", place)
    if way == "undone":
        for number in [0, FAULTY] if phase == "two steps" else [FAULTY]:
            train.run(number + (phase == "forward"))
            error = strike(train, phase, fault, base, StepUndoneError, end)
            assert error.step == number + 1 and f"step {number + 1} was undone" in str(error)
            is_as_before(train, wanted, number)
    else:
        train.run(2)
        train.opt.save(base / "good")
        train.run(3)
        expected = (OSError, RuntimeError) if fault.error is OSError else fault.error if fault.here() else RuntimeError
        error = strike(train, phase, fault, base, expected, end)
        if way == "reloaded":
            train.opt.load(base / "good")
        else:
            known = phase in ("pass", "step") and train.case.update != "backward" and fault.good < 100
            found = go_on(train, base, fault, error if known else None)
            assert found == way, f"{found}, not {way}"
    train.run(end)
    assert train.case.update != "backward" or train.opt._parts.updates.is_on, "updates ran in backward"
    counters = len(wanted[end][1]) - (way in ("loaded", "reloaded"))  # ``updates`` goes on after a load
    assert train.bits() == wanted[end][0], "bits"
    assert train.counters()[:counters] == wanted[end][1][:counters], f"{train.counters()}, not {wanted[end][1]}"
    train.opt.close()
