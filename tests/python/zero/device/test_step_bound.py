"""The length of a step on a device, in virtual time, against its bound: the longest lane, and the last bucket's update.

A lane is compute, the bus down or up, the host's memory bus, or a drive's reads or writes. Updates run concurrently
with a part of the computing only, their window ([Note: lanes] in planning/lanes.py). The bits are those of the same
training on the CPU.

The times rely on orders. Tests of test_device_races.py take one wait away for each of them, and expect a race:
- a gradient's copy, update of its bucket: "... before a gradient has landed" (3), "... before a sum is complete"
- update of a bucket, forward of its module: "a module runs before its step"
- a bucket's copy to the device, forward of its module: "... before its weights have come", "... before the weights ..."
- update of a unit, its gather: "a unit comes before its step"
- a unit's copy to the device, update of the unit: "a unit is stepped while it is copied", "... by a gather ..."
- use of weights on the device, copy of new ones: "weights come while the old ones are used"
- a slot's copy to the host, next gradient in the slot: "a slot is filled before its last copy has left"

A bucket's copy to the device also precedes its next update because the forward, and so its gradient, waits for it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import simulated
import sizes
import zcomm
from tiers import one_in, slow
from virtual_device import BACKWARD, on_device, watch
from virtual_time import Rates, VirtualTime
from zcomm.planning.lanes import scheduled
from zcomm.zero.gradients import pinned
from zcomm.zero.layout import tiles
from zcomm.zero.optim_state import nvme
from zero_jobs import digest

BLOCKS, WIDTH, STEPS = 16, 64, 4
BUCKET_NBYTES = 2 * 2 * WIDTH**2  # a block's
# An H200 that needs 0.75 s for a forward of 3.4e9 parameters (45,056 tokens). Each lane fits into its window.
H200 = Rates(compute=3.4e9 / 0.75, bus=55e9, host=124e9, drive=25e9)
SLOW_HOST = replace(H200, host=16e9)  # the host's memory bus is the longest lane
FORWARD = 1 / (1 + BACKWARD)  # share of a micro-step's computing
TOLERANCE = 1.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@dataclass(frozen=True)
class Row:
    """A training. accum: micro-steps of a step. tier: of the optimizer state; in stage 3 weights are in host memory."""

    accum: int
    clip: float | None
    stage: int
    tier: str | None
    update: Any = "step"
    gradients: Any = None
    overlap: bool = True

    @property
    def offload(self) -> zcomm.Offload:
        params: Any = "cpu" if self.stage == 3 and self.tier is not None else None
        tier: Any = self.tier
        return zcomm.Offload(tier, params, update=self.update, gradients=self.gradients)

    @property
    def window(self) -> float:
        """The share of a step's computing during which updates run. Clipping needs the norm of all gradients first."""
        share = {"step": 0.0, "forward": FORWARD, "backward": FORWARD}[self.update]
        share += 0.0 if self.clip else 1 - FORWARD
        return share / self.accum


@dataclass(frozen=True)
class Trained:
    """The last but one step. seconds, amounts: of it. late: the host's bytes of updates and norms. memory: of the host,
    by purpose, in bytes per parameter. share: of the largest bucket. bits: of all results."""

    bits: str
    seconds: float
    amounts: dict[str, float]
    late: float
    count: int
    share: float
    memory: dict[str, float]


@pytest.fixture(autouse=True)
def small_tiles(world_of_one: None) -> Iterator[None]:
    """Let a bucket have several spans of whole pages, and the drive's windows hold few of all spans."""
    with sizes.restored():
        tiles.TILE_COUNT, nvme.SPAN_TILES, nvme.WINDOWS = 2048, 1, 8
        yield


