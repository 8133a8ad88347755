"""Unit-wise stage 3 with the caller's options: given, joined, kept, prefetched by bytes; and orders that change."""

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

import zcomm
from test_corners import KINDS, WIDTH, Block, Net, loss_of
from tiers import long
from zcomm.planning import estimate
from zcomm.zero.layout.unit_policy import choose_units
from zcomm.zero.options import Units, ahead_of, slot_count
from zcomm.zero.sharded.param import ShardedParameter
from zero_jobs import digest

Run = Callable[..., list[Any]]
WAYS: list[Any] = [
    None,
    [nn.Linear, "embed"],
    ["blocks.1", "blocks.3", "Embedding"],
    Units(min_bytes=20972, resident=True),
    Units(resident=["blocks.0", "blocks.4"], prefetch_bytes=31458),
    Units([Block], min_bytes=10486, prefetch_bytes=0),
    Units(["Block", "head"], prefetch_bytes=1048576),
]


def units_of(net: nn.Module, options: Units) -> list[str]:
    choices = choose_units(net, list(net.parameters()), options)
    return [choice.name + ("!" if choice.keep else "") for choice in choices]


def test_which_units() -> None:
    net = Net("plain")  # blocks of 9504 bytes
    assert units_of(net, Units()) == ["root", *(f"blocks.{i}" for i in range(5))]
    assert units_of(net, Units(["blocks.1", net.head])) == ["root", "blocks.1", "head"]
    assert units_of(net, Units([nn.Linear]))[:4] == ["root", "blocks.0.up", "blocks.0.down", "blocks.1.up"]
    assert units_of(net, Units([Block, nn.Linear])) == [*(units_of(net, Units())), "head"], "the outermost"
    assert units_of(net, Units(min_bytes=10486)) == ["root", "blocks.0 to blocks.1", "blocks.2 to blocks.3", "blocks.4"]
    assert units_of(net, Units(min_bytes=9437184, resident=["blocks.2"])) == [
        "root", "blocks.0 to blocks.1", "blocks.2!", "blocks.3 to blocks.4"
    ]  # fmt: skip
    assert units_of(net, Units(resident=True))[1:] == [f"blocks.{i}!" for i in range(5)]
    tied = choose_units(Net("tied"), list(Net("tied").parameters()), Units(["embed", "head"]))
    assert [unit.name for unit in tied] == ["root"], "what two units use is the root's"


class Mix(nn.Module):
    """A layer of experts, of which each rank chooses one independently."""

    def __init__(self, router: bool = True) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, WIDTH) if router else nn.Identity()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        return x + torch.tanh(self.experts[expert](self.router(x)))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixes, self.last = nn.Linear(WIDTH, WIDTH), nn.ModuleList([Mix(), Mix()]), Mix(router=False)

    def forward(self, x: torch.Tensor, expert: int) -> torch.Tensor:
        x = self.first(x)
        for mix in (*self.mixes, self.last):
            x = mix(x, expert)
        return x


EXPERTS = [f"last.experts.{number}" for number in range(4)]


def test_leaves_are_units() -> None:
    net, nbytes = Experts(), 4 * (WIDTH * WIDTH + WIDTH) * 4
    assert units_of(net, Units()) == ["root", "mixes.0", "mixes.1", *EXPERTS]
    for leaf in ([Mix], ["Mix"], [net.last], ["last"]):
        assert units_of(net, Units(leaf=leaf)) == ["root", "mixes.0", "mixes.1", "last"]
    assert units_of(net, Units(leaf=["last.experts.1"])) == ["root", "mixes.0", "mixes.1", *EXPERTS], (
        "it is one already"
    )
    assert units_of(net, Units(["first"], leaf=["last"])) == ["root", "first", "last"]
    assert units_of(net, Units(leaf=[net])) == units_of(net, Units(leaf=[Experts])) == ["root"]
    split = units_of(net, Units(max_bytes=nbytes, leaf=["last"]))
    assert "last" in split and not set(EXPERTS) & set(split) and "mixes.0.experts.0" in split
    for leaf in ([Mix], [net]):
        with pytest.raises(ValueError, match=f"max_bytes={nbytes - 1}, but .* cannot be split"):
            units_of(net, Units(max_bytes=nbytes - 1, leaf=leaf))
    with pytest.raises(ValueError, match="leaf: 'gone' is not a module inside of the model"):
        units_of(net, Units(leaf=["gone"]))
    with pytest.raises(ValueError, match="leaf='last' must be a list"):
        Units(leaf="last")


