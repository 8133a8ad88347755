"""Unit-wise stage 3 when backward leaves or enters a unit other than through its module's outputs."""

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

import simulated
import zcomm
from tiers import long, slow
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
WIDTH, BLOCKS = 16, 7
PRIVATE = Case(3, None, 0.02, share_parameters=False, prefetch=0)
CASES = [Case(2), PRIVATE, Case(3, "nvme", 0.02, prefetch=1)]
ON_DEVICE = [Case(3, "cpu", 0.02, prefetch=0), Case(3, "nvme", 0.02, prefetch=1)]


class Result:
    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Block(nn.Module):
    """A block. ``unused``: a bias that no loss depends on, like the bias of an expert without tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.unused = nn.Parameter(torch.zeros(WIDTH))
        self.guest: list[Block] = []

    def forward(self, x: Any, host: Block | None = None) -> Any:
        if isinstance(x, Result):
            return Result(self.run(x.value))
        if host is not None:  # runs inside the host's forward
            x = x + 0.1 * F.linear(F.linear(x, host.up.weight), host.down.weight)
        return self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        return self.guest[0](x, self) if self.guest else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 4)
        self.opaque = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(Result(x)).value if self.opaque else block(x)
        return self.head(x)


def made() -> Net:
    torch.manual_seed(0)
    return Net()


def input_of(rank: int, number: int) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * number + rank))


def plain(net: Net, x: torch.Tensor) -> torch.Tensor:
    return net(x).square().mean()


def penalty(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Make the graph of a backward pass part of the loss."""
    x = x.clone().requires_grad_()
    out = net(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.square().mean() + 0.01 * slope.square().sum(1).sub(1).square().mean()


def penalty_alone(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Reach the outputs of no unit."""
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).square().sum(), x, create_graph=True)
    return slope.square().mean()


def weight_penalty(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Compute gradients with respect to parameters, which reach no parameter's ``grad``."""
    names = ("blocks.5.up.bias", "blocks.1.down.weight")
    params = [param for name, param in net.named_parameters() if name in names]
    loss = net(x).square().mean()
    return loss + 0.1 * sum(slope.square().sum() for slope in torch.autograd.grad(loss, params, create_graph=True))


def inner(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Use outputs neither of the last units, nor of the unit with the activation."""
    caught: list[torch.Tensor] = []
    handle = net.blocks[3].up.register_forward_hook(lambda module, args, out: caught.append(out))
    net(x)
    handle.remove()
    return torch.tanh(caught[0]).square().mean()


def opaque(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Units return objects without a known structure."""
    net.opaque = True
    return plain(net, x)


def nested(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Let a unit that runs in another one's forward use the other's weights."""
    net.blocks[2].guest = [net.blocks[5]]
    return penalty(net, x)


def recomputed(net: Net, x: torch.Tensor) -> torch.Tensor:
    """Put checkpoints, which save tensors in their own way, around units, with and without a penalty."""
    x = x.clone().requires_grad_()
    y: Any = x
    for block in net.blocks:
        y = checkpoint(block, y, use_reentrant=False)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return net.head(y).square().mean() + slope.square().mean()


def offloaded(net: Net, x: torch.Tensor) -> torch.Tensor:
    with zcomm.offload_activations(min_nbytes=1):
        return plain(net, x)


LOSSES: dict[str, Callable[[Net, torch.Tensor], torch.Tensor]] = {
    "plain": plain,
    "penalty": penalty,
    "penalty alone": penalty_alone,
    "weight penalty": weight_penalty,
    "inner": inner,
    "opaque": opaque,
    "nested": nested,
    "recomputed": recomputed,
    "offloaded": offloaded,
}


def train(case: Case, folder: str, kind: str, steps: int = 3) -> dict[str, Any]:
    comm = zcomm.init(timeout=60)
    net = made()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    opt = zcomm.ZeroOptimizer(net, sgd, nvme_path=folder, **case.arguments())
    losses = []
    for step in range(steps):
        loss = LOSSES[kind](net, input_of(comm.rank, step))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
    slots = len(getattr(getattr(opt._live.store, "memory", None), "slots", ()))
    weights = opt.full_state_dict()
    opt.close()
    return {"bits": (losses, digest(weights)), "weights": weights, "slots": slots}


def train_kinds(folder: str) -> dict[str, list[dict[str, Any]]]:
    """Return for each kind every case on the CPU, and the cases of stage 3 on a device with late streams."""
    found = {kind: [train(case, folder, kind) for case in CASES] for kind in LOSSES}
    simulated.play(0.001, seed=zcomm.rank())
    for kind, results in found.items():
        if kind != "nested":  # otherwise blocks.2 keeps a slot on the device that others need
            results += [train(case, folder, kind) for case in ON_DEVICE]
    simulated.stop()
    return found


def by_torch(kind: str, world_size: int, steps: int = 3) -> dict[str, torch.Tensor]:
    """Run the same training in one process without zcomm."""
    net = made()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        for rank in range(world_size):
            (LOSSES[kind](net, input_of(rank, step)) / world_size).backward()
        sgd.step()
        sgd.zero_grad()
    return {name: param.detach() for name, param in net.named_parameters()}


@pytest.mark.parametrize("world_size", [long(1), slow(2)])
def test_the_same_bits_and_torchs_numbers(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    wanted = {kind: by_torch(kind, world_size) for kind in LOSSES}
    for kinds in run_ranks(train_kinds, world_size, str(tmp_path)):
        for kind, results in kinds.items():
            assert len(set(results[0]["bits"][0])) == 3, f"{kind}: it learns"
            for case, result in zip([*CASES, *ON_DEVICE], results, strict=kind != "nested"):
                assert result["bits"] == results[0]["bits"], f"{kind} of {case}: other bits"
                for name, value in wanted[kind].items():
                    torch.testing.assert_close(
                        result["weights"][name], value, rtol=1e-5, atol=1e-6, msg=f"{kind}: {name}"
                    )
                if case.stage == 3:
                    assert result["slots"] <= case.prefetch + 2, f"{kind}: the ring has grown"


# --- hooks on saved tensors -----------------------------------------------------------------------------------------


def top() -> Any:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def test_a_forward_that_fails_leaves_no_hooks() -> None:
    net = made()
    opt = zcomm.ZeroOptimizer(net, **PRIVATE.arguments())
    assert opt._live.store.weights.hooks._guards
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        net(torch.ones(3, WIDTH + 1))
    assert top() is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        caught: list[torch.Tensor] = []
        net.blocks[1].down.register_forward_pre_hook(lambda module, args: caught.append(args[0]))
        out = net(torch.ones(3, WIDTH))
        with torch.no_grad():
            caught[0].add_(1)
        out.sum().backward()
    assert top() is None
    opt.close()
    zcomm.shutdown()


def test_an_older_torch_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("zcomm.zero.units.saved_tensors._top", None)
    net = made()
    with caplog.at_level(logging.INFO, "zcomm"):
        opt = zcomm.ZeroOptimizer(net, **PRIVATE.arguments())
    assert any("before torch 2.8" in record.getMessage() for record in caplog.records)
    plain(net, input_of(0, 0)).backward()
    opt.step()
    opt.close()
    zcomm.shutdown()
