"""split_batch: the bits of a module that loops over its parts by hand, and errors for modules that mix samples."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm
from tiers import slow

WIDTH, LENGTH, BATCH, BLOCKS = 16, 6, 8, 3


class Rotary(NamedTuple):
    cos: torch.Tensor
    sin: torch.Tensor


class Block(nn.Module):
    """Attention with a mask and dropout, then an MLP: a tuple of tensors out."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.values = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.2), nn.Linear(2 * WIDTH, WIDTH))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None, *, rotary: Rotary, more: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        y = self.norm(x)
        y = y * rotary.cos + y.flip(-1) * rotary.sin + more["bias"]
        scores = y @ y.transpose(1, 2) * more["scale"]
        weights = F.dropout(torch.softmax(scores if mask is None else scores + mask, -1), 0.1, self.training)
        x = x + weights @ self.values(y)
        return x + self.mlp(x), {"weights": weights, "name": "block"}


class Net(nn.Module):
    """Blocks, of which one is used twice. by_hand: parts of a loop around each of them."""

    def __init__(self, dtype: torch.dtype = torch.float32, by_hand: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 1)
        self.by_hand = by_hand
        self.to(dtype)

    def run(self, block: nn.Module, x: torch.Tensor, mask: torch.Tensor, bias: torch.Tensor, rotary: Rotary) -> Any:
        more = {"bias": bias, "scale": 0.5}
        if not self.by_hand:
            return block(x, mask, rotary=rotary, more=more)
        found = []
        for part in zip(*(tensor.chunk(self.by_hand) for tensor in (x, mask, bias)), strict=True):
            more = {"bias": part[2], "scale": 0.5}
            found.append(checkpoint(block, *part[:2], rotary=rotary, more=more, use_reentrant=False))
        return torch.cat([y for y, _ in found]), {"weights": torch.cat([more["weights"] for _, more in found])}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        angles = torch.linspace(0, 1, WIDTH * LENGTH, dtype=x.dtype).view(1, LENGTH, WIDTH)
        mask = torch.full((LENGTH, LENGTH), -10.0, dtype=x.dtype).triu(1).expand(len(x), -1, -1)
        bias, total = x[:, :1], 0
        x = self.first(x)
        for block in (*self.blocks, self.blocks[1]):
            x, found = self.run(block, x, mask, bias, Rotary(angles.cos(), angles.sin()))
            total = total + found["weights"].square().sum()
        return (self.head(x).square().sum() + total) / len(x)


def batch(dtype: torch.dtype = torch.float32, count: int = BATCH) -> torch.Tensor:
    return torch.randn(count, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def grads(net: nn.Module, x: torch.Tensor, steps: int = 2, context: Callable[[], Any] = nullcontext) -> list[Any]:
    """Return losses, gradients of weights and inputs, and the last random number, of ``steps`` passes."""
    torch.manual_seed(5)
    found: list[Any] = []
    for _ in range(steps):
        x = x.detach().requires_grad_()
        with context():
            loss = net(x)
        loss.backward()
        found += [loss.detach(), x.grad, *(param.grad for param in net.parameters())]
        net.zero_grad()
    return [*found, torch.rand(4)]


def same(found: list[Any], wanted: list[Any]) -> bool:
    assert len(found) == len(wanted) and all(value is not None for value in wanted)
    return all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def prepared(parts: int, dtype: torch.dtype = torch.float32) -> Net:
    net = Net(dtype)
    zcomm.split_batch(net.blocks, parts=parts)
    return net


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("parts", [1, slow(2), 4, slow(8)])
def test_bits_of_a_loop_by_hand(dtype: torch.dtype, parts: int) -> None:
    wanted = grads(Net(dtype, by_hand=parts), batch(dtype))
    assert same(grads(prepared(parts, dtype), batch(dtype)), wanted)
    other = grads(Net(dtype, by_hand={1: 2, 2: 4, 4: 8, 8: 1}[parts]), batch(dtype))
    assert not same(other, wanted), "dropout draws other numbers for other parts"


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache: bool) -> None:
    def context() -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cache)

    assert same(grads(prepared(2), batch(), context=context), grads(Net(by_hand=2), batch(), context=context))


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_a_checkpoint(reentrant: bool) -> None:
    """A reentrant checkpoint runs the block first without gradients; recomputation draws the same numbers."""

    def run(net: Net) -> list[Any]:
        return grads(lambda_module(lambda x: checkpoint(net, x, use_reentrant=reentrant), net), batch())

    assert same(run(prepared(4)), run(Net(by_hand=4)))


