"""Units(max_bytes=): which modules become units, the bits of unsplit ones, bounded slots, and clear errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import simulated
import zcomm
from test_corners import KINDS, Net, loss_of
from test_corners import train as train_kind
from tiers import long, slow
from zcomm.planning import estimate
from zcomm.zero.layout.split_units import SMALL
from zcomm.zero.layout.unit_policy import choose_units
from zcomm.zero.options import Units
from zcomm.zero.units.weights import UnitWeights
from zero_jobs import Case, digest, train_all

Run = Callable[..., list[Any]]
W = 16
LINEAR, PAIR = 4800, 4992  # bytes in test_corners: a Linear of a block; two of these with one weight


def units_of(net: nn.Module, options: Units | None = None, **more: Any) -> dict[str, list[str]]:
    """Names of units, and of the parameters of each."""
    names = {id(param): name for name, param in net.named_parameters()}
    choices = choose_units(net, list(net.parameters()), options or Units(**more))
    return {choice.name: [names[id(param)] for param in choice.params] for choice in choices}


class Layer(nn.Module):
    """A block with everything that is no Linear: norms, own vectors and matrices, lists that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((W,), 0.5))
        self.mix = nn.Parameter(torch.eye(W))
        self.extra = nn.ParameterList([torch.ones(W), torch.eye(W)])
        self.norm = nn.LayerNorm(W)
        self.attention = nn.MultiheadAttention(W, 2, batch_first=True)
        self.pair = nn.ModuleList([nn.Linear(W, 2 * W), nn.Linear(2 * W, W)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x) @ (self.mix * self.scale + self.extra[1]) * self.extra[0]
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.pair[1](torch.tanh(self.pair[0](x)))


class Model(nn.Module):
    """Layers between an embedding and a head with a bias, which are tied; a table of positions of the model's own."""

    def __init__(self, tied: bool = True, recomputed: str = "", words: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, W)
        self.positions = nn.Parameter(torch.randn(8, W) * 0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.norm = nn.LayerNorm(W)
        self.head = nn.Linear(W, words)
        self.recomputed = recomputed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.recomputed == "reentrant") if self.recomputed else layer(x)
        return self.head(self.norm(x))


ATTENTION = 4 * (4 * W * W + 4 * W)


def test_blocks_are_split_until_they_fit() -> None:
    whole = units_of(Model())
    assert list(whole) == ["root", "layers.0", "layers.1", "layers.2"]
    assert units_of(Model(), max_bytes=2**20) == whole, "all fit, as they are"
    found = units_of(Model(), max_bytes=ATTENTION)
    assert found["layers.0.attention"] == [n for n in whole["layers.0"] if "attention" in n], "it reads its child"
    assert found["layers.0.pair.0"] == ["layers.0.pair.0.weight", "layers.0.pair.0.bias"], "a list is not called"
    assert found["layers.0"] == [f"layers.0.{n}" for n in ("scale", "mix", "extra.0", "extra.1")], "what a block has"
    assert {"layers.0.norm.weight", "norm.bias", "positions", "embed.weight", "head.bias"} <= set(found["root"])
    every = sorted(name for names in found.values() for name in names)
    assert every == sorted(name for name, _ in Model().named_parameters()), "each once"


def test_the_root_gives_away_what_it_has_no_room_for() -> None:
    found = units_of(Model(tied=False), max_bytes=ATTENTION)
    assert found["head"] == ["head.weight", "head.bias"] and "embed.weight" in found["root"], "one of two is enough"
    found = units_of(Net("plain"), max_bytes=LINEAR)
    assert found["root"] == ["head.weight"] and list(found)[1:3] == ["embed", "blocks.0.up"]
    found = units_of(Net("tied"), max_bytes=LINEAR)
    assert found["root"] == ["blocks.1.up.weight"], "in two units, which together are too large"
    assert found["embed, head"] == ["embed.weight"] and found["blocks.1.up"] == ["blocks.1.up.bias"]
    found = units_of(Net("tied"), max_bytes=PAIR)
    assert found["blocks.1.up, blocks.3.up"] == ["blocks.1.up.weight", "blocks.1.up.bias", "blocks.3.up.bias"]
    deep = nn.Sequential(*(nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)) for _ in range(40)))
    nbytes = 4 * 65 * 64
    found = units_of(deep, max_bytes=nbytes)
    assert len([name for name in found["root"] if ".0." in name]) == 64 and len(found) == 1 + 40 + 8, "full with norms"


