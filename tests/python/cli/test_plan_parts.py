"""A batch in parts in a plan: its peak memory and its reads are those of real steps; the number of parts that fits."""

from __future__ import annotations

import gc
import itertools
import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import zcomm
from fake_nvml import FakeGpu, FakeNvml
from tiers import slow
from zcomm.cli.main import main
from zcomm.demo.llama import Llama, LlamaConfig
from zcomm.machine import gpu_speeds, gpus, speeds, swap_tuning
from zcomm.memory.split_batch import parts_of
from zcomm.planning import LiveMemory, PlannedOffload, TrueConditions, estimate, live_memory
from zcomm.planning.gpu_tiers import CONTEXT_NBYTES
from zcomm.planning.kept_gradients import Bucket, KeptGradients
from zcomm.planning.parts import WHOLE, Batches, divisors
from zcomm.zero.gradients.host import HostTransport

Run = Callable[..., list[Any]]
WORDS, WIDTH, LAYERS, SAMPLES, TIME = 64, 32, 3, 8, 24


class Net(nn.Module):
    """The demo's Llama with its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.llama = Llama(LlamaConfig(WORDS, WIDTH, 3 * WIDTH, LAYERS, 4, 2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.llama(tokens).flatten(0, 1), tokens.flatten())


def on_meta() -> tuple[Net, torch.Tensor]:
    with torch.device("meta"):
        return Net(), torch.zeros(SAMPLES, TIME, dtype=torch.int64)


# --- peak memory ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A run. tier: of activations."""

    parts: int
    tier: str | None = None
    stage: int = 3
    offload: str | zcomm.Offload = "nvme"
    precision: str = "fp32"


CASES = [Case(WHOLE), *(Case(parts, tier) for tier in (None, "nvme") for parts in (1, 2, 4, 8))]
MORE = [
    Case(WHOLE, "nvme"),
    Case(4, "cpu"),
    Case(2, None, 2),
    Case(4, None, 1, "cpu"),
    Case(4, "nvme", 3, "nvme", "bf16"),
]
MORE += [Case(2, None, 3, zcomm.Offload("nvme", "nvme", gradients="nvme"))]


def allocated(run: Callable[[], None]) -> int:
    """Return the most bytes of torch's allocator during ``run``, above those before."""
    gc.disable()  # memory of earlier cases is not freed meanwhile
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            run()
    finally:
        gc.enable()
    results: Any = profiler.profiler
    events = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def measure(case: Case, folder: str) -> tuple[int, int, int]:
    """Return the activations' bytes in forward and backward, those of their buffers, and the optimizer's."""
    net = Net()
    if case.parts:
        zcomm.split_batch(net.llama.model.layers, parts=case.parts)
    options: dict[str, Any] = {"stage": case.stage, "offload": case.offload, "precision": case.precision}
    opt = zcomm.ZeroOptimizer(net, "adamw", lr=1e-3, nvme_path=folder, **options)
    moved = zcomm.offload_activations(case.tier or "cpu", min_nbytes=1, nvme_path=folder)

    def run() -> None:
        tokens = torch.randint(WORDS, (SAMPLES, TIME))
        with moved if case.tier else nullcontext():
            loss = net(tokens)
        loss.backward()

    run()  # it checks samples, and opens buffers
    opt.step()
    opt.zero_grad()
    activations = allocated(run)
    memory = opt.memory()
    host, buffers = sum(map(sum, (memory[tier].values() for tier in ("device", "cpu")))), moved.stats()["buffer_nbytes"]
    opt.zero_grad()
    opt.close()
    moved.close()
    return activations, buffers, host


def measure_all(cases: list[Case], folder: str) -> list[tuple[int, int, int]]:
    """Measure cases. A reduction is over when the next gradient comes, on a busy machine, too."""
    zcomm.init(timeout=60)
    release = HostTransport.release
    HostTransport.release = HostTransport.finish_all  # type: ignore[method-assign]
    try:
        return [measure(case, folder) for case in cases]
    finally:
        HostTransport.release = release  # type: ignore[method-assign]


