"""Experts on several ranks: a layer of experts, Hugging Face's blocks with experts, and the marks of their parameters.

Ranks along the mesh's axis "expert" have different experts, and read different samples. ZeroOptimizer knows the
parameters by their marks: ``allreduce = False`` and ``group_name``, DeepSpeed's. It sums their gradients over the ranks
with the same experts only, and divides by all ranks that read different samples.
Thread rule: as exchange.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.parallel import gates
from zcomm.parallel.exchange import through_experts

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.comm.mesh import ProcessMesh

AXIS = "expert"


class ExpertRanks:
    """The ranks with different experts: their communicator, and the experts of this one.

    Copies of a module have the same object. It cannot be pickled: save a state dict.
    """

    def __init__(self, count: int, comm: Communicator | None = None) -> None:
        """count: experts of all ranks. comm: None: this rank has all. Raises: ValueError."""
        self.comm = comm
        self.size, self.rank = (1, 0) if comm is None else (comm.world_size, comm.rank)
        if count < 1 or count % self.size:
            raise ValueError(f"{count} experts do not divide among {self.size} ranks of the axis 'expert'")
        self.local = count // self.size

    @classmethod
    def of(cls, count: int, mesh: ProcessMesh | None) -> ExpertRanks:
        """Return the ranks along ``mesh``'s axis "expert". Collective when the first of a mesh is made."""
        if mesh is None or AXIS not in mesh.axes or mesh.size(AXIS) == 1:
            return cls(count)
        if count < 1 or count % mesh.size(AXIS):
            raise ValueError(f"{count} experts do not divide among {mesh.size(AXIS)} ranks of the axis 'expert'")
        return cls(count, mesh.comm(AXIS, use="tokens"))

    @property
    def own(self) -> range:
        """The numbers of this rank's experts."""
        return range(self.rank * self.local, (self.rank + 1) * self.local)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertRanks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError("a model with experts on several ranks cannot be pickled: save model.state_dict() on each rank")


def mark_experts(params: Iterable[torch.Tensor], size: int) -> None:
    """Mark parameters as those of experts that ``size`` ranks divide, for ZeroOptimizer and DeepSpeed's functions."""
    for param in params:
        param.allreduce = False  # type: ignore[attr-defined]
        param.group_name = f"ep_size_{size}"  # type: ignore[attr-defined]


class Experts(nn.Module):
    """The experts of this rank, in order. ``forward(rows, counts)`` gives each expert its rows, or none."""

    def __init__(self, experts: Iterable[nn.Module], size: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        mark_experts(self.parameters(), size)

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Shapes: rows [R, D] by expert, with ``counts`` rows each -> [R, width of a result]."""
        found = [expert(part) for expert, part in zip(self.experts, rows.split(counts), strict=True)]
        return torch.cat([each[0] if isinstance(each, tuple) else each for each in found])


class MoE(nn.Module):
    """A layer of ``n`` experts, which ranks along the mesh's axis "expert" divide.

    dim: width of a token. expert: a function that makes one expert, or a module that is copied. A function is called n
    times on each rank, so that equal seeds give the experts of one rank. k: experts of a token; weights are its
    probabilities, divided by their sum. capacity: rows of an expert as a multiple of an even share of this rank's
    routes; later ones are dropped. None: all are kept. router: None: a linear layer without bias.
    Construction is collective. Raises: ValueError.
    """

    def __init__(
        self,
        dim: int,
        expert: Callable[[], nn.Module] | nn.Module,
        n: int,
        *,
        mesh: ProcessMesh | None = None,
        k: int = 2,
        capacity: float | None = None,
        router: nn.Module | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= k <= n:
            raise ValueError(f"k={k}: expected 1 to {n}, the number of experts")
        if capacity is not None and not capacity > 0:
            raise ValueError(f"capacity={capacity!r}: expected a multiple of an even share, above 0, or None")
        self.ranks = ExpertRanks.of(n, mesh)
        self.n, self.k, self.capacity = n, k, capacity
        self.router = router or nn.Linear(dim, n, bias=False)
        own = []
        for number in range(n):
            made = copy.deepcopy(expert) if isinstance(expert, nn.Module) else expert()
            if number in self.ranks.own:
                own.append(made)
        self.experts = Experts(own, self.ranks.size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return results and the loss that balances this rank's tokens. Collective.

        Shapes: [..., dim] -> [..., width of a result], scalar. Raises: as ``through_experts``.
        """
        tokens = x.reshape(-1, x.shape[-1])
        routes = gates.top_k(self.router(tokens), self.k, self.capacity)
        out = through_experts(tokens, routes.index, routes.weights, self.ranks.local, self.experts, self.ranks.comm)
        return out.view(*x.shape[:-1], out.shape[-1]), routes.aux
