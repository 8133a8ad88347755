"""The program that episodes train: once with ZeroOptimizer, once with plain torch in one process.

`drive` plays a training's steps and events on either. Plain torch computes the mean of all ranks' losses.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import nn

from soaking.plan import Training, arguments

RATE = {"sgd": 0.05, "momentum": 0.02, "adamw": 0.003, "adagrad": 0.01}  # small: rounding is not to be amplified
IN, OUT, ROWS = 6, 4, 3


class Failed(Exception):
    """The error that events raise in forward and backward."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.fail = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fail:
            raise Failed("in forward")
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, job: Training) -> None:
        super().__init__()
        torch.manual_seed(job.seed % 1000)
        self.stem = nn.Linear(IN, job.width)
        self.blocks = nn.ModuleList(Block(job.width) for _ in range(job.blocks))
        self.norm = nn.LayerNorm(job.width)
        self.head = nn.Linear(job.width, OUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.to(self.norm.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rate_of(job: Training) -> float:
    return RATE[job.optimizer] * (1.0 if job.precision == "fp32" else 0.3)


def make_optimizer(job: Training, model: nn.Module) -> torch.optim.Optimizer:
    rate = rate_of(job)
    if job.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), rate, eps=1e-3, weight_decay=0.1)
    if job.optimizer == "adagrad":
        return torch.optim.Adagrad(model.parameters(), rate, eps=1e-3)
    return torch.optim.SGD(model.parameters(), rate, momentum=0.9 if job.optimizer == "momentum" else 0.0)


def edit(model: nn.Module, factor: float) -> None:
    """Change weights as programs do in training: through `data`, and in place."""
    for p in model.parameters():
        p.data.mul_(factor)
    with torch.no_grad():
        for p in model.head.parameters():
            p.clamp_(-0.3, 0.3)


