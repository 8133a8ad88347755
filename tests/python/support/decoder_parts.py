"""A small decoder that every form can divide, and the whole one on one rank, with odd sizes.

Layers are a Sequential: words, blocks of attention and of an MLP or experts, and a head. ``divided`` returns this
rank's module for a mesh, and a pipeline if the mesh has stages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import zcomm
from zcomm.parallel import MoE, mean_over_sequence, ulysses
from zcomm.parallel.heads import cut

WORDS, WIDTH, INNER, HEADS, TOKENS, SAMPLES, EXPERTS, MICROBATCHES = 13, 12, 10, 4, 7, 5, 4, 3
PLAN = {"*.q": "colwise", "*.k": "colwise", "*.v": "colwise", "*.o": "rowwise"}
PLAN_MLP = {"*.up": "colwise", "*.down": "rowwise"}
Attend = Callable[..., torch.Tensor]


class Attention(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend, self.norm = attend, nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        heads = (each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        out: torch.Tensor = self.o(self.attend(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + out


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Routed(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.moe = MoE(
            WIDTH, lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH)), EXPERTS, mesh=mesh
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.moe(x)[0]
        return out


def layers(experts: bool, mesh: Any = None, attend: Attend = F.scaled_dot_product_attention) -> nn.Sequential:
    """Return the whole model, or its layers with this rank's experts. The weights are the same on all ranks."""
    torch.manual_seed(5)
    found: list[nn.Module] = [nn.Embedding(WORDS, WIDTH)]
    for _ in range(2):
        found += [Attention(attend), Routed(mesh) if experts else MLP()]
    return nn.Sequential(*found, nn.Linear(WIDTH, WORDS))


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(WORDS, (2, SAMPLES, TOKENS), generator=torch.Generator().manual_seed(number))
    return words[0], words[1]


def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


class Parts(NamedTuple):
    """Part of a model that this rank has. replica: of the ranks that read different samples, of ``replicas``."""

    mesh: zcomm.ProcessMesh
    module: nn.Module
    pipe: Any
    replica: int
    replicas: int

    def part(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens."""
        if "sequence" not in self.mesh.axes:
            return tokens
        own = cut(TOKENS, self.mesh.size("sequence"))[self.mesh.coordinate[self.mesh.axes.index("sequence")]]
        return tokens[:, own].contiguous()

    def passes(self, number: int) -> torch.Tensor:
        """Run forward and backward passes of a batch for each replica; return the mean of their losses."""
        x, y = (self.part(each) for each in batch(number * self.replicas + self.replica))
        if self.pipe is not None:
            found: torch.Tensor = self.pipe.step(x, y)
            return found
        loss = mean(self.mesh, self.module(x), y)
        loss.backward()
        total = loss.detach().clone().reshape(1)
        self.mesh.world.all_reduce(total, op="avg")
        return total


def mean(mesh: zcomm.ProcessMesh, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the tokens of all parts."""
    loss = loss_of(logits, target)
    if "sequence" not in mesh.axes:
        return loss
    return mean_over_sequence(loss * target.numel(), target.numel(), mesh)


def divided(sizes: dict[str, int], experts: bool, dtype: torch.dtype, schedule: str = "1f1b") -> Parts:
    """Divide the model over a mesh of the job. Collective."""
    mesh = zcomm.ProcessMesh(zcomm.init(timeout=60), **sizes)
    attend = F.scaled_dot_product_attention
    if sizes.get("sequence", 1) > 1:
        attend = ulysses(attend, mesh)
    module: nn.Module = layers(experts, mesh if "expert" in sizes else None, attend).to(dtype)
    if sizes.get("tensor", 1) > 1:
        zcomm.parallel.tensor(module, mesh, PLAN if experts else {**PLAN, **PLAN_MLP})
    reading = [axis for axis in mesh.axes if axis in ("data", "replicate", "expert_data", "expert")]
    replica, replicas = mesh.ranks(*reading).index(mesh.world.rank), mesh.size(*reading)
    pipe = None
    if sizes.get("pipe", 1) > 1:
        cuts = {2: [0, 3, 6], 4: [0, 1, 3, 5, 6]}[sizes["pipe"]]
        pipe = zcomm.parallel.pipeline(
            module, mesh, MICROBATCHES + (sizes["pipe"] > 2), schedule, loss=lambda out, y: mean(mesh, out, y), cut=cuts
        )
        module = pipe.module
    return Parts(mesh, module, pipe, replica, replicas)


def whole_tensor(tensor: torch.Tensor) -> torch.Tensor:
    full = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()


def of_rank(named: dict[str, torch.Tensor], parts: Parts) -> dict[str, torch.Tensor]:
    """Return the whole model's tensors by this rank's names of experts."""
    if "expert" not in parts.mesh.axes:
        return named
    local = EXPERTS // parts.mesh.size("expert")
    first = local * parts.mesh.coordinate[parts.mesh.axes.index("expert")]
    found = {}
    for name, value in named.items():
        head, is_expert, tail = name.partition(".experts.")
        number, _, rest = tail.partition(".")
        if not is_expert:
            found[name] = value
        elif first <= int(number) < first + local:
            found[f"{head}{is_expert}{int(number) - first}.{rest}"] = value
    return found