def test_what_is_small_is_the_roots() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.expert = nn.Linear(64, 2, bias=False), nn.Linear(64, 64, bias=False)
            self.other = nn.Linear(64, 3, bias=False)

    nbytes = 4 * 64 * 64
    assert 4 * 128 <= nbytes * SMALL < 4 * 192
    found = units_of(nn.Sequential(Routed(), Routed()), max_bytes=nbytes)
    assert found["root"] == ["0.router.weight", "1.router.weight"]
    assert list(found)[1:4] == ["0.expert", "0.other", "1.expert"]


def test_beside_the_other_options() -> None:
    net = Net("plain")
    found = units_of(net, Units(resident=["blocks.1"], max_bytes=LINEAR))
    assert "blocks.1" in found and "blocks.0" not in found, "kept blocks are not split"
    found = units_of(net, Units(min_bytes=2098, max_bytes=9000))
    assert {"blocks.0.up", "blocks.0.down"} <= set(found), "joined they would be too large"
    assert "blocks.0.up" not in units_of(net, Units(min_bytes=2098, max_bytes=9504))
    one = nn.Sequential(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))))  # of 288 bytes each
    found = units_of(one, Units(["0"], 420, max_bytes=600))
    assert list(found) == ["root", "0.0 to 0.1", "0.2 to 0.3"], "neighbours of one split block"
    found = units_of(net, Units(["blocks", "head"], max_bytes="4800B"))
    assert list(found)[:3] == ["root", "blocks.0.up", "blocks.0.down"] and list(found)[-1] == "head"
    choices = choose_units(net, list(net.parameters()), Units(max_bytes=LINEAR), itemsize=2)
    assert [choice.name for choice in choices][1:] == [f"blocks.{i}" for i in range(5)], "bytes of training count"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Units(max_bytes="64 potatoes"), "Units: max_bytes='64 potatoes' is not a size such as 5GB or 512MiB"),
        (lambda: Units(max_bytes=0), "Units: max_bytes=0 is not a size"),
        (lambda: Units(max_bytes=-5), "Units: max_bytes=-5 is not a size"),
        (lambda: Units(max_bytes=True), "Units: max_bytes=True is not a size"),
        (lambda: Units(max_bytes=1.5), "Units: max_bytes=1.5 is not a size"),
        (lambda: Units(min_bytes=1048576, max_bytes="1MB"), "Units: min_bytes=1048576 is more than max_bytes='1MB'"),
        (
            lambda: units_of(Net("plain"), max_bytes=LINEAR - 1),
            "Units: max_bytes=4799, but blocks.0.up (Linear) has 4800 bytes of parameters and cannot be split at a "
            "module inside of it: max_bytes must be at least 4800 for this model",
        ),
        (
            lambda: units_of(Model(), max_bytes=ATTENTION - 1),
            f"but layers.0.attention (MultiheadAttention) has {ATTENTION} bytes",
        ),
        (lambda: units_of(nn.ParameterList([torch.ones(9)]), max_bytes=8), "the root unit (0) has 36 bytes"),
    ],
)
def test_wrong_sizes(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)


def differ() -> str:
    comm = zcomm.init(timeout=20)
    try:
        zcomm.ZeroOptimizer(Net("plain"), stage=3, units=Units(max_bytes=LINEAR + comm.rank))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_sizes(run_ranks: Run) -> None:
    for said in run_ranks(differ, 2):
        assert "units: max_bytes is 4801, not 4800" in said


# --- the same bits --------------------------------------------------------------------------------------------------

WHOLE = Case(3, "nvme", 0.02, share_parameters=False)
SPLIT = [
    replace(WHOLE, max_bytes=LINEAR),
    replace(WHOLE, max_bytes=PAIR, prefetch=0),
    replace(WHOLE, max_bytes=LINEAR, prefetch=3, offload=None),
]


