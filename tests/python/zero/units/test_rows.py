"""Units(rows=True): weights larger than max_bytes are gathered in blocks of rows: bits, memory, ways around, errors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from tiers import slow
from zcomm.memory.linear_cross_entropy import linear_cross_entropy
from zcomm.planning import estimate
from zcomm.zero.layout.unit_policy import choose_units
from zcomm.zero.options import Units
from zcomm.zero.rows.blocks import block_slots, row_blocks
from zcomm.zero.units.weights import UnitWeights
from zero_jobs import digest

Run = Callable[..., list[Any]]
W, WORDS, UP = 16, 2600, 2112
BLOCK = 1088 * W * 4  # the largest block: the second of two of UP
ROWS = Units(max_bytes=BLOCK, rows=True)


class Wide(nn.Module):
    """An embedding, blocks, a Linear, and a head with a bias; weights of several blocks of rows."""

    def __init__(self, tied: bool = False, way: str = "module") -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, W, padding_idx=3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(W, W), nn.Tanh()) for _ in range(2))
        self.up = nn.Linear(W, UP)
        self.head = nn.Linear(W, WORDS)
        self.way = way
        if tied:
            self.head.weight = self.embed.weight

    def wide(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x)).unflatten(-1, (-1, W)).mean(-2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = checkpoint(self.wide, x, use_reentrant=False) if self.way == "recomputed" else self.wide(x)
        if self.way == "loss":
            return linear_cross_entropy(x, self.head.weight, tokens, linear_bias=self.head.bias)
        if self.way == "scaled":
            y = x @ (self.head.weight * 1.0).t() + self.head.bias
        else:
            y = self.head(x) if self.way != "matmul" else x @ self.head.weight.t() + self.head.bias
        return F.cross_entropy(y.flatten(0, 1), tokens.flatten())


def test_blocks_of_rows() -> None:
    assert list(row_blocks(WORDS)) == [(0, 1024), (1024, 2048), (2048, WORDS)]
    assert list(row_blocks(UP)) == [(0, 1024), (1024, UP)] and block_slots([torch.Size((UP, W))]) == BLOCK // 4
    assert list(row_blocks(7)) == [(0, 7)] and list(row_blocks(1536)) == [(0, 1024), (1024, 1536)]
    for rows in (1, 1023, 1535, 1536, 2047, 2559, 2560, 50257):
        found = list(row_blocks(rows))
        assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])] and found[-1][1] == rows
        assert len(found) == 1 or all(512 <= end - begin < 1536 for begin, end in found)


def test_what_is_by_rows() -> None:
    for tied in (False, True):
        net = Wide(tied)
        names = {id(param): name for name, param in net.named_parameters()}
        choices = choose_units(net, list(net.parameters()), ROWS)
        found = {choice.name: [names[id(param)] for param in choice.params] for choice in choices if choice.by_rows}
        both = {"embed.weight, head.weight": ["embed.weight"]}
        apart = {"embed.weight": ["embed.weight"], "head.weight": ["head.weight"]}
        assert found == (both if tied else apart) | {"up.weight": ["up.weight"]}
        every = sorted(names[id(param)] for choice in choices for param in choice.params)
        assert every == sorted(names.values()), "each once"
    assert not any(choice.by_rows for choice in choose_units(Wide(), list(Wide().parameters()), Units(rows=False)))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight * 2, self.bias)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Units(rows=True), "Units: rows=True needs max_bytes="),
        (lambda: Units(max_bytes=9, rows=1), "Units: rows=1 must be True or False"),
        (lambda: (Wide(), Units(max_bytes=BLOCK - 1, rows=True)), "as rows=True gathers at least 1024 rows"),
        (lambda: (Wide(), Units(max_bytes=BLOCK)), "or less if rows=True lets Linears and Embeddings be gathered"),
        (lambda: (nn.Sequential(Scaled(W, WORDS)), ROWS), "0 (Scaled) has"),
        (lambda: (nn.Sequential(nn.Embedding(WORDS, W, max_norm=1.0)), ROWS), "0 (Embedding) has"),
        (lambda: (nn.Sequential(nn.Embedding(WORDS, W, sparse=True)), ROWS), "0 (Embedding) has"),
        (lambda: (nn.ParameterList([torch.ones(WORDS, W)]), ROWS), "the root unit (0) has"),
    ],
)
def test_what_cannot_be_is_said_at_once(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        net, units = make()
        choose_units(net, list(net.parameters()), units)
    assert message in str(caught.value)


# --- bits -----------------------------------------------------------------------------------------------------------


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 32), generator=torch.Generator().manual_seed(10 * step + rank))


def train(net: nn.Module, units: Units, rank: int = 0, steps: int = 3, **options: Any) -> tuple[list[str], str]:
    opt = zcomm.ZeroOptimizer(net, lr=1e-2, clip_norm=1.0, stage=3, units=units, **options)
    losses = []
    for step in range(steps):
        loss = net(tokens_of(step, rank))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    found = losses, digest(opt.full_state_dict())
    opt.close()
    return found


def made(tied: bool, way: str) -> Wide:
    torch.manual_seed(0)
    return Wide(tied, way)


def train_ways(folder: str, way: str, tied: bool) -> list[Any]:
    comm = zcomm.init(timeout=60)
    found = []
    for limit in (BLOCK, 2 * BLOCK - 8000):
        for more in ({"offload": "nvme", "nvme_path": folder}, {"share_parameters": False, "prefetch": 0}):
            units = Units(max_bytes=limit, rows=True)
            found.append(train(made(tied, way), units, comm.rank, **more))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("way", [slow("module"), slow("recomputed"), "loss"])
@pytest.mark.parametrize("tied", [False, True])
def test_bits_do_not_depend_on_the_limit_the_tier_or_the_ranks(
    run_ranks: Run, tmp_path: Path, way: str, tied: bool
) -> None:
    for world_size in (1, 2):
        every = run_ranks(train_ways, world_size, str(tmp_path), way, tied)
        for found in every:
            assert found == [found[0]] * len(found)
            assert len(set(found[0][0])) == 3, "it learns"
            assert found[0][1] == every[0][0][1], "all ranks have the same weights"


def of_one_step(units: Units, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return outputs, and gradients of inputs and weights, of one Linear and one Embedding."""
    torch.manual_seed(0)
    net = nn.ModuleList([nn.Linear(64, UP), nn.Embedding(WORDS, 64, padding_idx=5)]).to(dtype)
    x = torch.randn(64, 64, dtype=dtype, requires_grad=True)
    tokens = tokens_of(0, 0)
    precision = "fp32" if dtype == torch.float32 else "bf16"
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, units=units, precision=precision)
    linear, embedding = net
    y, z = linear(x), embedding(tokens)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    ((y.float() * weights).sum() + (z.float() ** 2).sum()).backward()
    grads = [zcomm.zero.full_grad(param) for param in (linear.weight, linear.bias, embedding.weight)]
    found = [y.detach().clone(), z.detach().clone(), *grads, x.grad.clone()]
    opt.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_and_gradients_of_weights_are_those_of_whole_ones(dtype: torch.dtype) -> None:
    whole = of_one_step(Units([nn.Linear, nn.Embedding]), dtype)
    rows = of_one_step(Units(max_bytes=1088 * 64 * dtype.itemsize, rows=True), dtype)
    for number, (a, b) in enumerate(zip(whole[:-1], rows[:-1], strict=True)):
        assert torch.equal(a, b), number
    few = 0.1 if dtype == torch.bfloat16 else 1e-5  # the last bits of sums of 2112 products
    torch.testing.assert_close(whole[-1], rows[-1], rtol=0.02, atol=few)
    zcomm.shutdown()