def loss_of(model: nn.Module, job: Training, rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(job.seed % 9973 + 7919 * number + rank)
    x = torch.randn(ROWS, IN, generator=generator)
    y = torch.randn(ROWS, OUT, generator=generator) + x[:, :OUT]
    return F.mse_loss(model(x).float(), y)


def batch_number(step: int, micro: int) -> int:
    return 10 * step + micro


class Trainer(Protocol):
    """The part of a way to train that `drive` needs."""

    def micro_step(self, number: int, more: int | None) -> None: ...
    def backward_alone(self, number: int) -> None: ...
    def event(self, what: str, number: float, step: int) -> None: ...
    def gradients_scaled(self, factor: float) -> None: ...
    def finish_step(self) -> None: ...


def drive(trainer: Trainer, job: Training, first: int, at_step: Callable[[int], None]) -> None:
    """Run all steps from ``first`` on."""
    for step in range(first, job.steps):
        at_step(step)
        events = {event.what: event.number for event in job.events[step]}
        for what, number in events.items():
            if what == "forget":
                trainer.backward_alone(batch_number(step, 8))
            elif what not in ("no-sync", "set-gradient"):
                trainer.event(what, number, step)
        for micro in range(job.accum):
            more = batch_number(step, 9) if "no-sync" in events and job.accum == 1 else None
            trainer.micro_step(batch_number(step, micro), more)
            if micro == job.accum - 1 and "set-gradient" in events:
                trainer.gradients_scaled(events["set-gradient"])
            trainer.finish_step()


class PlainTrainer:
    """The oracle: plain torch in one process."""

    def __init__(self, job: Training, world_size: int) -> None:
        self._job, self._world_size = job, world_size
        self.model = Net(job)
        self._optimizer = make_optimizer(job, self.model)
        self._saved: Any = None
        self._micro = 0

    def _backward(self, number: int) -> None:
        for rank in range(self._world_size):
            (loss_of(self.model, self._job, rank, number) / (self._world_size * self._job.accum)).backward()

    def micro_step(self, number: int, more: int | None) -> None:
        if more is not None:
            self._backward(more)
        self._backward(number)

    def backward_alone(self, number: int) -> None:
        pass

    def gradients_scaled(self, factor: float) -> None:
        grad = self.model.head.weight.grad
        assert grad is not None
        grad.mul_(factor)

    def finish_step(self) -> None:
        self._micro += 1
        if self._micro < self._job.accum:
            return
        self._micro = 0
        if self._job.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self._job.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def event(self, what: str, number: float, step: int) -> None:
        if what.startswith("save"):
            self._saved = copy.deepcopy((self.model.state_dict(), self._optimizer.state_dict()))
        elif what == "load":
            weights, state = copy.deepcopy(self._saved)
            self.model.load_state_dict(weights)
            self._optimizer.load_state_dict(state)
        elif what == "edit":
            edit(self.model, number)
        elif what == "set-weight":
            with torch.no_grad():
                self.model.stem.weight.mul_(number)
        elif what == "gathered-edit":
            with torch.no_grad():
                self.model.blocks[0].up.weight.add_(number - 0.7)
        elif what == "rate":
            self._optimizer.param_groups[0]["lr"] = rate_of(self._job) * number


class ZeroTrainer:
    """Trainer with ZeroOptimizer, on one rank; checkpoints are ``folder/ck-STEP``."""

    def __init__(self, job: Training, comm: Any, folder: Path) -> None:
        import zcomm

        self._job, self._comm, self._folder = job, comm, folder
        self._saving: Any = None
        self.model = Net(job)
        self.optimizer = zcomm.ZeroOptimizer(
            self.model, make_optimizer(job, self.model), comm=comm, **arguments(job, str(folder / "swap"))
        )

    def checkpoints(self) -> list[int]:
        """List the steps of whole checkpoints, oldest first."""
        return sorted(int(path.name[3:]) for path in self._folder.glob("ck-*") if path.name[3:].isdigit())

    def resume(self) -> int:
        """Load the last checkpoint, if there is one; the step to go on with. Its save is that step's first event."""
        found = self.checkpoints()
        if not found:
            return 0
        return int(self.optimizer.load(self._folder / f"ck-{found[-1]}")["step"])

    def micro_step(self, number: int, more: int | None) -> None:
        if more is not None:
            with self.optimizer.no_sync():
                self._backward(more)
        self._backward(number)

    def _backward(self, number: int) -> None:
        self.optimizer.backward(loss_of(self.model, self._job, self._comm.rank, number))

    def backward_alone(self, number: int) -> None:
        self._backward(number)
        self.optimizer.zero_grad()

    def gradients_scaled(self, factor: float) -> None:
        import zcomm

        weight = self.model.head.weight
        grad = zcomm.zero.full_grad(weight)
        zcomm.zero.set_full_grad(weight, grad * factor)

    def finish_step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def event(self, what: str, number: float, step: int) -> None:
        import zcomm

        opt, model = self.optimizer, self.model
        if what.startswith("save"):
            self._saving = opt.save(self._folder / f"ck-{step}", client_state={"step": step}, wait=what == "save")
        elif what == "load":
            if self._saving is not None:
                self._saving.wait()
            opt.load(self._folder / f"ck-{max(s for s in self.checkpoints() if s <= step)}", random=False)
        elif what == "state-dict":
            opt.load_state_dict(opt.state_dict())
        elif what == "edit":
            edit(model, number)
        elif what == "set-weight":
            weight = model.stem.weight
            zcomm.zero.set_full_param(weight, zcomm.zero.full_param(weight) * number)
        elif what == "gathered-edit":
            weight = model.blocks[0].up.weight
            with zcomm.zero.GatheredParameters(weight, modifier_rank=1), torch.no_grad():
                if self._comm.rank == 1:
                    weight.add_(number - 0.7)
        elif what == "rate":
            opt.param_groups[0]["lr"] = rate_of(self._job) * number
        elif what == "evaluate":
            with torch.no_grad():
                loss_of(model, self._job, self._comm.rank, 777)
        elif what in ("fail-forward", "fail-backward"):
            self._fail(what)
        elif what == "dropped-work":
            for count in (7, 5000):
                self._comm.all_reduce(torch.ones(count), async_op=True)
        elif what == "weights":
            opt.full_state_dict()

    def _fail(self, what: str) -> None:
        block = self.model.blocks[1]
        handle = None
        if what == "fail-backward":

            def fail(*_: Any) -> None:
                raise Failed("in backward")

            handle = block.register_full_backward_hook(fail)
        else:
            block.fail = True
        try:
            self._backward(888)
            raise AssertionError(f"{what}: nothing was raised")
        except Failed:
            pass
        finally:
            block.fail = False
            if handle is not None:
                handle.remove()
        self.optimizer.zero_grad()

    def close(self) -> None:
        self.optimizer.close()


def unequal_rate(trainer: ZeroTrainer, job: Training, rank: int) -> str:
    """Update with another learning rate on each rank; return a text if its error is wrong, else ""."""
    trainer.optimizer.param_groups[0]["lr"] = rate_of(job) * (1 + rank)
    try:
        for micro in range(job.accum):
            trainer.micro_step(batch_number(job.steps, micro), None)
            trainer.finish_step()
        trainer.optimizer.full_state_dict()
    except (ValueError, RuntimeError) as error:
        return "" if "lr" in str(error) else f"learning rates that differ by rank: an error without lr: {error}"
    return "learning rates that differ by rank: no error"


def distance(ours: dict[str, torch.Tensor], job: Training, world_size: int) -> str:
    """Name weights that are farther from plain torch than rounding explains; "" if there are none."""
    plain = PlainTrainer(job, world_size)
    first = copy.deepcopy(plain.model.state_dict())
    drive(plain, job, 0, lambda step: None)
    part, own = (2e-3, 1e-5) if job.precision == "fp32" else (0.15, 0.01)
    for name, wanted in plain.model.state_dict().items():
        apart, moved = (ours[name].float() - wanted).norm(), (wanted - first[name]).norm()
        if not apart <= part * moved + own * wanted.norm() + 1e-6:
            return f"{name} is {float(apart):.3g} away from plain torch's, which moved by {float(moved):.3g}"
    return ""


def quiet() -> None:
    logging.getLogger("zcomm").setLevel(logging.ERROR)
