"""The same program under plain torch and under ZeroOptimizer.

Plain torch runs all ranks' batches in one process and averages their losses, which is equivalent to
DistributedDataParallel's averaged gradients; ZeroOptimizer runs this rank's batch. An idiom is written once, against
`IdiomRun`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import zcomm
from zcomm.zero import full_param
from zcomm.zero.sharded.param import ShardedParameter

IN, WIDTH, OUT, ROWS = 5, 8, 3, 4
Batch = tuple[torch.Tensor, torch.Tensor]
LossOf = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
SEEDING = threading.Lock()  # ranks may be threads, which share torch's generator


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Repeated blocks between layers of their own, and a parameter that the model itself has."""

    def __init__(self, between: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(IN, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH) if between is None else between()
        self.head = nn.Linear(WIDTH, OUT)
        self.shift = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.to(self.stem.weight.dtype))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) + self.shift


def squared_error(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x).float(), y)


def batch_of(rank: int, number: int) -> Batch:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(ROWS, IN, generator=generator)
    return x, 2.0 * torch.randn(ROWS, OUT, generator=generator) + x[:, :OUT]


def named_arrays(name: str, value: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors and numbers of nested lists and dicts, as arrays of float64."""
    if isinstance(value, dict | list | tuple):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from named_arrays(f"{name}.{key}", each)
    elif value is not None:
        array = value.detach().double().numpy() if isinstance(value, torch.Tensor) else value
        yield name, np.array(array, dtype=np.float64)


@dataclass(frozen=True)
class Setting:
    """Stage, tier and precision of an idiom's run; `zero` are the arguments of ZeroOptimizer."""

    name: str
    zero: dict[str, Any]
    precision: str = "fp32"
    sharded: bool = False  # parameters are ShardedParameters, which have memory only while their module runs

    @property
    def close(self) -> tuple[float, float]:
        """Tolerance, as a part of the distance that training has moved a tensor, and as a part of its own norm."""
        return {"fp32": (2e-5, 2e-6), "bf16": (0.1, 0.006), "fp16": (0.05, 0.002)}[self.precision]


@dataclass
class Trained:
    """A model with its optimizer, and the weights that it began with."""

    model: nn.Module
    optimizer: Any
    first: dict[str, torch.Tensor]


@dataclass
class IdiomRun:
    """Argument of an idiom: a model, its optimizer, losses; `plain` tells the oracle from ZeroOptimizer."""

    rank: int
    world_size: int
    setting: Setting | None = None  # None: plain torch
    comm: Any = None
    folder: str = ""
    precision: str = "fp32"
    trained: list[Trained] = field(default_factory=list)
    notes: list[tuple[str, Any]] = field(default_factory=list)
    buffers: dict[nn.Module, list[list[torch.Tensor]]] = field(default_factory=dict)  # plain torch: of each rank

    @property
    def plain(self) -> bool:
        return self.setting is None

    @property
    def dist(self) -> Any:
        """torch.distributed for several processes; None for plain torch, which has the whole batch."""
        return None if self.plain else torch.distributed

    def net(self, kind: Callable[[], nn.Module] = Net, seed: int = 5) -> nn.Module:
        with SEEDING:
            torch.manual_seed(seed)
            return kind()

    def optimizer(self, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        """Return the optimizer itself, or ZeroOptimizer in its place."""
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        if self.setting is not None:
            how: dict[str, Any] = {"bucket_mb": 0.0005, "precision": self.precision, **self.setting.zero}
            if self.precision == "fp16":
                how["loss_scale"] = 64.0
            optimizer = zcomm.ZeroOptimizer(
                model, optimizer, comm=self.comm, nvme_path=self.folder, **{**how, **options}
            )
            params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            assert {isinstance(p, ShardedParameter) for p in params} == {self.setting.sharded}
        self.trained.append(Trained(model, optimizer, first))
        return optimizer

    def sgd(self, kind: Callable[[], nn.Module] = Net, lr: float = 0.1, momentum: float = 0.9, **options: Any) -> Any:
        """Return a model and SGD with momentum for it."""
        model = self.net(kind)
        return model, self.optimizer(model, torch.optim.SGD(model.parameters(), lr, momentum, **options))

    def adamw(self, kind: Callable[[], nn.Module] = Net, lr: float = 0.02) -> Any:
        model = self.net(kind)
        return model, self.optimizer(model, torch.optim.AdamW(model.parameters(), lr))

    def average(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], number: int) -> torch.Tensor:
        """`function(x, y)` of this rank's batch; in plain torch the mean over the ranks' batches."""
        if not self.plain:
            return function(*batch_of(self.rank, number))
        each = [function(*batch_of(rank, number)) for rank in range(self.world_size)]
        return torch.stack(each).mean(0)

    def loss(self, model: nn.Module, number: int, of: LossOf = squared_error, scale: float = 1.0) -> torch.Tensor:
        """Return the loss of a batch; this rank's own value becomes a note."""
        if not self.plain:
            loss = of(model, *batch_of(self.rank, number)) * scale
            self.note(f"loss {number}", loss)
            if self.precision == "fp16":  # the optimizer's, which scales
                optimizer = next(t.optimizer for t in self.trained if t.model is model)
                loss.backward = lambda **options: optimizer.backward(loss.view([]), **options)  # type: ignore
            return loss
        now = list(model.buffers())
        every = self.buffers.get(model, [])
        if not every or len(every[0]) != len(now):  # at first, and when the program has added some
            every = self.buffers[model] = [[b.clone() for b in now] for _ in range(self.world_size)]
        each = []
        for rank in [r for r in range(self.world_size) if r != self.rank] + [self.rank]:  # its buffers stay
            for buffer, value in zip(model.buffers(), every[rank], strict=True):
                buffer.data.copy_(value)
            each.append((rank, of(model, *batch_of(rank, number)) * scale))
            every[rank] = [b.clone() for b in model.buffers()]
        losses = [loss for _, loss in sorted(each, key=lambda pair: pair[0])]
        self.notes.append((f"loss {number}", [np.array(loss.item()) for loss in losses]))
        return torch.stack(losses).mean()

    def losses(self, model: nn.Module, steps: int = 3, of: LossOf = squared_error) -> Iterator[torch.Tensor]:
        for number in range(steps):
            yield self.loss(model, number, of)

    def train(
        self,
        model: nn.Module,
        opt: Any,
        steps: int = 3,
        of: LossOf = squared_error,
        before: Callable[[int], object] = lambda step: None,
        after: Callable[[int], object] = lambda step: None,
    ) -> None:
        """Run the usual loop. before: between each backward and its step. after: after each zero_grad."""
        for step, loss in enumerate(self.losses(model, steps, of)):
            loss.backward()
            before(step)
            opt.step()
            opt.zero_grad()
            after(step)

    def note(self, name: str, *values: Any) -> None:
        """Add numbers that the program has seen, also in nested lists and dicts: they must be torch's, too."""
        for value in values:
            self.notes += named_arrays(name, value)

    def finish(self) -> list[dict[str, torch.Tensor]]:
        """Note the loss that each model computes with its weights. Return all weights, then all fp32 masters."""
        for trained in self.trained:
            if trained.model.training:
                trained.model.eval()
            if isinstance(trained.model, Net):
                with torch.no_grad():
                    self.loss(trained.model, 99)
        named = [dict(trained.model.named_parameters()) for trained in self.trained]
        if self.plain:
            return 2 * [{name: p.detach().clone() for name, p in of.items()} for of in named]
        masters = [{name: full_param(p) for name, p in of.items()} for of in named]
        return [trained.optimizer.full_state_dict() for trained in self.trained] + masters

    def close(self) -> None:
        for trained in self.trained:
            if not self.plain:
                trained.optimizer.close()