def test_training_is_that_of_whole_weights_but_for_rounding() -> None:
    for way in ("module", "loss"):
        losses = [train(made(True, way), units, share_parameters=False)[0] for units in (Units(), ROWS)]
        whole, rows = ([float.fromhex(loss) for loss in each] for each in losses)
        assert whole[0] == rows[0] and whole == pytest.approx(rows, rel=1e-5)
    zcomm.shutdown()


# --- memory ---------------------------------------------------------------------------------------------------------


def measure(folder: str) -> list[Any]:
    comm, found = zcomm.init(timeout=60), []
    for units in (Units(max_bytes=WORDS * (W + 1) * 4), ROWS):
        opt = zcomm.ZeroOptimizer(net := made(False, "module"), stage=3, offload="nvme", nvme_path=folder, units=units)
        for step in range(2):
            net(tokens_of(step, comm.rank)).backward()
            opt.step()
            opt.zero_grad()
        found.append((opt.memory(), estimate(Wide(), 3, "nvme", comm.world_size, units=units).memory))
        opt.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_memory_for_whole_weights_is_that_of_blocks(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for found in run_ranks(measure, world_size, str(tmp_path)):
        (whole, planned_whole), (rows, planned) = found
        assert rows == planned and whole == planned_whole
        spared = whole["device"]["slots"] - rows["device"]["slots"]
        assert spared * world_size >= WORDS * W * 4, "a slot of the head is more than all slots of rows"


# --- ways around ----------------------------------------------------------------------------------------------------


def test_what_has_no_path_by_rows_gathers_the_whole_and_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for way in ("module", "matmul", "scaled"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "zcomm"):
            found.append(train(made(False, way), ROWS, share_parameters=False)[0])
        said = [record.getMessage() for record in caplog.records if "by rows" in record.getMessage()]
        assert len(said) == (way == "scaled") and all(text.startswith("head.weight: mul() has no") for text in said)
    first, *others = ([float.fromhex(loss) for loss in each] for each in found)
    assert all(first == pytest.approx(other, rel=1e-5) for other in others)
    monkeypatch.setattr(UnitWeights, "whole", lambda *_: pytest.fail("a copy"))
    net = made(True, "loss")
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, units=ROWS)
    net(tokens_of(0, 0)).backward()
    opt.close()
    zcomm.shutdown()


