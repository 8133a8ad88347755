"""Gradients of row-wise weights arrive block by block ([Note: gradients by blocks]): bits, exceptions, buffers."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zcomm
from tiers import long, slow
from zcomm.memory.linear_cross_entropy import linear_cross_entropy
from zcomm.zero.layout.flat import Geometry
from zcomm.zero.layout.placement import Axes, ParamGroupPlacement
from zcomm.zero.options import Units
from zcomm.zero.registry import open_parts
from zcomm.zero.rows.blocks import blocks_of_shape
from zcomm.zero.rows.grads import RowGrads
from zcomm.zero.tensors import local_shard
from zero_jobs import digest

Run = Callable[..., list[Any]]
W, WORDS, UP = 16, 3600, 2112
ROWS = Units(max_bytes=1088 * W * 4, rows=True)
SMALL = {"bucket_mb": 1024 * W * 4 / 2**20}  # a bucket holds one block


class Net(nn.Module):
    """An embedding, a wide Linear, and a head. way: the form of the loss."""

    def __init__(self, way: str = "loss", tied: bool = False, words: int = WORDS) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, W, padding_idx=3)
        self.up = nn.Linear(W, UP)
        self.head = nn.Linear(W, words, bias=False)
        self.way = way
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + torch.tanh(self.up(x)).unflatten(-1, (-1, W)).mean(-2)
        if self.way in ("loss", "retained"):
            return linear_cross_entropy(x, self.head.weight, tokens)
        if self.way == "losses":
            other = linear_cross_entropy(x.flip(1), self.head.weight, tokens)
            return linear_cross_entropy(x, self.head.weight, tokens) + other
        if self.way == "loss and linear":
            loss = linear_cross_entropy(x, self.head.weight, tokens)
            return loss + 0.01 * self.head(x).logsumexp(-1).square().mean()
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())
        if self.way == "twice":
            return loss + F.cross_entropy(self.head(2 * x).flatten(0, 1), tokens.flatten())
        return loss


def made(way: str, tied: bool) -> Net:
    torch.manual_seed(0)
    return Net(way, tied)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, WORDS, (2, 24), generator=torch.Generator().manual_seed(10 * step + rank))


# --- layout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize(("rows", "width", "align"), [(3600, 16, 64), (2112, 7, 256), (1500, 64, 64), (9, 5, 64)])
def test_blocks_cover_the_weight_once(world_size: int, rows: int, width: int, align: int) -> None:
    shape = torch.Size((rows, width))
    sections = [[torch.Size((40,))], [shape], [torch.Size((8, 8))]]
    geometry = Geometry(
        sections,
        [ParamGroupPlacement(Axes(world_size, 0))] * 3,
        4 * 1100 * width,
        4,
        align=align,
        in_blocks=[1],
        trained=2,
    )
    by_block = geometry.by_block
    assert [place.shape for place in geometry.places] == [sections[0][0], shape, sections[2][0]]
    assert geometry.trained_count == 2 and sum(each[0] for each in blocks_of_shape(shape, align)) == rows
    at = 0
    for span in geometry.spans(1):
        assert (span.begin, span.offset) == (at, 0) and geometry.every[span.bucket].params == (1,)
        assert span.begin % align == 0
        at += span.count
    assert at == shape.numel()
    assert [block.number for block in geometry.blocks[1]] == geometry.numbers_of(1)
    seen = [torch.full((bucket.count,), -1) for bucket in by_block.every]
    for block in geometry.blocks[1]:
        assert geometry.param_of(block.number) == 1
        assert geometry.rows_of(block.number) == slice(block.begin, block.end)
        place = by_block.places[block.number]
        assert block.number in by_block.every[place.bucket].params
        by_block.view(seen[place.bucket], block.number).copy_(
            torch.arange(block.begin * width, block.end * width).view(place.shape)
        )
    found = [seen[span.bucket][: span.count] for span in geometry.spans(1)]
    assert torch.equal(torch.cat(found), torch.arange(shape.numel()))
    assert [geometry.numbers_of(0), geometry.numbers_of(2)] == [[0], [2]]


# --- bits -----------------------------------------------------------------------------------------------------------


def whole_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let autograd keep all gradients whole, as a hook of the program requires."""
    monkeypatch.setattr(RowGrads, "takes", lambda *_: False)