def train(row: Row, folder: Path | None, clocks: VirtualTime | None = None) -> Trained:
    """Train on a device in virtual time; without clocks on the CPU."""
    torch.manual_seed(0)
    net, ends, norms = Net(), [], []
    with nullcontext() if clocks is None else on_device(clocks):
        opt = zcomm.ZeroOptimizer(
            net, "adamw", lr=1e-3, stage=row.stage, offload=row.offload, precision="bf16", clip_norm=row.clip,
            grad_accum=row.accum, bucket_mb=BUCKET_NBYTES / 2**20, overlap=row.overlap,
            nvme_path=None if folder is None else str(folder),
        )  # fmt: skip
        if clocks is not None:
            watch(net, clocks)
        for number in range(STEPS):
            for micro in range(row.accum):
                x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * number + micro))
                opt.backward(net(x.to(torch.bfloat16)).float().square().mean())
                if clocks is not None and micro == row.accum - 1:
                    ends.append(clocks.mark(object()))
                opt.step()
                opt.zero_grad()
            norms.append(opt.grad_norm)
        if clocks is not None:
            clocks.wait_end()
            clocks.stop()
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    bits = digest({**opt.full_state_dict(), **arrays, "norms": torch.tensor(norms, dtype=torch.float64)})
    counts = [bucket.count for bucket in opt._live.geometry.buckets]
    count, share = sum(counts), max(counts) / sum(counts)
    memory = {purpose: nbytes / count for purpose, nbytes in opt.memory()["cpu"].items()}
    opt.close()
    if clocks is None:
        return Trained(bits, 0.0, {}, 0.0, count, share, memory)
    begin, end = (clocks.time_of(point) for point in ends[-2:])
    pieces = [piece for piece in clocks.pieces if begin <= piece.begin < end]
    late = sum(p.amount for p in pieces if p.resource == "host" and not p.actor.startswith("communicator"))
    return Trained(bits, end - begin, clocks.amounts(begin, end), late, count, share, memory)


@functools.cache
def on_cpu(accum: int, clip: float | None) -> Trained:
    return train(Row(accum, clip, 2, None), None)


def bound_s(row: Row, found: Trained, rates: Rates) -> float:
    """Return the least seconds of a step with the window of its policy. The last bucket comes down, is updated, and
    its weights go up."""
    amounts = found.amounts
    lanes = {name: rates.seconds(name, amounts[name]) for name in ("compute", "down", "up", "read", "write")}
    moved = sum(amounts[name] for name in ("down", "up", "read", "write"))
    lanes["host"] = rates.seconds("host", amounts["host"] + moved)
    late = {name: lanes[name] for name in ("read", "write")}
    late["up"] = lanes["up"] if row.stage < 3 else 0.0
    sent = amounts["up"] if row.stage < 3 else 0.0
    late["host"] = rates.seconds("host", found.late + amounts["read"] + amounts["write"] + sent)
    down = lanes["down"] / (1 if row.gradients == "device" else row.accum)
    up = lanes["up"] if row.stage < 3 else lanes["up"] / (2 * row.accum)
    last = found.share * (down + rates.seconds("host", found.late) + up)
    return scheduled(lanes, late, row.window, last)


def has_device_sums() -> bool:
    """Return True if sums of several micro-steps can stay on the device."""
    try:
        zcomm.Offload("cpu", gradients="device")  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


SUMS = [None, "device"] if has_device_sums() else [None]
ROWS = [
    Row(accum, clip, stage, tier, update, gradients)
    for tier in ("cpu", "nvme")
    for stage in (1, 2, 3)
    for clip in (None, 0.5)
    for update in ("step", "forward")
    for accum in (1, 2, 4)
    for gradients in (SUMS if accum > 1 else [None])
] + [Row(1, None, stage, tier, "backward") for tier in ("cpu", "nvme") for stage in (1, 2)]


def check(row: Row, folder: Path, rates: Rates) -> None:
    found = train(row, folder, VirtualTime(rates))
    assert found.bits == on_cpu(row.accum, row.clip).bits
    least = bound_s(row, found, rates)
    assert least <= TOLERANCE * found.seconds, "it is no bound"
    assert found.seconds <= TOLERANCE * least, f"{found.seconds / least:.3f} of the bound"


@pytest.mark.parametrize("row", one_in(5, 0, ROWS), ids=str)
def test_a_step_comes_near_its_bound(tmp_path: Path, row: Row) -> None:
    check(row, tmp_path, H200)


@pytest.mark.parametrize(("stage", "update"), [(2, "forward"), (3, "forward"), (2, "backward")])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_slow_host_always_works(tmp_path: Path, stage: int, tier: str, update: str) -> None:
    """Updates run in backward and in the next forward, so the host waits for neither."""
    check(Row(1, None, stage, tier, update), tmp_path, SLOW_HOST)


def test_few_slots_are_enough_for_a_fast_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update in backward frees its slot before another bucket needs it."""
    monkeypatch.setattr(pinned, "HOST_SLOTS_NBYTES", 1)
    check(Row(1, None, 2, "cpu", "backward"), tmp_path, H200)


def test_copies_to_a_fast_device_hide_behind_its_forward(tmp_path: Path) -> None:
    """In ``step()`` torch's stream waits for all of them."""
    fast = replace(H200, compute=3.4e9 / 0.3)
    check(row := Row(1, None, 2, "cpu", "forward"), tmp_path, fast)
    in_step = train(replace(row, update="step"), tmp_path, VirtualTime(fast))
    assert in_step.seconds > TOLERANCE * bound_s(row, in_step, fast)


