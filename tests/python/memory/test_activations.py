"""offload_activations: the same gradients, the choice of offloaded tensors, and buffers that are reused."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcomm

WIDTH, ROWS = 48, 40
ACTIVATION = 4 * WIDTH * ROWS


class Net(nn.Module):
    """Slices of one projection, a transposed view, an output that is saved, dropout, recomputed blocks."""

    def __init__(self, recompute: str = "no") -> None:
        super().__init__()
        self.recompute = recompute
        self.inner = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(4))
        self.register_buffer("mask", torch.tril(torch.ones(ROWS, ROWS)))

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = layer(x).chunk(3, dim=-1)
        weights = torch.softmax((q @ k.t()) * self.mask, dim=-1)
        return x + F.dropout(torch.exp(-(weights @ v).square()), 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.inner:
            if self.recompute == "no":
                x = self.block(layer, x)
            else:
                x = checkpoint(self.block, layer, x, use_reentrant=self.recompute == "reentrant")
        return x.square().mean()


def made(recompute: str = "no") -> tuple[Net, torch.Tensor]:
    torch.manual_seed(0)
    return Net(recompute), torch.randn(ROWS, WIDTH, requires_grad=True)


def gradients(net: Net, x: torch.Tensor, offload: Any = None, passes: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(1)
    if offload is None:
        loss = net(x)
    else:
        with offload:
            loss = net(x)
    for number in range(passes):
        loss.backward(retain_graph=number + 1 < passes)
    found = [param.grad for param in (*net.parameters(), x)]
    for param in (*net.parameters(), x):
        param.grad = None
    assert all(grad is not None for grad in found)
    return [grad for grad in found if grad is not None]


@pytest.fixture(params=["cpu", "nvme"])
def offload(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = zcomm.offload_activations(request.param, min_nbytes=1024, nvme_path=tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("recompute", ["no", "reentrant", "checkpoint"])
@pytest.mark.parametrize("passes", [1, 2])
def test_gradients_have_the_same_bits(offload: Any, recompute: str, passes: int) -> None:
    if recompute == "reentrant" and passes == 2:
        pytest.skip("a reentrant checkpoint frees what it saved")
    net, x = made(recompute)
    plain = gradients(net, x, passes=passes)
    for _ in range(3):
        for a, b in zip(plain, gradients(net, x, offload, passes), strict=True):
            assert torch.equal(a, b)
    assert offload.stats()["offloaded_count"] >= 3 * 4
    assert offload.stats()["offloaded_nbytes"] == 0, "backward has dropped all of it"


def test_steps_after_the_first_allocate_nothing(offload: Any) -> None:
    net, x = made()
    seen = []
    for _ in range(4):
        gradients(net, x, offload)
        stats = offload.stats()
        seen.append((stats["buffer_nbytes"], stats["swap_nbytes"], stats["peak_nbytes"]))
    assert len(set(seen[1:])) == 1 and seen[-1][2] >= 4 * ACTIVATION


def test_every_byte_is_counted() -> None:
    """Two layers save their inputs and tanh's output, which is the second layer's input; each counts once."""
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    x = torch.randn(ROWS, WIDTH)
    offload = zcomm.offload_activations(min_nbytes=0)
    with offload:
        loss = net(x).sum() + net[2](x).sum()
    assert offload.stats()["offloaded_count"] == 2
    assert offload.stats()["offloaded_nbytes"] == offload.stats()["peak_nbytes"] == 2 * ACTIVATION
    assert offload.stats()["buffer_nbytes"] == 2 * -(-ACTIVATION // 4096) * 4096
    loss.backward()
    assert offload.stats()["offloaded_nbytes"] == 0
    offload.close()
    assert offload.stats()["buffer_nbytes"] == 0


def test_what_stays() -> None:
    net, x = made()
    saved: list[Any] = []
    offload = zcomm.offload_activations(min_nbytes=ACTIVATION + 1, keep=[net.mask])
    pack = offload._pack

    def spy(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        saved.append((tensor.untyped_storage().nbytes(), tensor._base, tensor, packed is not tensor))
        return packed

    offload._pack = spy  # type: ignore[method-assign]
    gradients(net, x, offload)
    for nbytes, base, tensor, taken in saved:
        stays = nbytes <= ACTIVATION or isinstance(base, nn.Parameter) or tensor.data_ptr() == net.mask.data_ptr()
        assert taken != stays, f"{tuple(tensor.shape)} of {nbytes} bytes"
    assert {taken for *_, taken in saved} == {True, False}
    offload.close()


def conjugated(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_complex(x.view(-1, 2)).exp().conj()


class Saves(torch.autograd.Function):
    """Multiplies by a tensor that ``save`` makes, and saves that tensor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, save: Any) -> torch.Tensor:
        made = save(x.detach())
        ctx.save_for_backward(made)
        return x * dense(made)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * dense(*ctx.saved_tensors), None


def dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor + 0