def gradients(net: Net, precision: str = "fp32", passes: int = 1, **options: Any) -> list[torch.Tensor]:
    units = Units(max_bytes=1088 * W * (4 if precision == "fp32" else 2), rows=True)
    opt = zcomm.ZeroOptimizer(net, stage=3, units=units, precision=precision, **SMALL, **options)
    if net.way == "retained":
        loss = net(tokens_of(0, 0))
        for each in range(passes):
            loss.backward(retain_graph=each + 1 < passes)
    else:
        for each in range(passes):
            net(tokens_of(each, 0)).backward()
    found = [zcomm.zero.full_grad(param) for param in net.parameters()]
    opt.close()
    return [grad for grad in found if grad is not None]


@pytest.mark.parametrize("precision", ["fp32", slow("bf16")])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("way", ["loss", "linear", "twice", "losses", "loss and linear", "retained"])
def test_gradients_are_those_that_autograd_would_have(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str, tied: bool, precision: str
) -> None:
    passes = 2 if way in ("linear", "retained") else 1
    nvme = {"offload": zcomm.Offload("nvme", "nvme", gradients="nvme"), "nvme_path": str(tmp_path)}
    for options in ({"share_parameters": False}, nvme):
        more = {"grad_accum": passes, **options}
        by_blocks = gradients(made(way, tied), precision, passes, **more)
        with monkeypatch.context() as context:
            whole_only(context)
            whole = gradients(made(way, tied), precision, passes, **more)
        assert len(whole) == len(by_blocks) == (3 if tied else 4)
        assert all(torch.equal(a, b) for a, b in zip(whole, by_blocks, strict=True))
        assert all(bool(grad.any()) for grad in whole)
    zcomm.shutdown()


def train(net: nn.Module, rank: int, folder: str, where: str, **options: Any) -> tuple[list[str], str]:
    tiers: dict[str, Any] = {
        "ram": {"share_parameters": False},
        "nvme": {"offload": "nvme", "nvme_path": folder},
        "all": {"offload": zcomm.Offload("nvme", "nvme", gradients="nvme"), "nvme_path": folder},
    }
    opt = zcomm.ZeroOptimizer(net, lr=1e-2, clip_norm=1.0, stage=3, grad_accum=2, **tiers[where], **options)
    losses = []
    for step in range(2):
        for micro in range(2):
            loss = net(tokens_of(2 * step + micro, rank))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item().hex())
    found = losses, digest(opt.full_state_dict())
    opt.close()
    return found


def train_ways(folder: str, way: str, tied: bool) -> list[Any]:
    comm = zcomm.init(timeout=60)
    found = []
    for where, more in (("ram", {}), ("ram", SMALL), ("nvme", {}), ("all", SMALL)):
        for units in (ROWS, Units(max_bytes=100_000, rows=True)):
            found.append(train(made(way, tied), comm.rank, folder, where, units=units, **more))
    return found


@pytest.mark.parametrize(("way", "tied"), [("loss", True), ("loss", False), ("linear", True), ("twice", False)])
@pytest.mark.parametrize("world_size", [long(1), slow(2), slow(3)])
def test_bits_do_not_depend_on_tiers_buckets_or_limits(
    run_ranks: Run, tmp_path: Path, world_size: int, way: str, tied: bool
) -> None:
    for found in run_ranks(train_ways, world_size, str(tmp_path), way, tied):
        assert found == [found[0]] * len(found)
        assert len(set(found[0][0])) == 4, "it learns"


# --- hooks and edits of a program -----------------------------------------------------------------------------------


def opened(net: Net, **options: Any) -> Any:
    return zcomm.ZeroOptimizer(net, stage=3, share_parameters=False, units=ROWS, **SMALL, **options)  # type: ignore[arg-type]


def full(net: Net) -> list[torch.Tensor | None]:
    return [zcomm.zero.full_grad(param) for param in net.parameters()]


def same(a: list[Any], b: list[Any]) -> bool:
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("way", ["loss", "linear"])
def test_hooks_and_autograd_grad_see_the_whole(way: str) -> None:
    opt = opened(net := made(way, True))
    net(tokens_of(0, 0)).backward()
    plain = full(net)
    opt.zero_grad()
    (asked,) = torch.autograd.grad(net(tokens_of(0, 0)), [net.embed.weight])
    assert torch.equal(asked, plain[0]) and net.embed.weight.grad is None
    (asked,) = torch.autograd.grad(net(tokens_of(0, 0)), [net.up.bias])
    assert torch.equal(asked, plain[2]) and net.embed.weight.grad is None
    net(tokens_of(0, 0)).backward(inputs=[net.up.weight, net.embed.weight])
    assert same(full(net), [plain[0], plain[1], torch.zeros(UP)])
    opt.zero_grad()
    seen: list[torch.Tensor] = []
    handle = net.embed.weight.register_hook(lambda grad: seen.append(grad.clone()) or 2 * grad)  # type: ignore[func-returns-value]
    net(tokens_of(0, 0)).backward()
    assert torch.equal(seen[0], plain[0]) and torch.equal(full(net)[0], 2 * plain[0])
    handle.remove()
    opt.zero_grad()
    handle = net.embed.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.clone()))
    net(tokens_of(0, 0)).backward()
    assert torch.equal(seen[1], plain[0]) and same(full(net), plain)
    handle.remove()
    opt.close()
    zcomm.shutdown()


