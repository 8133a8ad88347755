"""Planned reads of the drive: compared with those of real steps, and gathers of a ring, counted by hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from tiers import slow
from zcomm.demo.model import make_model
from zcomm.demo.options import DemoConfig
from zcomm.demo.train import make_optimizer, plan_of
from zcomm.planning import estimate, work_of
from zcomm.planning.gathers import BEGIN, BUSY, END, IDLE, USE, Use, count_gathers, trace
from zcomm.zero import Units
from zcomm.zero.layout.split_units import UnitChoice
from zcomm.zero.layout.unit_policy import choose_units
from zcomm.zero.rows.blocks import BLOCK_ROWS
from zcomm.zero.units.slot_ring import SlotRing

Run = Callable[..., list[Any]]
WIDTH, WORDS, BLOCKS = 64, 128, 3


class Block(nn.Module):
    """Four Linears of several sizes, and a norm for the root."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.c = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.d = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight.requires_grad_(not frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.d(torch.tanh(self.c(torch.relu(self.b(torch.tanh(self.a(self.norm(x))))))))


class Net(nn.Module):
    """A small model. recompute: checkpointed blocks. large: embedding and head are split into two blocks of rows.
    parts: of the batch in blocks."""

    def __init__(
        self, recompute: bool, frozen: bool = False, tied: bool = False, large: bool = False, parts: int = 0
    ) -> None:
        super().__init__()
        self.recompute, words = recompute, 2 * BLOCK_ROWS if large else WORDS
        self.embed = nn.Embedding(words, WIDTH)
        self.blocks = nn.ModuleList(Block(frozen) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        if parts:
            zcomm.split_batch(self.blocks, parts=parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = checkpoint(block, h, use_reentrant=False) if self.recompute else block(h)
        return self.head(h)


SMALL = Units(max_bytes=4 * WIDTH * WORDS)  # a unit for each Linear; the root has the norms
BY_ROWS = Units(max_bytes=4 * WIDTH * BLOCK_ROWS, rows=True)
CASES: list[tuple[dict[str, Any], str, int, Units]] = [
    ({"recompute": True}, "step", 1, SMALL),
    ({"recompute": True}, "forward", 1, SMALL),
    ({"recompute": True}, "backward", 1, SMALL),
    ({"recompute": True}, "step", 4, SMALL),
    ({"recompute": True}, "forward", 2, SMALL),
    ({"recompute": False}, "step", 1, SMALL),
    ({"recompute": False}, "backward", 1, SMALL),
    ({"recompute": True, "frozen": True}, "step", 1, SMALL),
    ({"recompute": False, "tied": True}, "forward", 1, SMALL),
    ({"recompute": True}, "step", 1, Units(resident=["blocks.1"])),
    ({"recompute": True, "large": True}, "backward", 1, BY_ROWS),
    ({"recompute": False, "parts": 2}, "forward", 1, SMALL),  # each part gathers the units inside of a block
]


def offload_of(update: Any) -> zcomm.Offload:
    return zcomm.Offload("nvme", "nvme", gradients="nvme", update=update)


def reads(folder: str) -> list[float]:
    """Return the bytes that a step reads in each case: a mean of two steps, because step() alternates its direction."""
    zcomm.init(timeout=60)
    found = []
    for kind, update, accumulation, units in CASES:
        model = Net(**kind)
        options = {"nvme_path": folder, "units": units, "grad_accum": accumulation}
        opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, offload=offload_of(update), lr=1e-3, **options)
        moved = []
        for _ in range(5):  # two are for learning; gathers after the last step count in the next one
            for _ in range(accumulation):
                x = torch.linspace(0, model.embed.num_embeddings - 1, 32).long().view(2, 16)
                opt.backward(model(x).square().mean())
                opt.step()
                opt.zero_grad()
            assert opt._parts is not None
            store: Any = opt._parts.store
            store.gather.synchronize()
            moved.append(opt.stats()["swap_read_nbytes"])
        opt.close()
        found.append((moved[-1] - moved[-3]) / 2)
    return found


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_every_read_is_planned(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    real = run_ranks(reads, world_size, str(tmp_path))
    for number, (kind, update, accumulation, units) in enumerate(CASES):
        with torch.device("meta"):
            model, x = Net(**kind), torch.zeros(2, 16, dtype=torch.int64)
        offload = offload_of(update)
        how = {"accumulation": accumulation, "units": units, "inputs": x}
        planned = estimate(model, 3, offload, world_size, "fp32", "sgd", **how).swap_read_nbytes  # type: ignore[arg-type]
        for read in real:
            assert read[number] == pytest.approx(planned, rel=0.01), CASES[number]


# --- the replay -----------------------------------------------------------------------------------------------------


def used(*units: int, backward: bool = False) -> list[Use]:
    """Return the uses of modules that run one after the other. In backward a unit is idle when the next one begins."""
    found: list[Use] = []
    for number, unit in enumerate(units):
        if backward and number:
            found.append((IDLE, units[number - 1]))
        found += [(USE, unit), (BUSY, unit)]
        found += [] if backward else [(IDLE, unit)]
    return [*found, (IDLE, units[-1])] if backward else found


def a_pass(forward: Sequence[int], *backward: list[Use]) -> list[Use]:
    """Return a micro-step, in which the root runs around all."""
    uses: list[Use] = [(BEGIN, 0), (BUSY, 0), *used(*forward), (END, 0), (IDLE, 0)]
    return uses + [use for part in backward for use in part]


PLAIN = a_pass((1, 2, 3, 4, 5), used(5, 4, 3, 2, 1, backward=True))
# One block of five. Backward enters its last module, runs the block's forward again, and goes on.
AGAIN = [(USE, 5), (BUSY, 5), *used(1, 2, 3, 4), (USE, 5)]
RECOMPUTED = a_pass((1, 2, 3, 4, 5), AGAIN, [(IDLE, 5)], used(4, 3, 2, 1, backward=True))
OPTIONS: list[tuple[list[Use], dict[str, Any], list[int]]] = [
    # Three slots: when backward begins, 5, 4 and 3 are gathered; 2 and 1 are gathered again.
    (PLAIN, {}, [1, 2, 2, 1, 1, 1]),
    # Two slots: only 5 and 4 are gathered then.
    (PLAIN, {"prefetch": 0}, [1, 2, 2, 2, 1, 1]),
    # Slots for all: one gather for each unit, also with accumulation.
    (PLAIN, {"prefetch": 3}, [1, 1, 1, 1, 1, 1]),
    (PLAIN, {"prefetch": 3, "accumulation": 7}, [1, 1, 1, 1, 1, 1]),
    # The second micro-step finds 1, 2, 3 and the root gathered: 4 and 5 are gathered, then 2 and 1 in backward.
    (PLAIN, {"accumulation": 2}, [1, 3, 3, 1, 2, 2]),
    (PLAIN, {"accumulation": 10}, [1, 11, 11, 1, 10, 10]),
    # If updates wait for a gather, nothing is read ahead: the same gathers.
    (PLAIN, {"reads_ahead": False}, [1, 2, 2, 1, 1, 1]),
    # 5 holds one of three slots from its prefetch on. 2 and 3, which are needed last, are freed for 4 and 5. 1 is still
    # gathered at recomputation; 2, 3 and 4 are gathered again. Then 2 and 1 are freed for 3 and 4.
    (RECOMPUTED, {}, [1, 2, 3, 2, 2, 1]),
    (RECOMPUTED, {"prefetch": 3}, [1, 1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("uses", "options", "wanted"), OPTIONS)
def test_gathers_of_a_ring(uses: list[Use], options: dict[str, Any], wanted: list[int]) -> None:
    choices = [UnitChoice(f"unit {number}", []) for number in range(6)]
    assert count_gathers(uses, choices, [4096] * 6, **options) == wanted


def test_sizes_of_slots_and_units_without_slots_count() -> None:
    names = ("root", "large", "small", "small", "kept", "small")
    choices = [UnitChoice(name, [], keep=name == "kept") for name in names]
    sizes = [4096, 3 * 4096, 4096, 4096, 4096, 4096]
    # Slots of 3, 1 and 1 pages: 2 is freed for 5, and 5 for 2 in backward. The large unit keeps its slot.
    assert count_gathers(PLAIN, choices, sizes) == [1, 1, 2, 1, 1, 1]


# --- the trace ------------------------------------------------------------------------------------------------------


def order_of(model: nn.Module, units: Units | None = None) -> list[str]:
    """Return the units in the order of their uses."""
    choices = choose_units(model, list(model.parameters()), units)
    uses = trace(model, choices, SlotRing([]), [torch.zeros(2, 16, dtype=torch.int64, device="meta")])
    return [choices[unit].name.removeprefix("blocks.") for word, unit in uses if word == USE and unit]


def test_the_trace_shows_what_is_recomputed() -> None:
    with torch.device("meta"):
        plain, recomputed = Net(False), Net(True)
    forward = [f"{block}.{name}" for block in range(BLOCKS) for name in "abcd"]
    # Backward of an embedding reads no weights.
    assert order_of(plain, SMALL) == ["embed", *forward, "head", "head", *forward[::-1]]
    backward = []
    for block in reversed(range(BLOCKS)):
        own = [f"{block}.{name}" for name in "abcd"]
        backward += [own[-1], *own, *own[-2::-1]]
    assert order_of(recomputed, SMALL) == ["embed", *forward, "head", "head", *backward]
    assert all(param.grad is None for param in recomputed.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in recomputed.modules())


@dataclass
class Output:
    """An output object like transformers' ones."""

    logits: torch.Tensor


class Returns(nn.Module):
    """A model that returns its output in another form."""

    def __init__(self, way: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.net, self.way = Net(True), way

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.way(self.net(tokens))


def read_of(way: Callable[[torch.Tensor], Any], traced: bool = True) -> int:
    with torch.device("meta"):
        model, tokens = Returns(way), torch.zeros(2, 16, dtype=torch.int64)
    offload = zcomm.Offload("nvme", "nvme")
    return estimate(model, 3, offload, units=SMALL, inputs=tokens if traced else None).swap_read_nbytes


def test_outputs_that_backward_cannot_begin_with_are_not_taken_for_a_forward_alone() -> None:
    whole = read_of(lambda x: x)
    assert read_of(lambda x: Output(x)) == read_of(lambda x: {"logits": [x]}) == whole
    without = read_of(lambda x: x, traced=False)
    assert without != whole
    for way in (lambda x: None, lambda x: x.argmax(-1), lambda x: x.detach()):
        assert read_of(way) == without


@pytest.mark.usefixtures("world_of_one")
def test_a_model_that_an_optimizer_trains_is_not_traced(tmp_path: Path) -> None:
    """The optimizer would mistake the gradients of the trace for a batch's gradients."""
    model, tokens = Net(False), torch.zeros(2, 16, dtype=torch.int64)
    opt = zcomm.ZeroOptimizer(model, stage=3, offload="nvme", nvme_path=tmp_path)
    with pytest.raises(ValueError, match="Net has a ZeroOptimizer"):
        estimate(model, 3, "nvme", inputs=tokens)
    with pytest.raises(ValueError, match="Net has a ZeroOptimizer"):
        work_of(model, tokens)
    assert estimate(model, 3, "nvme").swap_read_nbytes > 0
    opt.close()
    assert work_of(model, tokens)


# --- the demo -------------------------------------------------------------------------------------------------------


def within(folder: str) -> tuple[Any, Any, bool]:
    """Return memory of the demo's optimizer within a small limit, its plan, and whether the limit changed options."""
    zcomm.init(timeout=60)
    shape = {"model": "llama", "layers": 4, "heads": 8, "width": 256, "context": 32, "batch": 1, "size": "tiny"}
    options = {"stage": 3, "offload": "nvme", "nvme_path": [folder], "precision": "bf16", "bucket_mb": 16.0}
    training = {"steps": 1, "lr": 1e-3, "accum": 1, "clip": 0.0, "overlap": True, "seed": 1, "update": "backward"}
    rest = {"name": "x", "run_dir": folder, "world_size": 1, "quiet": True, "windows": 1, "sample_nbytes": 1}
    config = DemoConfig(**shape, **options, **training, **rest, memory="100MiB")  # type: ignore[arg-type]
    model = make_model("llama", 4, 8, 256, 32)
    with pytest.raises(ValueError, match="too small") as raised:
        make_optimizer(model, config)
    (works,) = re.findall(r"memory='(\d+)MiB' works", str(raised.value))
    config = replace(config, memory=f"{int(works) + 8}MiB")
    opt = make_optimizer(model, config)
    chosen = opt.units.max_bytes is not None or callable(opt.offload.params) or opt.offload.fraction < 1
    found = opt.memory(), plan_of(config, opt).memory, chosen
    opt.close()
    return found


def test_the_demo_plans_what_a_limit_has_chosen(run_ranks: Run, tmp_path: Path) -> None:
    ((memory, planned, chosen),) = run_ranks(within, 1, str(tmp_path))
    assert memory == planned and chosen