def lambda_module(function: Callable[..., Any], *owned: nn.Module) -> nn.Module:
    """Return a module with the weights of ``owned`` and this forward."""

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owned = nn.ModuleList(owned)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return Made()


def test_a_second_backward_and_second_derivatives() -> None:
    results = []
    for net in (prepared(2), Net(by_hand=2)):
        torch.manual_seed(5)
        x = batch().requires_grad_()
        loss = net(x)
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        slope.square().sum().backward()
        results.append([x.grad, *(param.grad for param in net.parameters())])
    assert same(*results)


# --- modes, copies, undoing -------------------------------------------------------------------------------------------


def counting(block: nn.Module) -> list[int]:
    """Return a list that gets the number of samples of each call of ``block``."""
    seen: list[int] = []
    block.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    return seen


def test_calls_of_a_block() -> None:
    """Hooks of the block see parts: in the check of the first batch, in forward, and in recomputation."""
    net = prepared(4)
    seen = counting(net.blocks[0])
    net(batch()).backward()
    assert seen == [3, 3, 3] + 8 * [2]
    seen.clear()
    net(batch()).backward()
    assert seen == 8 * [2]
    for training, wanted in ((False, [BATCH]), (True, 4 * [2])):
        seen.clear()
        with torch.no_grad():
            net.train(training)(batch())
        assert seen == wanted
    seen.clear()
    net.eval()(batch()).backward()
    assert seen == [3, 3, 3] + 8 * [2], "of each mode the first batch"
    with torch.inference_mode():
        assert net(batch(count=3)).isfinite()


def test_names_copies_and_pickles() -> None:
    net, plain = prepared(2), Net()
    assert list(net.state_dict()) == list(plain.state_dict()) and repr(net) == repr(plain)
    assert isinstance(net.blocks[0], Block) and len({type(block) for block in net.blocks}) == 1
    net.load_state_dict(plain.state_dict())
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    wanted = grads(Net(by_hand=2), batch())
    copies = [copy.deepcopy(net), torch.load(file, weights_only=False)]
    zcomm.split_batch(net.blocks, parts=4)
    for each in copies:
        assert same(grads(each, batch()), wanted), "with the parts of the time of the copy"
    assert same(grads(net, batch()), grads(Net(by_hand=4), batch()))


def test_the_last_call_counts_and_remove_undoes_it() -> None:
    net = Net()
    first = zcomm.split_batch(net.blocks, parts=4)
    second = zcomm.split_batch(net.blocks, parts=2)
    assert same(grads(net, batch()), grads(Net(by_hand=2), batch()))
    second.remove()
    second.remove()
    assert {type(block) for block in net.blocks} == {Block}
    assert same(grads(net, batch()), grads(Net(), batch()))
    first.remove()
    assert "_zcomm_split" not in vars(net.blocks[0])


def test_the_class_of_another_library() -> None:
    """FSDP2 and others make subclasses of a prepared module's class."""
    net = prepared(2)
    handle = zcomm.split_batch(net.blocks, parts=4)
    for block in net.blocks:
        block.__class__ = type("FSDPBlock", (type(block),), {})
    assert same(grads(net, batch()), grads(Net(by_hand=4), batch()))
    zcomm.split_batch(net.blocks, parts=2)
    assert same(grads(net, batch()), grads(Net(by_hand=2), batch()))
    handle.remove()
    assert same(grads(net, batch()), grads(Net(), batch()))