def look(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    net = made(True, "module")
    first = net.embed.weight.detach().clone()
    opt = zcomm.ZeroOptimizer(net, stage=3, offload="nvme", nvme_path=folder, units=ROWS)
    assert torch.equal(zcomm.zero.full_param(net.head.weight), first)
    assert torch.equal(net.state_dict()["head.weight"], first)
    with zcomm.zero.GatheredParameters([net.embed.weight]):
        assert torch.equal(net.embed.weight, first)
        with torch.no_grad():
            open_loss = net(tokens_of(0, 0))
    with torch.no_grad():
        assert torch.equal(net(tokens_of(0, 0)), open_loss)
        net.embed.weight.mul_(0.5)
    assert torch.equal(net.embed(torch.arange(WORDS)), first * 0.5), "an edit is seen by the next use"
    loss = net(tokens_of(0, comm.rank))
    with torch.no_grad():
        net.embed.weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"embed\.weight has been modified since the forward"):
        loss.backward()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(net(tokens_of(0, comm.rank)), [net.up.bias, net.blocks[0][0].bias], create_graph=True)
    with pytest.raises(IndexError, match=r"embed\.weight: F\.embedding: an index is out of range"):
        net(tokens_of(0, 0) + WORDS)
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_looks_edits_and_errors(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(look, world_size, str(tmp_path))


def edit_on_one_rank() -> str:
    comm = zcomm.init(timeout=8)
    net = made(False, "module")
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, units=ROWS)
    if comm.rank == 0:
        with torch.no_grad():
            net.up.weight.mul_(2)
    try:
        net.wide(torch.ones(1, W))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        opt.close()
    return ""


def test_an_edit_on_one_rank_alone_is_found_out(run_ranks: Run) -> None:
    texts = run_ranks(edit_on_one_rank, 2)
    assert all("CollectiveMismatch" in text and "after 1 changes of weights" in text for text in texts), texts


