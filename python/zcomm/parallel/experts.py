"""Experts on several ranks: a layer of experts, Hugging Face's blocks with experts, and the marks of their parameters.

Ranks along the mesh's axis "expert" have different experts, and read different samples. ZeroOptimizer knows the
parameters by their marks: ``allreduce = False`` and ``group_name``, DeepSpeed's. It sums their gradients over the ranks
with the same experts only, and divides by all ranks that read different samples.
[Note: state of experts] ``state_dict()`` has all experts on each rank, as if the model were whole.
``load_state_dict`` takes such a one. Both are collective. With ``keep_vars`` it has this rank's parameters only.
Thread rule: as exchange.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.parallel import gates
from zcomm.parallel.exchange import through_experts
from zcomm.zero.layout.cut import ExpertPart

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.comm.mesh import ProcessMesh

AXIS = "expert"


class ExpertRanks:
    """The ranks with different experts: how many, their communicator, and the experts of this one.

    Copies of a module have the same object. It cannot be pickled: save a state dict.
    """

    def __init__(self, count: int, size: int = 1) -> None:
        """count: experts of all ranks. size: ranks that divide them; more than 1 must ``connect`` before a forward.

        Raises: ValueError.
        """
        if count < 1 or size < 1 or count % size:
            raise ValueError(f"{count} experts do not divide among {size} ranks of the axis 'expert'")
        self.size, self.local, self.rank = size, count // size, 0
        self.mesh: ProcessMesh | None = None
        self._comm: Communicator | None = None

    def connect(self, mesh: ProcessMesh) -> None:
        """Use the ranks along the axis "expert" of ``mesh``. Collective for several. Raises: ValueError."""
        if mesh_size(mesh) != self.size:
            raise ValueError(f"mesh={mesh.describe()}: expected {self.size} ranks along the axis 'expert'")
        self.mesh = mesh
        if self.size > 1:
            self._comm = mesh.comm(AXIS, use="tokens")
            self.rank = self._comm.rank

    @property
    def comm(self) -> Communicator | None:
        """The communicator; None: this rank has all experts. Raises: RuntimeError before ``connect``."""
        if self._comm is None and self.size > 1:
            raise RuntimeError(
                f"these experts are divided among {self.size} ranks, but no mesh is known yet: call initialize() first"
            )
        return self._comm

    @property
    def own(self) -> range:
        """The numbers of this rank's experts."""
        return range(self.rank * self.local, (self.rank + 1) * self.local)

    def __deepcopy__(self, memo: dict[int, Any]) -> ExpertRanks:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model with experts on several ranks cannot be pickled: call model.state_dict() on all ranks, and save "
            "it on one: it has all experts"
        )


def mesh_size(mesh: ProcessMesh | None) -> int:
    """Return the number of ranks along the axis "expert"."""
    return 1 if mesh is None or AXIS not in mesh.axes else mesh.size(AXIS)


def ranks_of(model: nn.Module) -> list[ExpertRanks]:
    """Return the ranks of each layer of experts: of modules with an attribute ``ranks``."""
    found = (vars(module).get("ranks") for module in model.modules())
    return [ranks for ranks in found if isinstance(ranks, ExpertRanks)]