# --- activations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_offloaded_inputs(tier: str, tmp_path: Any) -> None:
    """Only the input of each part leaves, each once: parts x uses of blocks storages in each forward."""
    size = BATCH // 4 * LENGTH * WIDTH * 4
    offload = zcomm.offload_activations(tier, min_nbytes=size, nvme_path=tmp_path)
    net = prepared(4)
    inner = net.run
    seen = []

    def run(*args: Any) -> Any:
        with offload:
            out = inner(*args)
        seen.append(offload.stats()["offloaded_nbytes"])
        return out

    net.run = run  # type: ignore[method-assign]
    wanted = grads(Net(by_hand=4), batch())
    assert same(grads(net, batch()), wanted)
    shared = BATCH * LENGTH * WIDTH * 4  # the net's input, which ``bias`` is a view of
    uses = BLOCKS + 1
    assert seen == 2 * [number * (4 * size + shared) for number in range(1, uses + 1)]
    stats = offload.stats()
    assert stats["offloaded_nbytes"] == 0 and stats["offloaded_count"] == 2 * 5 * uses
    offload.close()


# --- refusals ---------------------------------------------------------------------------------------------------------


class Mixes(nn.Module):
    """A linear layer and an operation over the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))
        self.norm = {
            "norm": nn.BatchNorm1d(WIDTH),
            "statistics": nn.BatchNorm1d(WIDTH, track_running_stats=False),
        }.get(kind, nn.Identity())

    def forward(self, x: torch.Tensor, other: Any = None) -> Any:
        y = self.norm(self.layer(x))
        if self.kind == "mean":
            y = y - y.mean(0)
        elif self.kind == "earlier":  # a sample depends on samples before it
            y = y.cumsum(0)
        elif self.kind == "later":
            y = y.flip(0).cumsum(0).flip(0)
        elif self.kind == "other":
            y = y + other.mean(0)
        elif self.kind == "dropout":  # also outside of training
            y = F.dropout(y - 0.1 * y.mean(0), 0.2)
        elif self.kind == "buffer":
            self.seen += 1
        elif self.kind == "attribute":
            self.loss = y.square().mean()
        elif self.kind == "loss":
            return y, y.square().mean()
        elif self.kind == "rows":
            return y, self.layer.weight[:2]
        elif self.kind == "value":
            return y, float(y.detach().sum())
        elif self.kind == "object":
            return y, object()
        return y


REFUSED = {
    "mean": (RuntimeError, "mixes samples: output of a sample"),
    "earlier": (RuntimeError, "mixes samples"),
    "later": (RuntimeError, "mixes samples"),
    "other": (RuntimeError, "mixes samples"),
    "dropout": (RuntimeError, "mixes samples"),
    "norm": (RuntimeError, "mixes samples.*BatchNorm"),
    "statistics": (RuntimeError, "mixes samples"),
    "buffer": (RuntimeError, "changes its buffer seen in forward"),
    "attribute": (RuntimeError, r"keeps a result in its attribute loss.*detach\(\)"),
    "loss": (ValueError, r"output\[1\] has the shape \[\] for 3 samples"),
    "rows": (ValueError, r"output\[1\] has the shape \[2, 16\] for 3 samples"),
    "value": (ValueError, "other structures or plain values"),
    "object": (TypeError, r"output\[1\] is a object"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_modules(kind: str) -> None:
    module = Mixes(kind)
    zcomm.split_batch([module], parts=4)
    error, text = REFUSED[kind]
    torch.manual_seed(3)
    with pytest.raises(error, match=rf"split_batch: module 0 \(Mixes\).*{text}"):
        module(batch()[:, 0], batch()[:, 1])


@pytest.mark.parametrize("kind", ["mean", "dropout", "loss", "rows"])
def test_one_part_mixes_nothing(kind: str) -> None:
    module = Mixes(kind)
    torch.manual_seed(3)
    wanted = module(batch()[:, 0])
    zcomm.split_batch([module], parts=1)
    torch.manual_seed(3)
    found = module(batch()[:, 0])
    for one, other in zip(*(each if isinstance(each, tuple) else (each,) for each in (found, wanted)), strict=True):
        assert torch.equal(one, other)


class Packed:
    pass


def test_refused_arguments() -> None:
    module = Mixes("none")
    zcomm.split_batch([module], parts=4)
    x = batch()[:, 0]
    cases: list[tuple[tuple[Any, ...], type[Exception], str]] = [
        (
            (x[:6],),
            ValueError,
            r"the batch of 6 \(dim 0 of argument 0, \[6, 16\]\) does not divide into parts=4.*drop_last",
        ),
        ((x[:3],), ValueError, "the batch of 3"),
        ((x[:0],), ValueError, "the batch of 0"),
        ((x, Packed()), TypeError, "argument 1 is a Packed.*use_cache=False"),
        ((x, {"past": [Packed()]}), TypeError, r"argument 1\['past'\]\[0\] is a Packed"),
        ((3,), TypeError, "has no tensor argument"),
        ((batch(count=WIDTH)[:, 0], torch.zeros(WIDTH)), ValueError, r"argument 1 \[16\] is ambiguous.*\[16, 16\]"),
    ]
    for args, error, text in cases:
        with pytest.raises(error, match=rf"split_batch: module 0 \(Mixes\).*{text}"):
            module(*args)
    with pytest.raises(ValueError, match="the batch of 3"):
        module(x=x[:3])


def test_an_ambiguous_shape_after_the_first_batch() -> None:
    """A tensor without a batch is passed whole, and one with a batch split, as in batches of other sizes."""

    def forward(x: torch.Tensor, scale: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        seen.append((len(scale), len(own)))
        return x * scale + own[:, None]

    seen: list[tuple[int, int]] = []
    module = lambda_module(forward)
    zcomm.split_batch([module], parts=2)
    for count in (4, WIDTH):
        seen.clear()
        x, scale, own = torch.randn(count, WIDTH, requires_grad=True), torch.randn(WIDTH), torch.randn(count)
        assert torch.equal(module(x, scale, own), x * scale + own[:, None])
        assert set(seen[-2:]) == {(WIDTH, count // 2)}


@pytest.mark.parametrize(
    ("modules", "parts", "error", "text"),
    [
        (nn.Linear(2, 2), 2, TypeError, "modules is one Linear: give a list of blocks"),
        ([], 2, ValueError, "modules is empty"),
        ([nn.Linear(2, 2), 3], 2, TypeError, "modules has a int at 1"),
        (nn.ModuleDict({"a": nn.Linear(2, 2)}), 2, TypeError, "modules has a str at 0"),
        (nn.ModuleList([nn.Linear(2, 2)]), 0, ValueError, "parts=0"),
        (nn.ModuleList([nn.Linear(2, 2)]), 2.0, ValueError, r"parts=2\.0"),
        (nn.ModuleList([nn.Linear(2, 2)]), True, ValueError, "parts=True"),
        (nn.Sequential(nn.Sequential(nn.Linear(2, 2))).modules(), 2, ValueError, "module 0 contains its module 0"),
    ],
)
def test_bad_arguments(modules: Any, parts: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"split_batch: {text}"):
        zcomm.split_batch(modules, parts=parts)


# --- compilers --------------------------------------------------------------------------------------------------------


@pytest.fixture
def graphs() -> Iterator[list[str]]:
    """Yield the code of all graphs that ``torch.compile(backend=keep(graphs))`` compiles."""
    torch._dynamo.reset()
    yield []
    torch._dynamo.reset()


def keep(graphs: list[str]) -> Callable[..., Any]:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph

    return backend


@pytest.mark.slow
def test_compiled_blocks(graphs: list[str]) -> None:
    results = []
    for net in (prepared(2), Net(by_hand=2)):
        for block in net.blocks:
            block.compile(backend=keep(graphs))
        results.append(grads(net, batch()))
        assert any("softmax" in code for code in graphs)
        graphs.clear()
    assert same(*results)


@pytest.mark.slow
def test_a_compiled_model_leaves_prepared_blocks_as_they_are(graphs: list[str]) -> None:
    blocks = [Mixes("none"), Mixes("none")]
    blocks[1].load_state_dict(blocks[0].state_dict())
    zcomm.split_batch(blocks[:1], parts=2)

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([checkpoint(blocks[1], part, use_reentrant=False) for part in x.sin().chunk(2)]).square().sum()

    compiled = lambda_module(lambda x: blocks[0](x.sin()).square().sum(), blocks[0])
    compiled.compile(backend=keep(graphs))
    assert same(grads(compiled, batch()[:, 0]), grads(lambda_module(by_hand, blocks[1]), batch()[:, 0]))
    code = "".join(graphs)
    assert "sin" in code and "square" in code and "linear" not in code