@pytest.mark.parametrize(("world_size", "cases"), [(1, CASES), *(slow(size, CASES + MORE) for size in (1, 2))])
def test_peak_memory_is_planned(run_ranks: Run, tmp_path: Path, world_size: int, cases: list[Case]) -> None:
    planned = []
    for case in cases:
        net, tokens = on_meta()
        net.to(torch.bfloat16 if case.precision == "bf16" else torch.float32)
        if case.parts:
            zcomm.split_batch(net.llama.model.layers, parts=case.parts)
        live = live_memory(net, [tokens], offload=None if case.tier is None else PlannedOffload(case.tier, 1))
        planned.append(estimate(net, case.stage, case.offload, world_size, case.precision, live=live))
    every = [measure_all(cases, str(tmp_path))] if world_size == 1 else None
    every = every or run_ranks(measure_all, world_size, cases, str(tmp_path), timeout_s=200)
    peaks = {}
    for case, plan, (activations, buffers, host) in zip(cases, planned, every[0], strict=True):
        assert host + activations + buffers == pytest.approx(plan.host_nbytes, rel=0.05), case
        assert activations == pytest.approx(plan.activations_nbytes, rel=0.05), case
        assert buffers == plan.offloaded.get("cpu", 0), case
        peaks[case] = activations
    assert peaks[Case(WHOLE)] > peaks[Case(1)] > peaks[Case(2)], "the inside of a block, for a part"
    assert peaks[Case(4, "nvme")] < peaks[Case(4)], "inputs of blocks on the drive"
    zcomm.shutdown()


def test_kept_gradients_by_hand() -> None:
    """Slots are for three of four buckets. The first one has two parameters; one of the last bucket is not kept."""
    a, b, c, d, e, f = (nn.Parameter(torch.empty(count, device="meta")) for count in (1, 2, 4, 8, 16, 32))
    params = [[e, f], [d], [c], [a, b]]
    buckets = [Bucket(each, {id(param) for param in each if param is not f}) for each in params]
    order = [f, a, b, c, d, e]
    kept = KeptGradients(buckets, order)
    changes = [kept.arrived(param) // 4 for param in order]
    # f has no slot. b completes the first bucket, so the last one takes its slot, and waits for it: f is copied then,
    # and a and b have been reduced. c and d stay until the next arrival.
    assert changes == [32, 1, 2 - 32 - 3, 4, 8 - 4, 16 - 8]
    late = KeptGradients(buckets, [a, b, c, d, f, e])
    assert [late.arrived(param) // 4 for param in (a, b, c, d, f, e)] == [1, 2, 4 - 3, 8 - 4, -8, 16]
    assert KeptGradients((), order).arrived(a) == 0
    live = LiveMemory([(40, None), (-4, None), (0, a), (-8, None), (0, b), (4, None), (-40, None)], {})
    assert (live.peak_nbytes(), live.peak_nbytes(buckets)) == (40, 44)


class Attention(nn.Module):
    """Attention with fewer heads of keys and values. mask: None, "bool" or "float"."""

    def __init__(self, mask: str | None = None, dropout: float = 0.0, value_width: int = 8) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 4 * n, bias=False) for n in (8, 4, value_width // 2))
        self.mask, self.dropout, self.value_width = mask, dropout, value_width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, width)).transpose(1, 2) for each, width in self.heads())
        mask = None if self.mask is None else torch.ones(2, 1, 24, 24, device=x.device, dtype=torch.bool).tril()
        mask = mask.to(x.dtype) if self.mask == "float" else mask
        return F.scaled_dot_product_attention(q, k, v, mask, self.dropout, mask is None, enable_gqa=True)

    def heads(self) -> list[tuple[nn.Linear, int]]:
        return [(self.q, 8), (self.k, 8), (self.v, self.value_width)]


@pytest.mark.parametrize("kind", [{}, {"mask": "bool"}, {"mask": "float"}, {"dropout": 0.1}, {"value_width": 4}])
def test_attention_is_the_operator_of_the_cpu(kind: dict[str, Any]) -> None:
    with torch.device("meta"):
        planned = live_memory(Attention(**kind), [torch.zeros(2, 24, 16)]).peak_nbytes()
    assert planned == live_memory(Attention(**kind), [torch.zeros(2, 24, 16)]).peak_nbytes()


class Masked(nn.Module):
    """A model that asks whether its mask has no padding."""

    def __init__(self, number: bool = False) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(4, 4), number

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = x if mask.all() else x * mask
        return self.linear(x) * (mask.sum().item() if self.number else 1)


