"""Sums of gradients on a drive: the bits that they have in RAM, whatever a program does with its gradients. Errors."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.assemble
from test_broken_step import FailedWork
from zcomm.zero import full_grad
from zcomm.zero.optim_state.swap_file import Swap
from zero_jobs import Case, digest

Run = Callable[..., list[Any]]
WIDTH = 24
BASE = Case(3, "nvme", 0.004)
TIERS = [
    replace(BASE, gradients="nvme"),
    replace(BASE, gradients="nvme", update="forward"),
    replace(BASE, update="forward"),
]


class Net(nn.Module):
    """Blocks with a tied weight, a frozen one, one that is never used, and a sum that autograd expands."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = self.frozen(x) * self.scale
        return self.head(x) + self.blocks[0].bias.sum() * 0.1  # its gradient is expanded, and not plain


def loss_of(net: nn.Module, number: int) -> torch.Tensor:
    tokens = torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(10 * number + zcomm.rank()))
    return nn.functional.cross_entropy(net(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def plainly(opt: Any, net: nn.Module, number: int) -> None:
    opt.backward(loss_of(net, number))


def edits(opt: Any, net: nn.Module, number: int) -> None:
    """Gradients are scaled, measured, dropped, replaced and read."""
    opt.backward(loss_of(net, number))
    params = dict(net.named_parameters())
    params["blocks.1.weight"].grad.mul_(0.5)  # type: ignore[union-attr]
    params["blocks.2.weight"].grad.add_(0.01)  # type: ignore[union-attr]
    params["blocks.3.bias"].grad = None
    params["blocks.4.bias"].grad = torch.full((WIDTH,), 0.1 * (zcomm.rank() + 1))
    norm = nn.utils.clip_grad_norm_([p for p in net.parameters() if p.requires_grad], 0.05)
    whole = full_grad(params["blocks.5.weight"])
    assert whole is not None and float(norm) > 0
    opt.found.append(digest({"norm": norm.reshape(1), "whole": whole}))


def twice(opt: Any, net: nn.Module, number: int) -> None:
    opt.backward(loss_of(net, number))
    opt.backward(0.5 * loss_of(net, number + 100))


def locally(opt: Any, net: nn.Module, number: int) -> None:
    with opt.no_sync():
        opt.backward(loss_of(net, number))
        opt.backward(loss_of(net, number + 100))
    opt.backward(loss_of(net, number + 200))


def broken(opt: Any, net: nn.Module, number: int) -> None:
    """End a pass with an exception, and run it again."""

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in backward")

    handle = net.blocks[2].weight.register_hook(fail)
    with pytest.raises(ValueError, match="in backward"):
        opt.backward(loss_of(net, number))
    handle.remove()
    zcomm.barrier()
    opt.zero_grad()
    opt.backward(loss_of(net, number))


def nothing(opt: Any, net: nn.Module, number: int) -> None:
    """Every other step has no gradients."""
    if number % 2:
        opt.backward(loss_of(net, number))


def overflows(opt: Any, net: nn.Module, number: int) -> None:
    loss = loss_of(net, number)
    opt.backward(loss * float("inf") if number == 1 else loss)


def keeps(opt: Any, net: nn.Module, number: int) -> None:
    """zero_grad() makes zeros of them, and a step without another pass goes on by momentum."""
    opt.backward(loss_of(net, number))
    opt.step()
    opt.zero_grad(set_to_none=False)


Act = Callable[[Any, nn.Module, int], None]
SCENES: dict[str, tuple[Act, dict[str, Any]]] = {
    "plain": (plainly, {}),
    "clipped": (plainly, {"clip_norm": 0.1}),
    "edits": (edits, {}),
    "edits, clipped": (edits, {"clip_norm": 0.1}),
    "twice": (twice, {"clip_norm": 0.1}),
    "locally": (locally, {"clip_norm": 0.1}),
    "broken": (broken, {}),
    "nothing": (nothing, {"clip_norm": 0.1}),
    "keeps": (keeps, {"clip_norm": 0.1}),
    "overflow": (overflows, {"precision": "fp16", "loss_scale": zcomm.zero.LossScale(initial_power=8)}),
    "skips": (overflows, {"precision": "bf16", "skip_nonfinite": True, "clip_norm": 1.0}),
    "lamb": (plainly, {"optimizer": "lamb"}),
    "muon": (plainly, {"optimizer": "muon"}),
    "sgd": (plainly, {"optimizer": "sgd"}),
    "fp16 in fp32": (
        twice,
        {
            "precision": "fp16",
            "communication_dtype": "fp32",
            "loss_scale": zcomm.zero.LossScale(initial_power=8),
        },
    ),
    "bf16, travels": (edits, {"communication_dtype": "bf16"}),
}


def groups(net: nn.Module, optimizer: str) -> Any:
    if optimizer != "muon":
        return net
    trained = [p for p in net.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim == 2]},
        {"params": [p for p in trained if p.ndim != 2], "use_muon": False},
    ]