VIEWS = {  # each saves tensors of another kind
    "conjugate": lambda x: (conjugated(x) * conjugated(x).sin()).real,
    "conjugate transposed": lambda x: (conjugated(x).view(12, -1) @ conjugated(x).view(12, -1).mH).abs(),
    "spectrum": lambda x: (torch.fft.rfft(x.sin()) * torch.fft.rfft(x).conj()).imag,
    "negative": lambda x: conjugated(x).imag * conjugated(x).imag,
    "negative of real": lambda x: torch._neg_view(x.exp()) * x.sin(),
    "both": lambda x: (lambda c: (c * c.sin()).real)(torch._neg_view(conjugated(x))),
    "conjugated twice": lambda x: (conjugated(x).conj() * conjugated(x)).real,
    "real view": lambda x: torch.view_as_real(conjugated(x).resolve_conj()).square(),
    "offset and strides": lambda x: x.exp()[7::3] * x.exp()[6:-1:3].sin(),
    "expanded": lambda x: x.exp()[:, None].expand(-1, 3) * x.sin()[:, None],
    "empty": lambda x: torch.cat([x.exp()[x.numel() :].square(), x.exp().square()]),
    "other dtype": lambda x: x.exp().double() * x.exp().double().sin(),
    "sparse": lambda x: torch.sparse.mm(x.view(12, -1).exp().to_sparse(), x.view(-1, 12)),
    "jagged": lambda x: (lambda n: (n * n).values())(
        torch.nested.as_nested_tensor([x.exp(), x[5:].sin()], layout=torch.jagged)
    ),
    "quantized": lambda x: Saves.apply(x, lambda v: torch.quantize_per_tensor(v, 0.1, 3, torch.qint8)),
    "zeros without memory": lambda x: Saves.apply(x, lambda v: torch._efficientzerotensor(v.shape, dtype=v.dtype)),
}


@pytest.mark.filterwarnings("ignore:.*(deprecated|Sparse|prototype)")
def test_views_of_every_kind_come_back_as_they_were(offload: Any) -> None:
    offload._min_nbytes = 0
    torch.manual_seed(0)
    start = torch.randn(24 * 12)
    for kind, function in VIEWS.items():
        found = []
        for context in (contextlib.nullcontext(), offload):
            x = start.clone().requires_grad_()
            with context:
                y = function(x)
            y.square().sum().backward()
            found.append(x.grad)
        assert torch.equal(*found), kind


@pytest.mark.filterwarnings("ignore:.*prototype")
def test_a_nested_tensor_with_strides_is_refused(offload: Any) -> None:
    offload._min_nbytes = 0
    x = torch.randn(8, requires_grad=True)
    with offload, pytest.raises(NotImplementedError, match=r"nested tensor.*use layout=torch\.jagged"):
        torch.nested.as_nested_tensor([x.exp(), x[3:].sin()], layout=torch.strided).square()
    x.exp().sum().backward()


def test_a_changed_tensor_is_another_one(offload: Any) -> None:
    """Autograd refuses an activation that was changed in place; the offloaded copy keeps the old values."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with offload:
        y = x * 2
        first = y.square().sum()
        with torch.no_grad():
            y.mul_(3)
        second = y.square().sum()
    (first + second).backward()
    # The saved values count: 2 * y each, with the y of that time.
    assert torch.equal(x.grad, 2 * (2 * (x.detach() * 2)) + 2 * (2 * (x.detach() * 2 * 3)))


def test_graphs_that_are_dropped_give_back(offload: Any) -> None:
    net, x = made()
    with offload:
        loss = net(x)
    assert offload.stats()["offloaded_nbytes"] > 0
    del loss
    gc.collect()
    assert offload.stats()["offloaded_nbytes"] == 0
    with offload, torch.no_grad():
        net(x)
    assert offload.stats()["offloaded_nbytes"] == 0


def test_an_error_inside_leaves_the_hooks_alone(offload: Any) -> None:
    net, x = made()
    with pytest.raises(ZeroDivisionError), offload:
        net(x)
        raise ZeroDivisionError
    net(x).backward()
    assert offload.stats()["offloaded_nbytes"] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"tier": "disk"}, "tier='disk'"),
        ({"min_nbytes": -1}, "min_nbytes=-1"),
        ({"tier": "nvme"}, "nvme_path"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        zcomm.offload_activations(**arguments)


def test_closed_ones_say_so(tmp_path: Path) -> None:
    offload = zcomm.offload_activations("nvme", nvme_path=tmp_path)
    offload.close()
    offload.close()
    with pytest.raises(RuntimeError, match="closed"):
        offload.__enter__()


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["no", "reentrant", "checkpoint"])
def test_in_stage_3_by_units(tmp_path: Path, recompute: str) -> None:
    ends = []
    for tier in (None, "cpu", "nvme"):
        net, x = made(recompute)
        opt = zcomm.ZeroOptimizer(net, stage=3, offload="nvme", nvme_path=tmp_path, lr=1e-2)
        offload = None if tier is None else zcomm.offload_activations(tier, min_nbytes=1024, nvme_path=tmp_path)
        for step in range(3):
            torch.manual_seed(step)
            if offload is None:
                loss = net(x)
            else:
                with offload:
                    loss = net(x)
            loss.backward()
            opt.step()
            opt.zero_grad()
        ends.append(opt.full_state_dict())
        opt.close()
        if offload is not None:
            assert offload.stats()["offloaded_count"] >= 3 * 4
            offload.close()
    for other in ends[1:]:
        assert all(torch.equal(value, ends[0][name]) for name, value in other.items())
    zcomm.shutdown()