def test_conditions_are_true() -> None:
    with torch.device("meta"):
        inputs = [torch.zeros(2, 4), torch.ones(2, 4)]
        with pytest.raises(RuntimeError, match="meta"):
            live_memory(Masked(), inputs)
        with TrueConditions() as conditions:
            assert live_memory(Masked(), inputs).peak_nbytes() > 0 and conditions.count == 1
            with pytest.raises(RuntimeError, match="meta"):
                live_memory(Masked(number=True), inputs)


# --- the number of parts ----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 128, bias=False), nn.Linear(128, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Small(nn.Module):
    """Blocks with few operations."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def made() -> tuple[Small, torch.Tensor]:
    """For --model."""
    with torch.device("meta"):
        return Small(), torch.zeros(SAMPLES, TIME, dtype=torch.int64)


def divided() -> tuple[Small, torch.Tensor]:
    """For --model: the program divides its batch."""
    net, tokens = made()
    zcomm.split_batch(net.blocks, parts=2)
    return net, tokens


def without_inputs() -> nn.Module:
    """For --model."""
    return Small()


def test_a_model_is_divided_for_a_trace() -> None:
    net, tokens = made()
    batches = Batches(net, tokens)
    assert (batches.samples, batches.tokens, batches.own) == (SAMPLES, TIME, WHOLE)
    assert batches.blocks == [f"blocks.{number}" for number in range(5)]
    whole, one, four = (batches.live(SAMPLES, parts).peak_nbytes() for parts in (WHOLE, 1, 4))
    assert four < one < whole and not parts_of(net)
    assert batches.live(SAMPLES // 4, WHOLE).peak_nbytes() < whole / 2
    net, tokens = divided()
    batches = Batches(net, tokens)
    assert batches.own == 2 and batches.live(SAMPLES, WHOLE).peak_nbytes() == whole
    assert set(parts_of(net).values()) == {2} and len(parts_of(net)) == 5
    with pytest.raises(ValueError, match=r"8 .* does not divide into parts=3"):
        batches.live(SAMPLES, 3)
    assert set(parts_of(net).values()) == {2}
    assert divisors(12) == [1, 2, 3, 4, 6, 12]


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Play a machine with measured speeds, and a slow drive."""
    monkeypatch.setenv("ZCOMM_TUNING", str(tmp_path / "tuning.json"))
    monkeypatch.setenv("ZCOMM_SWAP_TUNING", str(tmp_path / "swap.json"))
    monkeypatch.setattr(swap_tuning, "drive", lambda place: "a drive")
    row = {"block_nbytes": 1 << 20, "depth": 8, "read_gbps": 0.01, "write_gbps": 0.01, "time": "today"}
    (tmp_path / "swap.json").write_text(json.dumps({"format": 1, "drives": {"a drive": row}}))
    rates = dict.fromkeys(("fp32", "bf16", "fp16"), 1e12)
    speeds.save([speeds.Speeds(1, rates, near_bps=1e11, far_bps=1e11, start_s=1e-7, reduce_bps=1e11)])
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


PLAN = ["plan", "--model", "test_plan_parts:made", "--world", "1"]
ON_DRIVE = [*PLAN, "--stage", "3", "--offload", "nvme"]


def ways(said: str) -> dict[str, dict[str, str]]:
    """Return the rows of the table of ways, by way."""
    lines = said.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.split()[:3] == ["a", "step", "as"])
    names = [name.strip() for name in re.split(r" {2,}", lines[at].strip())]
    rows = (re.split(r" {2,}", line.strip()) for line in lines[at + 1 :])
    return {row[0]: dict(zip(names, row, strict=True)) for row in itertools.takewhile(lambda r: len(r) > 1, rows)}