def train(case: Case, scene: str, folder: str, backend: str | None) -> dict[str, Any]:
    zcomm.init(backend, timeout=30) if backend else zcomm.init(timeout=30)
    torch.manual_seed(3)
    act, options = SCENES[scene]
    net, options = Net(), dict(options)
    kind = options.pop("optimizer", "adamw")
    arguments = {**case.arguments(), "lr": 1e-2, **options}
    if kind in ("lamb", "muon") and case.update == "forward":
        return train(replace(case, update="step"), scene, folder, backend)
    stage = 1 if kind == "muon" else case.stage  # param groups
    if kind == "muon":
        offload = arguments["offload"]
        tier = None if isinstance(offload, str) else offload.gradients
        arguments |= {"stage": stage, "offload": zcomm.Offload("nvme", gradients=tier)}
    opt: Any = zcomm.ZeroOptimizer(groups(net, kind), kind, nvme_path=folder, **arguments)
    opt.found = []
    norms = []
    for number in range(4):
        act(opt, net, number)
        opt.step()
        norms.append(None if opt.grad_norm is None else float(opt.grad_norm).hex())
        opt.zero_grad()
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    weights = dict(opt.full_state_dict()) if kind != "muon" else {n: p.detach() for n, p in net.named_parameters()}
    result = {"norms": norms, "bits": digest({**weights, **arrays}), "found": opt.found}
    result |= {"skipped": opt.skipped_steps, "nonfinite": opt.nonfinite}
    opt.close()
    return result


def train_all(scenes: list[str], folder: str, backend: str | None = None) -> dict[str, list[Any]]:
    return {scene: [train(case, scene, folder, backend) for case in (BASE, *TIERS)] for scene in scenes}


@pytest.mark.parametrize(("world_size", "backend"), [(1, None), (2, None), (2, "tcp")])
def test_the_bits_of_sums_in_ram(run_ranks: Run, tmp_path: Path, world_size: int, backend: str | None) -> None:
    for found in run_ranks(train_all, world_size, list(SCENES), str(tmp_path), backend, timeout_s=110):
        for scene, (wanted, *results) in found.items():
            for case, result in zip(TIERS, results, strict=True):
                assert result == wanted, f"{scene}: {case}"
            assert (wanted["skipped"] > 0) == (scene in ("overflow", "skips")), scene


def test_options_are_checked() -> None:
    net = nn.Linear(4, 4)
    for offload, options, text in (
        ({"gradients": "disk"}, {}, "gradients='disk'"),
        ({"gradients": "nvme"}, {"stage": 0}, "needs stage=1, 2 or 3"),
        ({"gradients": "nvme"}, {"stage": 2}, "needs nvme_path"),
    ):
        with pytest.raises(ValueError, match=text):
            zcomm.ZeroOptimizer(net, offload=zcomm.Offload(**offload), **options)
    zcomm.shutdown()


# --- errors of the drive --------------------------------------------------------------------------------------------


class FaultySwap(Swap):
    """A read or write of the sums of gradients fails, once. where: "read", "write", or "refused" (at the call)."""

    where = ""
    good = 0

    def _fails(self, key: str, what: str) -> bool:
        if not key.startswith("gradients.") or what not in FaultySwap.where:
            return False
        FaultySwap.good -= 1
        if FaultySwap.good >= 0:
            return False
        kind, FaultySwap.where = FaultySwap.where, ""
        if "refused" in kind:
            raise OSError(errno.EIO, f"{what} of key {key}: refused")
        return True

    def read(self, key: str, ptr: int, nbytes: int) -> Any:
        return FailedWork() if self._fails(key, "read") else super().read(key, ptr, nbytes)

    def write(self, key: str, ptr: int, nbytes: int) -> Any:
        return FailedWork() if self._fails(key, "write") else super().write(key, ptr, nbytes)


def lost_and_run_again(what: str, folder: str, failing: int) -> None:
    """Lose a sum. step() raises on all ranks before anything has changed; backward runs again, with the same bits."""
    comm = zcomm.init(timeout=30)
    ends = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zcomm.zero.assemble, "Swap", FaultySwap)
        for fails in (False, True):
            torch.manual_seed(3)
            net = Net()
            opt: Any = zcomm.ZeroOptimizer(net, nvme_path=folder, grad_accum=2, **TIERS[0].arguments())
            for number in range(3):
                for again in (True, False) if fails and number == 1 else (False,):
                    if again and comm.rank == failing:
                        FaultySwap.where, FaultySwap.good = what, 3
                    for micro in range(2):
                        loss_of(net, 2 * number + micro).backward()
                        if again and micro == 1:
                            with pytest.raises(OSError, match=r"call zero_grad|rank") as told:
                                opt.step()
                            assert told.value.errno == errno.EIO
                        else:
                            opt.step()
                        opt.zero_grad()
            opt.save(Path(folder) / "saved")
            ends.append((opt.step_count, digest(opt.full_state_dict())))
            opt.close()
    assert ends[0] == ends[1]
    assert FaultySwap.where == ""


@pytest.mark.parametrize("what", ["read", "write", "write, refused"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_lost_sum_costs_a_backward_pass(run_ranks: Run, tmp_path: Path, world_size: int, what: str) -> None:
    run_ranks(lost_and_run_again, world_size, what, str(tmp_path), world_size - 1)