def train_kinds(folder: str) -> dict[str, list[dict[str, Any]]]:
    return {kind: [train_kind(case, folder, kind, "one", 3) for case in (WHOLE, *SPLIT)] for kind in KINDS}


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [long(1), 2])
def test_awkward_models_have_the_same_bits(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for kinds in run_ranks(train_kinds, world_size, str(tmp_path), timeout_s=280):
        for kind, (whole, *split) in kinds.items():
            assert len(set(whole["losses"])) > 2, f"{kind}: it learns"
            for case, result in zip(SPLIT, split, strict=True):
                assert result == whole, f"{kind}, {case}"


def test_a_gpt_has_the_same_bits(run_ranks: Run, tmp_path: Path) -> None:
    cases = [Case(2), Case(3, "nvme", max_bytes=49152), Case(3, "nvme", precision="bf16", max_bytes=24576)]
    cases += [Case(2, precision="bf16"), Case(3, share_parameters=False, max_bytes=60000)]
    for results in run_ranks(train_all, 2, cases, str(tmp_path), 6):
        assert results[1] == results[0] == results[4] and results[2] == results[3] != results[0]


def train_model(
    model: nn.Module, units: Units, folder: str, rank: int = 0, steps: int = 3, **options: Any
) -> tuple[list[str], str]:
    opt = zcomm.ZeroOptimizer(
        model, lr=1e-2, clip_norm=1.0, stage=3, offload="nvme", nvme_path=folder, units=units, **options
    )
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    found = losses, digest(opt.full_state_dict())
    opt.close()
    return found


def train_forms(folder: str) -> list[list[Any]]:
    rank, found = zcomm.init(timeout=60).rank, []
    for make in (Model, lambda: Model(False), lambda: Model(True, "plain"), lambda: Model(False, "reentrant"), Hooked):
        ends: list[Any] = []
        for limit in (None, ATTENTION):
            torch.manual_seed(0)
            ends.append(train_model(make(), Units(max_bytes=limit), folder, rank))
        found.append(ends)
    return found


class Hooked(Model):
    """A program's hooks read and replace attributes of modules, before and after their call."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.pair[0].register_forward_pre_hook(lambda module, args: (args[0] * module.weight.mean(),))
            layer.pair[1].register_forward_hook(lambda module, args, out: out + module.weight.sum(1))
            nn.utils.parametrizations.weight_norm(layer.pair[1])
        nn.utils.weight_norm(self.head)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_blocks_of_every_form_have_the_same_bits(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for forms in run_ranks(train_forms, world_size, str(tmp_path)):
        for number, (whole, split) in enumerate(forms):
            assert whole == split and len(set(whole[0])) == 3, number


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("recomputed", ["", "plain"])
def test_parts_inside_of_parts_on_a_device(tmp_path: Path, recomputed: str, prefetch: int) -> None:
    """A block with parameters of its own is in use around its parts, which may have the same slot."""
    found = []
    for limit in (None, ATTENTION):
        torch.manual_seed(0)
        if limit is not None:
            simulated.play(0.0005)
        try:
            units = Units(max_bytes=limit)
            found.append(train_model(Model(False, recomputed), units, str(tmp_path), prefetch=prefetch))
        finally:
            simulated.stop()
    assert found[0] == found[1]
    zcomm.shutdown()


class Functional(nn.Module):
    """Its block uses a child's weight and never calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, W)
        self.layers = nn.ModuleList(Parent() for _ in range(3))
        self.head = nn.Linear(W, 40, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x) if layer.reads else checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


class Parent(nn.Module):
    reads = True  # weights by other ways than F.linear, too

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(W, 2 * W), nn.Linear(2 * W, 2 * W)
        self.last = nn.Linear(2 * W, W, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.first.weight, self.first.bias)
        y = torch.tanh(self.second(y @ self.second.weight.t() if self.reads else y))
        return x + (y @ self.first.weight if self.reads else F.linear(y, self.last.weight))


def test_a_weight_that_its_parent_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions of torch use it without a copy, also in a block that is recomputed."""
    monkeypatch.setattr(Parent, "reads", False)
    found = []
    for limit in (None, 4224):
        torch.manual_seed(0)
        if limit is not None:
            monkeypatch.setattr(UnitWeights, "whole", lambda *_: pytest.fail("a copy"))
        found.append(train_model(Functional(), Units(max_bytes=limit), str(tmp_path), prefetch=0))
    assert found[0] == found[1]
    zcomm.shutdown()


def test_a_weight_that_its_parent_reads_is_copied_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = []
    for units in (Units(), Units(max_bytes=4224), Units(resident=True, max_bytes=4224)):
        torch.manual_seed(0)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "zcomm"):
            found.append(train_model(Functional(), units, str(tmp_path)))
        said = [record.getMessage() for record in caplog.records if "while its module" in record.getMessage()]
        assert len(said) == (units == Units(max_bytes=4224)), said
        assert not said or said[0].startswith("layers.0.second.weight: t() uses the weight while its module, unit ")
    assert found[0] == found[1] == found[2]
    zcomm.shutdown()


class Experts(nn.Module):
    """A mixture of experts: ``chosen`` decides which run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, W)
        self.experts = nn.ModuleList(nn.Sequential(*(nn.Linear(W, W) for _ in range(3))) for _ in range(4))
        self.head = nn.Linear(W, 40)
        self.chosen: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in self.chosen:
            x = x + self.experts[number](x)
        return self.head(x)


def train_experts(folder: str, apart: bool, units: Units) -> list[Any]:
    comm, ends = zcomm.init(timeout=30), []
    for limit in (units, Units(max_bytes=2720)):
        torch.manual_seed(0)
        model = Experts()
        model.chosen = [2, 0, 2] if comm.rank == 0 or not apart else [2, 1]
        ends.append(train_model(model, limit, folder, comm.rank))
    return ends