def test_a_use_of_the_whole_is_added(caplog: pytest.LogCaptureFixture) -> None:
    for way in ("loss", "linear"):
        opt = opened(net := made(way, False))
        loss = net(tokens_of(0, 0))
        loss.backward()
        alone = full(net)
        opt.zero_grad()
        (net(tokens_of(0, 0)) + (net.head.weight**2).sum()).backward()
        weight = zcomm.zero.full_param(net.head.weight)
        found = full(net)
        torch.testing.assert_close(found[-1], alone[-1] + 2 * weight)
        assert same(found[:-1], alone[:-1])
        opt.close()
    zcomm.shutdown()


def test_p_grad_of_the_program_and_toggles() -> None:
    opt = opened(net := made("linear", False))
    net(tokens_of(0, 0)).backward()
    plain = full(net)
    opt.zero_grad()
    net.head.weight.grad = torch.ones(WORDS, W)
    net(tokens_of(0, 0)).backward()
    assert torch.equal(net.head.weight.grad, 1 + plain[-1])
    opt.zero_grad()
    net(tokens_of(0, 0)).backward()
    net.head.weight.grad = None
    net(tokens_of(1, 0)).backward()
    twice = full(net)
    opt.zero_grad()
    net(tokens_of(1, 0)).backward()
    assert torch.equal(twice[-1], full(net)[-1]), "what was dropped is forgotten"
    opt.zero_grad()
    loss = net(tokens_of(0, 0))
    net.head.weight.requires_grad_(False)
    loss.backward()
    assert net.head.weight.grad is None and same(full(net)[:-1], plain[:-1])
    net.head.weight.requires_grad_(True)
    opt.zero_grad()
    net(tokens_of(0, 0)).backward()
    assert same(full(net), plain)
    opt.close()
    zcomm.shutdown()


def test_reading_and_changing_p_grad() -> None:
    opt = opened(net := made("loss", True))
    net(tokens_of(0, 0)).backward()
    grad, whole = net.embed.weight.grad, full(net)[0]
    assert whole is not None and torch.equal(grad.clone(), whole)
    for ord in (2.0, 1.0, float("inf")):
        assert torch.linalg.vector_norm(grad, ord).item() == pytest.approx(
            torch.linalg.vector_norm(whole.double(), ord).item(), rel=1e-6
        )
    assert int(torch.linalg.vector_norm(grad, 0)) == int((whole != 0).sum())
    grad.mul_(0.5)
    grad[1500:2500] = 3.0
    whole = 0.5 * whole
    whole[1500:2500] = 3.0
    assert torch.equal(full(net)[0], whole)
    zcomm.zero.set_full_grad(net.embed.weight, 4 * whole)
    assert torch.equal(full(net)[0], 4 * whole)
    opt.close()
    zcomm.shutdown()