@pytest.mark.parametrize(
    ("row", "also"),
    [
        (Row(1, None, 2, "cpu"), {"overlap": False}),
        (Row(1, None, 3, "cpu"), {"overlap": False}),
        (Row(1, 0.5, 2, "cpu", "forward"), {"update": "step"}),
        (Row(1, 0.5, 3, "cpu", "forward"), {"update": "step"}),
        slow(Row(1, None, 3, "nvme"), {"clip": 0.5}),
    ],
    ids=str,
)
def test_a_step_that_overlaps_less_is_longer(tmp_path: Path, row: Row, also: dict[str, Any]) -> None:
    """Show that times can miss the bound."""
    less = train(replace(row, **also), tmp_path, VirtualTime(H200))
    assert less.seconds > TOLERANCE * bound_s(row, less, H200)


LATE = [
    Row(1, None, 2, "cpu", "forward"), Row(1, None, 2, "nvme", "forward"), Row(2, None, 3, "cpu"),
    Row(1, None, 3, "nvme", "forward"), Row(2, 0.5, 3, "cpu", "forward"),
]  # fmt: skip


@pytest.mark.parametrize("row", LATE, ids=str)
def test_late_streams_change_no_bit(tmp_path: Path, row: Row) -> None:
    wanted = on_cpu(row.accum, row.clip).bits
    simulated.play(0.0005)
    assert train(row, tmp_path).bits == wanted


def test_the_load_of_the_machine_changes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, device = Row(1, None, 3, "nvme", "forward"), simulated.device
    runs = []
    for delay_s in (0.0, 0.0005):
        monkeypatch.setattr(simulated, "device", lambda seed, _, delay_s=delay_s: device(seed, delay_s))
        clocks = VirtualTime(SLOW_HOST)
        train(row, tmp_path, clocks)
        runs.append(clocks.pieces)
    assert runs[0] == runs[1] and len(runs[0]) > 1000


# Bytes of host memory per parameter: weight 2, gradient or sum, remainder 2 and moments 8; then the host's slots.
MEMORY = [
    (Row(1, None, 2, "cpu"), 2 + 2 + 10, 0.0),  # 12 and the copy of the weights
    (Row(1, 0.5, 2, "cpu", "forward"), 2 + 2 + 10, 0.0),  # gradients wait for the norm in their own dtype
    (Row(1, None, 3, "cpu", "forward"), 2 + 2 + 10, 0.0),  # no slots for units
    (Row(2, None, 2, "cpu"), 2 + 4 + 10, 2.0),  # fp32 sums, and slots of all gradients, up to 1 GiB
    (Row(1, None, 2, "nvme"), 2 + 2, 0.0),  # without windows, which are few
    (Row(1, None, 2, "cpu", "backward"), 2 + 10, 0.37),  # gradients are used up in three slots
]


@pytest.mark.parametrize(("row", "nbytes", "slots"), MEMORY, ids=str)
def test_host_memory_per_parameter(
    tmp_path: Path, row: Row, nbytes: int, slots: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinned, "HOST_SLOTS_NBYTES", 1)
    memory = train(row, tmp_path, VirtualTime(H200)).memory
    rest = memory.pop("slots") - (nvme.WINDOWS * 20480 / on_cpu(1, None).count if row.tier == "nvme" else 0)
    assert sum(memory.values()) == nbytes
    assert rest == pytest.approx(slots, abs=0.2)


# The host's bytes: of an update in one pass (gradient 2, weight and state both ways 24), or with fp32 sums. If the norm
# comes first, backward adds the last pass, and the host squares the sums.
@pytest.mark.parametrize(
    ("row", "nbytes"),
    [
        (Row(1, None, 2, "cpu"), 26),
        (Row(1, 0.5, 3, "cpu", "forward"), 26),
        (Row(1, None, 2, "cpu", "backward"), 26),
        (Row(2, None, 2, "cpu"), 6 + 30),
        (Row(2, 0.5, 2, "cpu"), 6 + 10 + 4 + 28),
    ],
    ids=str,
)
def test_bytes_of_the_memory_bus_per_parameter(tmp_path: Path, row: Row, nbytes: int) -> None:
    found = train(row, tmp_path, VirtualTime(H200))
    assert found.amounts["host"] / found.count == nbytes
    assert found.amounts["down"] / found.count == 2 * row.accum