def run_experts(experts: Iterable[nn.Module], rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    """Give each expert its rows, also if there are none. A tuple's first element is the result.

    Shapes: rows [R, D] by expert, with ``counts`` rows each -> [R, width of a result].
    """
    found = [expert(part) for expert, part in zip(experts, rows.split(counts), strict=True)]
    return torch.cat([each[0] if isinstance(each, tuple) else each for each in found])


class DividedState(nn.Module):
    """Base of modules with this rank's experts ([Note: state of experts]). ``part``: of their parameters."""

    ranks: ExpertRanks | None
    group: str | None

    @property
    def part(self) -> ExpertPart:
        return ExpertPart()

    def mark_experts(self) -> None:
        """Mark the parameters for ZeroOptimizer, which calls this, and for DeepSpeed's functions."""
        for param in self.parameters():
            param.allreduce, param.group_name = False, self.group  # type: ignore[attr-defined]
            param.zcomm_part = self.part  # type: ignore[attr-defined]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.mark_experts()  # copies of parameters have no marks

    def state_dict(self, *args: Any, **kinds: Any) -> Any:
        kinds |= dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        found = super().state_dict(**kinds)
        if self.ranks is not None and self.ranks.comm is not None:
            self._join(self.ranks, found, kinds.get("prefix", ""), not kinds.get("keep_vars"))
        return found

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        if self.ranks is not None and self.ranks.comm is not None:
            self._take(self.ranks, state_dict, prefix, others[-1])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _join(self, ranks: ExpertRanks, found: dict[str, Any], prefix: str, whole: bool) -> None:
        """Name own experts in ``found`` as in a layer with all experts, and add the others if ``whole``."""
        raise NotImplementedError

    def _take(self, ranks: ExpertRanks, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
        """Leave own experts in ``state``, which has all, with this module's names."""
        raise NotImplementedError


class Experts(DividedState, nn.ModuleList):
    """The experts of this rank, in order. ``forward(rows, counts)`` gives each expert its rows, or none.

    In a state dict they have their numbers among all experts. group: see ``mark_experts``; None: by ``ranks``.
    """

    def __init__(
        self, experts: Iterable[nn.Module], ranks: ExpertRanks | None = None, group: str | None = None
    ) -> None:
        super().__init__(experts)
        self.ranks, self.group = ranks, f"ep_size_{ranks.size}" if group is None and ranks is not None else group
        self.mark_experts()

    def forward(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """Return the results of ``run_experts``."""
        return run_experts(self, rows, counts)

    def _join(self, ranks: ExpertRanks, found: dict[str, Any], prefix: str, whole: bool) -> None:
        by_rank: list[dict[str, Any]] = [{} for _ in range(ranks.size)]
        for key, (number, rest) in _numbered(found, prefix).items():
            value = found.pop(key)
            if whole and not isinstance(value, torch.Tensor):
                raise NotImplementedError(
                    f"state_dict(): {key} is no tensor: experts on several ranks have tensors only"
                )
            part = ExpertPart(ranks.rank, ranks.size, ranks.comm)
            values = part.joined(value.unsqueeze(0), f"state_dict() {key}").unbind() if whole else {ranks.rank: value}
            for rank in range(ranks.size) if whole else (ranks.rank,):
                by_rank[rank][f"{prefix}{rank * ranks.local + number}{rest}"] = values[rank]
        for names in by_rank:
            found.update(names)

    def _take(self, ranks: ExpertRanks, state: dict[str, Any], prefix: str, errors: list[str]) -> None:
        every = [(number, rest, state.pop(key)) for key, (number, rest) in _numbered(state, prefix).items()]
        for number, rest, value in every:
            if number in ranks.own:
                state[f"{prefix}{number - ranks.own.start}{rest}"] = value
            elif number >= ranks.size * ranks.local:
                errors.append(f"{prefix}{number}{rest}: there are {ranks.size * ranks.local} experts")


def _numbered(state: dict[str, Any], prefix: str) -> dict[str, tuple[int, str]]:
    """Return number and rest of each name of an expert's tensor."""
    found = (re.match(re.escape(prefix) + r"(\d+)(\..*)", key) for key in state)
    return {match[0]: (int(match[1]), match[2]) for match in found if match is not None}


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
        self.ranks = ExpertRanks(n, mesh_size(mesh))
        if mesh is not None:
            self.ranks.connect(mesh)
        self.n, self.k, self.capacity = n, k, capacity
        self.router = router or nn.Linear(dim, n, bias=False)
        own = []
        for number in range(n):
            made = copy.deepcopy(expert) if isinstance(expert, nn.Module) else expert()
            if number in self.ranks.own:
                own.append(made)
        self.experts = Experts(own, self.ranks)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return results and the loss that balances this rank's tokens. Collective.

        Shapes: [..., dim] -> [..., width of a result], scalar. Raises: as ``through_experts``.
        """
        tokens = x.reshape(-1, x.shape[-1])
        routes = gates.top_k(self.router(tokens), self.k, self.capacity)
        out = through_experts(tokens, routes.index, routes.weights, self.ranks.local, self.experts, self.ranks.comm)
        return out.view(*x.shape[:-1], out.shape[-1]), routes.aux