def save_and_load(folder: str) -> list[str]:
    comm, ends = zcomm.init(timeout=60), []
    for first, second in ((ROWS, Units()), (Units(), ROWS), (ROWS, ROWS)):
        saved = f"{folder}/{len(ends)}"
        opt = zcomm.ZeroOptimizer(net := made(True, "module"), stage=3, offload="nvme", nvme_path=folder, units=first)
        net(tokens_of(0, comm.rank)).backward()
        opt.step()
        opt.save(saved)
        at_save = digest(opt.full_state_dict())
        opt.close()
        torch.manual_seed(1)
        opt = zcomm.ZeroOptimizer(net := Wide(True), stage=3, share_parameters=False, units=second)
        opt.load(saved)
        assert digest(opt.full_state_dict()) == at_save
        net(tokens_of(1, comm.rank)).backward()
        opt.step()
        ends.append(at_save)
        opt.close()
    return ends


@pytest.mark.parametrize("world_size", [1, 2])
def test_checkpoints_go_from_and_to_whole_weights(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for ends in run_ranks(save_and_load, world_size, str(tmp_path)):
        assert len(ends) == 3 and ends[0] == ends[2]


def test_autocast_and_frozen_weights() -> None:
    losses = []
    for units in (Units(), ROWS):
        net = made(False, "module")
        net.embed.weight.requires_grad_(False)
        opt = zcomm.ZeroOptimizer(net, lr=1e-2, stage=3, share_parameters=False, units=units)
        for step in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = net(tokens_of(step, 0))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item())
        opt.close()
    assert losses[0] == losses[2] and losses[1] == pytest.approx(losses[3], rel=1e-3)
    zcomm.shutdown()


# --- products with the transpose ------------------------------------------------------------------------------------


def test_products_with_the_transpose_are_those_of_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    net = made(False, "module")
    first = net.head.weight.detach().clone()
    opt = zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, units=ROWS)
    weight, x = net.head.weight, torch.randn(5, W, requires_grad=True)

    def of(make: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
        x.grad = None
        opt.zero_grad()
        y = make()
        (y**2).sum().backward()
        assert x.grad is not None
        return [y.detach(), x.grad.clone(), zcomm.zero.full_grad(weight)]

    ways: list[Callable[[], torch.Tensor]] = [
        lambda: x @ weight.t(),
        lambda: torch.matmul(x, weight.T),
        lambda: x.matmul(weight.mT),
        lambda: torch.mm(x, weight.transpose(0, 1)),
        lambda: x @ weight.transpose(-1, -2),
        lambda: F.linear(x, weight.t().t()),
        lambda: (x[None] @ weight.t())[0],
    ]
    expected = of(lambda: F.linear(x, weight))
    with monkeypatch.context() as context:
        context.setattr(UnitWeights, "whole", lambda *_: pytest.fail("a copy"))
        for number, way in enumerate(ways):
            found = of(way)
            assert all(
                a is not None and b is not None and torch.equal(a, b) for a, b in zip(found, expected, strict=True)
            ), number
        turned = weight.t()
        assert turned.shape == (W, WORDS) and turned.dtype == weight.dtype and turned.device.type == "cpu"
        assert turned.requires_grad and not turned.is_contiguous() and turned.stride() == (1, W)
    assert torch.equal(weight[:3] @ weight.t(), first[:3] @ first.t()), "beside a value of another class"
    assert torch.equal(turned.clone(), first.t()) and torch.equal(turned[3], first.t()[3])
    assert torch.equal(x @ weight.t()[:, :7], x @ first.t()[:, :7])
    with torch.no_grad():
        weight.t().mul_(2.0)
        assert torch.equal(zcomm.zero.full_param(weight), 2 * first), "what is written reaches the weight"
        assert torch.equal(x @ turned, x @ weight.t()), "a view has the values of now"
    with pytest.raises(RuntimeError):
        torch.mm(x[None], weight.t())
    opt.close()
    zcomm.shutdown()