def no_sync(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    found = []
    for local in (False, True):
        opt = zcomm.ZeroOptimizer(
            net := made("loss", True), stage=3, offload="nvme", nvme_path=folder, units=ROWS, grad_accum=2, **SMALL
        )  # type: ignore[arg-type]
        if local:
            with opt.no_sync():
                net(tokens_of(0, comm.rank)).backward()
        else:
            net(tokens_of(0, comm.rank)).backward()
        opt.step()
        net(tokens_of(1, comm.rank)).backward()
        opt.step()
        found.append(opt.full_state_dict()["embed.weight"].clone())
        opt.close()
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2])
def test_no_sync(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(no_sync, world_size, str(tmp_path))


def own_parts(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    opt = zcomm.ZeroOptimizer(net := made("loss", True), stage=3, offload="nvme", nvme_path=folder, units=ROWS, **SMALL)  # type: ignore[arg-type]
    net(tokens_of(0, comm.rank)).backward()
    opt.step()
    weight = net.embed.weight
    for read, write, whole in (
        (local_shard.own_param, local_shard.set_own_param, zcomm.zero.full_param),
        (
            lambda p: local_shard.own_optim_state(p, "exp_avg"),
            lambda p, v: local_shard.set_own_optim_state(p, v, "exp_avg"),
            lambda p: zcomm.zero.full_optim_state(p, "exp_avg"),
        ),
    ):
        before, mine = whole(weight).clone(), read(weight)
        sizes = comm.all_gather(torch.tensor([mine.numel()]))
        assert int(sizes.sum()) == weight.numel()
        write(weight, mine + 1)
        assert torch.equal(whole(weight), before + 1) and torch.equal(read(weight), mine + 1)
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_own_elements(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(own_parts, world_size, str(tmp_path))


def test_a_failed_backward_leaves_nothing_behind() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            raise ValueError("as a program may")

    for way in ("loss", "linear"):
        opt = opened(net := made(way, True))
        net(tokens_of(0, 0)).backward()
        plain = full(net)
        opt.zero_grad()
        net.up.register_forward_pre_hook(lambda module, args: (Fails.apply(args[0]),))
        with pytest.raises(ValueError, match="as a program may"):
            net(tokens_of(0, 0)).backward()
        net.up._forward_pre_hooks.popitem()
        opt.zero_grad()
        assert not open_parts(opt).reducer.row_grads._waiting
        net(tokens_of(0, 0)).backward()
        assert same(full(net), plain)
        opt.close()
    zcomm.shutdown()


# --- memory ---------------------------------------------------------------------------------------------------------


def sizes(folder: str, words: int) -> dict[str, Any]:
    zcomm.init(timeout=60)
    torch.manual_seed(0)
    net = Net("loss", True, words)
    offload = zcomm.Offload("nvme", "nvme", gradients="nvme")
    opt = zcomm.ZeroOptimizer(net, stage=3, offload=offload, nvme_path=folder, units=ROWS, **SMALL)  # type: ignore[arg-type]
    for step in range(2):
        net(tokens_of(step, 0)).backward()
        opt.step()
        opt.zero_grad()
    memory = opt.memory()
    opt.close()
    return {tier: memory[tier] for tier in ("device", "cpu")}


@pytest.mark.parametrize("world_size", [1, 2])
def test_buffers_do_not_grow_with_the_vocabulary(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for once, twice in zip(
        run_ranks(sizes, world_size, str(tmp_path), 20480),
        run_ranks(sizes, world_size, str(tmp_path), 40960),
        strict=True,
    ):
        assert once == twice


_PEAK = """
import sys, torch, zcomm
from torch import nn
from zcomm.zero.memory.limit import peak_nbytes
torch.manual_seed(0)
words = int(sys.argv[2])
with zcomm.zero.Init():
    net = nn.ModuleDict({"embed": nn.Embedding(words, 512), "head": nn.Linear(512, words, bias=False)})
    if sys.argv[3] == "tied":
        net["head"].weight = net["embed"].weight
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, tokens):
        return zcomm.linear_cross_entropy(self.net["embed"](tokens), self.net["head"].weight, tokens)
offload = zcomm.Offload("nvme", "nvme", gradients="nvme", update=sys.argv[4])
units = zcomm.zero.Units(max_bytes="4MiB", rows=True)
model = Net()
opt = zcomm.ZeroOptimizer(model, stage=3, offload=offload, nvme_path=sys.argv[1], units=units, bucket_mb=2)
opt.keeps_weights = False
for step in range(4):
    model(torch.randint(0, words, (1, 64))).backward()
    opt.step()
    opt.zero_grad()
print("peak", peak_nbytes())
opt.save(sys.argv[1] + "/saved")
print("saved", peak_nbytes())
opt.close()
"""


@pytest.mark.long
@pytest.mark.timeout_s(600)
@pytest.mark.parametrize(("tied", "update"), [("tied", "forward"), ("apart", "backward")])
def test_the_process_does_not_grow_with_the_vocabulary(tmp_path: Path, tied: str, update: str) -> None:
    """A weight of 32,768 rows is 64 MiB, one of 98,304 rows 192 MiB. A whole weight or gradient adds 128 MiB.

    A window becomes resident when it is used. A late drive uses all windows: 70 MiB more.
    """
    script = tmp_path / "peak.py"
    script.write_text(_PEAK)
    peaks = []
    for words in (32_768, 98_304):
        folder = tmp_path / str(words)
        folder.mkdir()
        command = [sys.executable, str(script), str(folder), str(words), tied, update]
        process = subprocess.run(command, capture_output=True, text=True, timeout=280)
        assert process.returncode == 0, process.stderr
        peaks.append([int(line.split()[1]) for line in process.stdout.splitlines()])
    trained, saved = (b - a for a, b in zip(*peaks, strict=True))
    assert trained < 96 << 20 and saved < 96 << 20, peaks