def test_experts_that_some_steps_skip(run_ranks: Run, tmp_path: Path) -> None:
    for world_size in (1, 2):
        for whole, split in run_ranks(train_experts, world_size, str(tmp_path), False, Units()):
            assert whole == split
    for result in run_ranks(train_experts, 2, str(tmp_path), True, Units(max_bytes=2720), check=False):
        assert result.error is not None and "CollectiveMismatch" in result.error.kinds, result.describe()
        assert "experts.0.0" in result.error.message and "experts.1.0" in result.error.message
        assert "all ranks must run the same modules in the same order" in result.error.message


# --- memory ---------------------------------------------------------------------------------------------------------


def measure(folder: str) -> list[Any]:
    comm, found = zcomm.init(timeout=60), []
    for limit in (None, "10KB", 6800):  # embedding and head have 6800 together
        model = Model(words=100)
        units = Units(max_bytes=limit)
        opt = zcomm.ZeroOptimizer(model, stage=3, offload="nvme", nvme_path=folder, units=units, lr=1e-2)
        read = []
        for _ in range(4):
            model(torch.ones(2, 8, dtype=torch.int64)).sum().backward()
            opt.step()
            opt.zero_grad()
            assert opt._live.swap is not None
            opt._live.swap.wait()
            read.append(opt.stats()["swap_read_nbytes"])
        planned = estimate(Model(words=100), 3, "nvme", comm.world_size, units=units)
        found.append((opt.memory(), len(opt._live.store.memory.slots), planned, read))
        opt.close()
    return found


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_slots_are_bounded_and_planned(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(measure, world_size, str(tmp_path)):
        for memory, slots, planned, read in found:
            assert slots <= 4, "what runs, what is around it, what ran before, what comes"
            assert memory == planned.memory or slots == 4
            assert read[-1] - read[-2] <= planned.swap_read_nbytes + 4096 * 100
        whole, split, smaller = (planned for _, _, planned, _ in found)
        assert split.memory["device"]["slots"] < whole.memory["device"]["slots"]
        assert smaller.swap_read_nbytes > split.swap_read_nbytes, "the tied weight is read for both of its modules"


class Uneven(nn.Module):
    """Linears of three sizes, the largest first and last."""

    def __init__(self) -> None:
        super().__init__()
        self.order = [5, 1, 1, 2, 1, 1, 1, 2, 1, 1, 5]
        self.blocks = nn.ModuleList(nn.Linear(64, 64 * size, bias=False) for size in self.order)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens, 64).float()
        for block in self.blocks:
            x = torch.tanh(block(x).unflatten(-1, (-1, 64)).sum(-2))
        return x


def train_uneven(prefetch: int) -> tuple[list[int], int]:
    zcomm.init(timeout=60)
    model = Uneven()
    opt = zcomm.ZeroOptimizer(model, stage=3, share_parameters=False, prefetch=prefetch, units=[nn.Linear])
    store: Any = opt._live.store
    gathered: list[int] = []
    fill = store.gather.fill

    def filled(unit: Any, *args: Any) -> Any:
        gathered.append(unit.index)
        return fill(unit, *args)

    store.gather.fill = filled
    tokens = torch.randint(0, 40, (2, 8), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        gathered.clear()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        opt.step()
        opt.zero_grad()
    ring = store.memory.slot_nbytes
    opt.close()
    return gathered, ring


@pytest.mark.parametrize(("world_size", "prefetch"), [(1, 0), (1, 1), (2, 1), (1, 3)])
def test_slots_have_the_sizes_of_the_largest_units(run_ranks: Run, world_size: int, prefetch: int) -> None:
    unit = 64 * 64 * 4
    for gathered, ring in run_ranks(train_uneven, world_size, prefetch):
        sizes = sorted(Uneven().order, reverse=True)[: prefetch + 2]
        assert ring == unit * sum(sizes), "no slot was added"
        assert len(gathered) <= 2 * len(Uneven().order), "none is gathered twice for one use"


def test_an_embedding_is_not_gathered_for_backward() -> None:
    net = Net("plain")
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, units=Units(max_bytes=LINEAR), prefetch=0)
    gathers: list[str] = []
    store: Any = opt._live.store
    fill = store.gather.fill
    store.gather.fill = lambda unit, *args: (gathers.append(unit.name), fill(unit, *args))[1]
    loss_of(net, 0, 0).backward()
    assert gathers.count("embed") == 1 and gathers.count("blocks.0.up") == 2
    opt.close()
    zcomm.shutdown()