@pytest.mark.usefixtures("calibrated")
def test_the_least_parts_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    net, tokens = made()
    batches = Batches(net, tokens)
    needs = [estimate(net, 3, "nvme", live=batches.live(SAMPLES, parts)).host_nbytes for parts in (1, 2)]
    assert main([*ON_DRIVE, "--memory", str(sum(needs) // 2)]) == 0
    said = capsys.readouterr().out
    rows = ways(said)
    assert list(rows) == ["grad_accum=1", "split_batch(parts=1)", "grad_accum=2", "split_batch(parts=2)"]
    assert "with zcomm.split_batch(model.blocks, parts=2), in one forward" in said
    assert [row["fits"] for row in rows.values()] == ["no: memory", "no: memory", "no: memory", "yes"]
    parts, micro_steps = rows["split_batch(parts=2)"], rows["grad_accum=2"]
    assert float(parts["tokens/s"]) > float(micro_steps["tokens/s"]), "the drive is read once"
    assert parts["reads per step"] == rows["split_batch(parts=1)"]["reads per step"] != micro_steps["reads per step"]
    assert main([*ON_DRIVE, "--memory", "1GiB"]) == 0
    assert "a step as" not in capsys.readouterr().out, "it fits undivided"
    assert main([*ON_DRIVE, "--memory", "1GiB", "--accum", "2"]) == 0
    said = capsys.readouterr().out
    assert "16 samples of a step" in said and "undivided, in one forward" in said, "micro-steps read weights again"


@pytest.mark.usefixtures("calibrated")
def test_fewer_samples_where_no_parts_fit(capsys: pytest.CaptureFixture[str]) -> None:
    net, tokens = made()
    batches = Batches(net, tokens)
    needs = estimate(net, 3, "nvme", live=batches.live(SAMPLES // 2, SAMPLES // 2)).host_nbytes
    assert main([*ON_DRIVE, "--memory", str(needs + 1000)]) == 0
    said = capsys.readouterr().out
    assert "8 samples do not fit" in said and "zcomm.linear_cross_entropy" in said
    assert "4 samples fit with zcomm.split_batch(model.blocks, parts=4), so a step is grad_accum=2" in said


@pytest.mark.usefixtures("calibrated")
def test_a_given_number_counts(capsys: pytest.CaptureFixture[str]) -> None:
    device = []
    for more in ([], ["--parts", "4"], ["--parts", "4", "--offload-activations", "nvme"], ["--model", "divided"]):
        words = [word.replace("made", more[1]) for word in ON_DRIVE] if more[:1] == ["--model"] else [*ON_DRIVE, *more]
        assert main(words) == 0
        said = capsys.readouterr().out
        (line,) = (line for line in said.splitlines() if line.split()[:3] == ["1", "3", "nvme"])
        device.append(float(line.split()[3]))
        assert ("split_batch(parts=4)" in said) == ("--parts" in more)
    assert device[2] <= device[1] < device[3] < device[0]


def test_ways_on_a_gpu(calibrated: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    machine = gpus.read(FakeNvml([FakeGpu()]), Path("/nowhere"))
    monkeypatch.setattr(gpus, "read", lambda: machine)
    gpu_speeds.save(FakeGpu().name, gpu_speeds.GpuSpeeds(1e13, 1e9, 1e9))
    count = ["plan", "--params", "1e9", "--stage", "3", "--offload", "cpu", "--world", "1", "--tokens", "32768"]
    assert main([*count, "--precision", "bf16", "--memory", "100GiB", "--parts", "4", "--gpu-memory", "8GiB"]) == 0
    gpu = capsys.readouterr().out.split("on 1 x")[1]
    rows = ways(gpu)
    assert [row["up"] for row in rows.values()] == ["16 s", "4 s"], "gathers of four micro-steps, and of one pass"
    assert [row["compute"] for row in rows.values()] == ["19.7 s", "26.2 s"], "forward again"
    assert rows["split_batch(parts=4)"]["limit"] == "compute" and "compute" in gpu
    batches = Batches(*made())
    needs = [batches.live(SAMPLES, parts).peak_nbytes() for parts in (WHOLE, 1)]
    memory = CONTEXT_NBYTES + sum(needs) // 2
    assert main([*PLAN, "--stage", "3", "--offload", "cpu", "--gpu-memory", str(memory)]) == 0
    gpu = capsys.readouterr().out.split("on 1 x")[1]
    rows = ways(gpu)
    assert [row["fits"] for row in rows.values()] == ["no: GPU", "yes"]
    assert "8 samples of a step on 1 rank, stage 3, offload cpu" in gpu and "model.blocks, parts=1), in one" in gpu
    assert main([*PLAN, "--stage", "3", "--offload", "cpu", "--gpu-memory", "80GiB"]) == 0
    assert "a step as" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([*ON_DRIVE, "--parts", "3"], "split_batch(parts=3): split_batch: module 0 (Block): the batch of 8"),
        ([*ON_DRIVE, "--parts", "0"], "--parts 0 is not above 0"),
        (["plan", "--params", "1e9", "--offload-activations", "cpu"], "--offload-activations needs --model"),
        (["plan", "--model", "test_plan_parts:without_inputs", "--parts", "2"], "needs a --model that returns the inp"),
    ],
)
@pytest.mark.usefixtures("calibrated")
def test_refusals(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2 and error in capsys.readouterr().err