def experts_by_rank(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    for offload, update in ((None, "step"), ("nvme", "step"), ("nvme", "forward")):
        torch.manual_seed(2)
        plain, net = Experts().double(), Experts()
        net.load_state_dict(plain.state_dict())
        plain.load_state_dict(net.state_dict())
        opt = zcomm.ZeroOptimizer(
            net, "sgd", lr=0.5, stage=3, offload=zcomm.Offload(offload, offload, update=update), nvme_path=folder,
            share_parameters=False, units=Units(leaf=[Mix]),
        )  # fmt: skip
        for step in range(3):
            for rank in range(2):
                x = torch.arange(2 * WIDTH, dtype=torch.float64).view(2, WIDTH).sin() * (1 + rank)
                expert = (2 * rank + step) % 4
                (plain(x, expert).square().mean() / 2).backward()
                if rank == comm.rank:
                    net(x.float(), expert).square().mean().backward()
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                for param in plain.parameters():
                    if param.grad is not None:
                        param -= 0.5 * param.grad
                        param.grad = None
        for name, value in opt.full_state_dict().items():
            assert torch.allclose(value.double(), plain.state_dict()[name], atol=1e-6), (offload, update, name)
        opt.close()


def test_ranks_may_use_different_modules_of_a_leaf(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(experts_by_rank, 2, str(tmp_path))


class Backbone(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, WIDTH)
        self.layers = nn.ModuleList(Block(False) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Attributes(nn.Module):
    """Large blocks next to one small list."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(False), Block(False)
        self.head = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 8))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(tokens, WIDTH).float()
        return self.head(self.second(self.first(x)))


def test_lists_of_different_things_are_looked_into() -> None:
    net = nn.Sequential(Backbone(3), nn.Linear(WIDTH, 8))
    assert units_of(net, Units()) == ["root", "0.layers.0", "0.layers.1", "0.layers.2", "1"]
    stages = nn.ModuleList(nn.Sequential(*(nn.Linear(n, n) for _ in range(2))) for n in (2, 3))
    assert units_of(stages, Units()) == ["root", "0.0", "0.1", "1.0", "1.1"]
    same = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(2))
    assert units_of(same, Units()) == ["root", "0", "1"], "the outermost that are repeated"
    mixed = nn.ModuleList([Block(False), Backbone(2), Backbone(2)])
    assert units_of(mixed, Units()) == ["root", "0", "1", "2"]
    plain = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)))
    assert units_of(plain, Units()) == ["root", "0", "2"], "nothing is repeated"


def train_apart(folder: str) -> list[tuple[list[str], str]]:
    """Train in stage 2, by automatic units, and by given units."""
    comm = zcomm.init(timeout=60)
    found = []
    given: dict[str, list[str]] = {"Sequential": ["0", "1"], "Attributes": ["Block", "head"]}
    for make in (lambda: nn.Sequential(Backbone(5), nn.Linear(WIDTH, 8)), Attributes):
        for stage, offload, way in ((2, None, None), (3, None, None), (3, "nvme", None), (3, None, "given")):
            torch.manual_seed(3)
            net: Any = make()
            opt = zcomm.ZeroOptimizer(
                net, stage=stage, offload=offload, nvme_path=folder, share_parameters=False, lr=1e-2, prefetch=0,
                units=given[type(net).__name__] if way else None,
            )  # fmt: skip
            losses = []
            for step in range(3):
                tokens = torch.randint(0, 8, (3, 5), generator=torch.Generator().manual_seed(10 * step + comm.rank))
                loss = F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten())
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.item().hex())
            found.append((losses, digest(opt.full_state_dict())))
            opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_bit_depends_on_what_is_looked_into(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(train_apart, world_size, str(tmp_path)):
        for of_model in (found[:4], found[4:]):
            assert of_model == of_model[:1] * 4 and len(set(of_model[0][0])) == 3


def test_large_units_are_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("zcomm.zero.layout.unit_policy.LARGE_NBYTES", 2**12)

    def said(net: nn.Module, units: Any = None, **options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, "zcomm"):
            opt = zcomm.ZeroOptimizer(net, stage=3, units=units, **{"share_parameters": False, **options})
        opt.close()
        return [record.getMessage() for record in caplog.records]

    (text,) = said(Attributes())
    assert text.startswith("stage 3: unit root has 0 MiB of the model's 0; a unit is whole") and "units=" in text
    assert not said(Attributes(), [Block]), "the caller has chosen"
    assert not said(Attributes(), share_parameters=True), "nothing is gathered"
    (text,) = said(nn.Sequential(Block(False), nn.Linear(WIDTH, 2)))
    assert "unit 0 has" in text
    assert not said(nn.Sequential(Backbone(5), nn.Linear(WIDTH, 8))), "each is a small part"
    monkeypatch.undo()
    assert not said(Attributes()), "a tiny model"
    zcomm.shutdown()


def test_how_far_ahead() -> None:
    sizes = [9, 1, 1, 1, 5, 5]
    assert [slot_count(sizes[1:], 1, limit) for limit in (None, 0, 1, 3, 7, 100)] == [3, 2, 3, 5, 5, 5]
    assert slot_count([], 4, None) == 0 and slot_count([3], 4, None) == 1
    assert ahead_of([1, 2, 3, 4, 5], sizes, 2, None) == [1, 2]
    assert [len(ahead_of([1, 2, 3, 4, 5], sizes, 2, limit)) for limit in (0, 1, 2, 7, 8, 99)] == [0, 1, 2, 3, 4, 5]


def train(kind: str, units: Any, folder: str, offload: str | None, precision: str = "fp32") -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    torch.manual_seed(comm.rank)
    net = Net(kind)
    opt = zcomm.ZeroOptimizer(
        net, stage=3, offload=offload, nvme_path=folder, lr=1e-2, clip_norm=1.0, bucket_mb=0.02, units=units,
        precision=precision, share_parameters=False,
    )  # fmt: skip
    found, want = opt.memory(), None
    options = units if isinstance(units, Units) else Units(units)
    if offload == "nvme":
        model = Net(kind)
        want = estimate(model, 3, "nvme", comm.world_size, precision, bucket_mb=0.02, units=options).memory
        want["device"]["slots"] = found["device"]["slots"] if comm.world_size > 1 else want["device"]["slots"]
    losses = []
    for step in range(4):
        loss = loss_of(net, comm.rank, step)
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    result = {"losses": losses, "weights": digest(opt.full_state_dict()), "planned": want is None or want == found}
    opt.close()
    return result


def train_all(kinds: list[str], folder: str) -> dict[str, list[dict[str, Any]]]:
    places = [(None, "fp32"), ("nvme", "fp32")]
    return {k: [train(k, way, folder, *place) for way in WAYS for place in places] for k in kinds}


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("world_size", "kinds"), [long(1, KINDS), (2, ["tied", "outside", "lora", "twice", "reentrant", "inner", "frozen"])]
)
def test_no_bit_depends_on_units(run_ranks: Run, tmp_path: Path, world_size: int, kinds: list[str]) -> None:
    for rank, found in enumerate(run_ranks(train_all, world_size, kinds, str(tmp_path), timeout_s=280)):
        for kind, results in found.items():
            assert len(set(results[0]["losses"])) > 3, f"{kind}: it learns"
            for number, result in enumerate(results):
                assert result["planned"], f"rank {rank}, {kind}, {WAYS[number // 2]}: other bytes than planned"
                assert result == results[0], f"rank {rank}, {kind}, {WAYS[number // 2]}"


# --- times of gathers -----------------------------------------------------------------------------------------------


class Turns(nn.Module):
    """Blocks in an order that the program may change."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
        self.order = list(range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            x = torch.tanh(self.blocks[index](x))
        return x


def train_step(model: Turns, opt: zcomm.ZeroOptimizer) -> None:
    model(torch.ones(1, 64)).sum().backward()
    opt.step()
    opt.zero_grad()


def counted(
    model: Turns, opt: zcomm.ZeroOptimizer, orders: list[list[int]], step: Callable[..., None] = train_step
) -> list[tuple[int, int]]:
    """Return per step: gathers, and the number of them that the main thread waited for from their start."""
    store: Any = opt._live.store
    gathers: list[str] = []
    late: list[str] = []
    fill, ensure = store.gather.fill, store.life.ensure

    def watched_fill(unit: Any, *args: Any) -> Any:
        gathers.append(unit.name)
        return fill(unit, *args)

    def watched_ensure(unit: Any) -> None:
        if unit.state.name == "SHARDED" and unit.index:
            late.append(unit.name)
        ensure(unit)

    store.gather.fill, store.life.ensure = watched_fill, watched_ensure
    found = []
    for order in orders:
        model.order = order
        gathers.clear()
        late.clear()
        step(model, opt)
        found.append((len([name for name in gathers if name != "root"]), len(late)))
    return found


ORDER, OTHER = [0, 1, 2, 3, 4, 5], [3, 5, 0, 4, 1, 2]


@pytest.mark.parametrize("units", [None, Units(prefetch_bytes=16778), Units(prefetch_bytes=41944)])
def test_the_order_is_learned_and_learned_again(units: Any, tmp_path: Path) -> None:
    model = Turns()
    opt = zcomm.ZeroOptimizer(model, stage=3, share_parameters=False, units=units)
    late = [late for _, late in counted(model, opt, [ORDER, ORDER, ORDER, OTHER, OTHER, OTHER, ORDER, ORDER])]
    assert late[0] >= 8, "nothing is known in the first step"
    assert late[1] == late[2] == 1, "afterwards all but the first is gathered ahead"
    assert late[3] > 4, "not so in another order"
    assert late[4] == late[5] == 1, "which is then learned"
    assert late[6] > 4 and late[7] == 1
    opt.close()
    zcomm.shutdown()


def parts_alone(model: Turns, opt: zcomm.ZeroOptimizer) -> None:
    """Run parts of the model, but never the model itself."""
    model.forward(torch.ones(1, 64)).sum().backward()
    opt.step()
    opt.zero_grad()


def parts_without_gradients(model: Turns, opt: zcomm.ZeroOptimizer) -> None:
    with torch.no_grad():
        model.forward(torch.ones(1, 64))


def test_the_order_is_learned_where_only_submodules_are_called() -> None:
    model = Turns()
    opt = zcomm.ZeroOptimizer(model, stage=3, share_parameters=False)
    late = [late for _, late in counted(model, opt, [ORDER] * 4, parts_alone)]
    assert late[0] >= 8 and late[1:] == [1, 1, 1]
    late = [late for _, late in counted(model, opt, [ORDER] * 8, parts_without_gradients)]
    assert late[0] >= 6 and max(late[1:]) <= 1
    assert len(opt._live.store.life.order.trace) == 6, "not all that there was since the last step"
    late = [late for _, late in counted(model, opt, [ORDER] * 2, parts_alone)]
    assert max(late) <= 1, "the order with gradients is still known"
    opt.close()
    zcomm.shutdown()


def test_kept_units_are_gathered_once(tmp_path: Path) -> None:
    found = {}
    for units in (None, Units(resident=["blocks.0", "blocks.1"]), Units(resident=True)):
        model = Turns()
        opt = zcomm.ZeroOptimizer(model, stage=3, offload="nvme", nvme_path=tmp_path, prefetch=0, units=units)
        seen: list[str] = []
        first = opt._live.store.units[1]
        model.blocks[5].register_forward_hook(lambda *_, unit=first, s=seen: s.append(unit.state.name))
        found[str(units)] = (counted(model, opt, [ORDER])[0][0], len(opt._live.store.memory.slots))
        assert seen == ["GATHERED" if units else "SHARDED"], "whole until the step"
        assert all(isinstance(p, ShardedParameter) for p in model.parameters()), "and no longer"
        opt.close()
    zcomm.shutdown()
    plain, two, every = found.values()
    assert plain == (10, 2), "6 forward; backward finds the last two still there"
    assert two == (8, 2)
    assert every == (6, 0)


# --- wrong input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Units(min_bytes=-1), "Units: min_bytes=-1 is not a size"),
        (lambda: Units(max_bytes=9, min_bytes="4 cats"), "min_bytes='4 cats' is not a size"),
        (lambda: Units(prefetch_bytes=float("nan")), "prefetch_bytes=nan is not a size"),
        (lambda: Units(prefetch_bytes=True), "prefetch_bytes=True is not a size"),
        (lambda: Units([]), "blocks=[] would leave all in the root unit"),
        (lambda: Units("Block"), "blocks='Block' must be a list of modules, classes of modules, or names"),
        (lambda: Units(resident=3), "resident=3 must be a list"),
        (lambda: Units([3]), "blocks=[3] must be a list"),
        (lambda: zcomm.ZeroOptimizer(Turns(), stage=3, units=3), "units=3 must be None, a list of modules"),
        (
            lambda: zcomm.ZeroOptimizer(Turns(), stage=3, share_parameters=False, units=["blocks.7"]),
            "Units: blocks: 'blocks.7' is not a module inside of the model; give modules, classes of modules, or names",
        ),
        (
            lambda: zcomm.ZeroOptimizer(Turns(), stage=3, share_parameters=False, units=[nn.Conv2d]),
            "Units: blocks: Conv2d is not a module inside of the model",
        ),
        (
            lambda: zcomm.ZeroOptimizer(Turns(), stage=3, share_parameters=False, units=[nn.Linear(2, 2)]),
            "Units: blocks: Linear is not a module inside of the model",
        ),
        (
            lambda: zcomm.ZeroOptimizer(
                Turns(), stage=3, share_parameters=False, units=Units(["blocks.1"], resident=["blocks.2"])
            ),
            "Units: resident=['blocks.2'] names modules that are not units; the units are blocks.1",
        ),
    ],
)
def test_wrong_units(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        make()
    assert message in str(caught.value)
    zcomm.shutdown()


def differ() -> list[str]:
    comm = zcomm.init(timeout=20)
    said = []
    split = Units(max_bytes="1MiB", blocks=[nn.Linear])
    for units, of_rank_0 in (
        (["blocks.1"], None),
        (Units(resident=True), None),
        (Units(prefetch_bytes=3145728), None),
        (replace(split, leaf=["blocks.1"]), split),
    ):
        try:
            zcomm.ZeroOptimizer(Turns(), stage=3, share_parameters=False, units=units if comm.rank else of_rank_0)
        except ValueError as error:
            said.append(str(error))
    return said


def test_ranks_with_other_units(run_ranks: Run) -> None:
    for said in run_ranks(differ, 2):
        assert len(said) == 4
        for text in said:
            assert text.startswith("ZeroOptimizer: the ranks gave different models or options") and "units" in text
