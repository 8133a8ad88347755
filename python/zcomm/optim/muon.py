"""Muon: momentum that Newton-Schulz iterations make orthogonal, matrix by matrix; AdamW for other parameters.

Momentum and direction are elementwise, the orthogonalization needs the whole direction, and the change of the weights
is elementwise again. So ZeroOptimizer calls these parts separately (zero/rules/muon_rule.py). The elementwise parts are
single operations of torch, so their bits do not depend on a shard's bounds. They are torch.optim.Muon's, in its order
and precision, because small singular values of a direction amplify roundings.
Source: K. Jordan, Muon (2024). Method "gram" iterates on the Gram matrix (T. Dao, 2026), in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from zcomm.optim.options import evaluated, given

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
RATES = (None, "original", "match_rms_adamw")
METHODS = ("standard", "gram")
_RESTART = 2  # iterations on a Gram matrix before it is recomputed, so that fewer roundings add up


@dataclass(frozen=True)
class MuonNumbers:
    """Numbers of one group in one step. rate: the rule for a matrix's rate, of RATES."""

    lr: float
    decay: float
    momentum: float
    nesterov: bool
    coefficients: tuple[float, float, float]
    eps: float
    steps: int
    rate: str | None
    method: str


def numbers_of(group: dict[str, Any]) -> MuonNumbers:
    """Return the numbers of a group's options."""
    first, second, third = map(float, group["ns_coefficients"])
    return MuonNumbers(
        float(group["lr"]),
        float(group["weight_decay"]),
        float(group["momentum"]),
        bool(group["nesterov"]),
        (first, second, third),
        float(group["eps"]),
        int(group["ns_steps"]),
        group["adjust_lr_fn"],
        group["ns_method"],
    )


def move_momentum(momentum: torch.Tensor, grad: torch.Tensor, numbers: MuonNumbers) -> None:
    """Update the momentum with a gradient, in place."""
    momentum.lerp_(grad, 1 - numbers.momentum)


def direction(momentum: torch.Tensor, grad: torch.Tensor, numbers: MuonNumbers) -> torch.Tensor:
    """Return the direction after ``move_momentum``, in the dtype that ``orthogonal`` takes."""
    found = grad.lerp(momentum, numbers.momentum) if numbers.nesterov else momentum
    return found.to(dtype_of(numbers))


def dtype_of(numbers: MuonNumbers) -> torch.dtype:
    """Return the dtype of directions and orthogonal matrices."""
    return torch.bfloat16 if numbers.method == "standard" else torch.float32


def orthogonal(matrix: torch.Tensor, numbers: MuonNumbers) -> torch.Tensor:
    """Return approximately the nearest orthogonal matrix, in the shape and dtype of ``matrix``."""
    tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if tall else matrix
    wide = wide.div(wide.norm().clamp(min=numbers.eps))
    if numbers.method == "gram" and wide.size(0) < wide.size(1):
        wide = _iterate_gram(wide, numbers)
    else:
        wide = _iterate(wide, numbers)
    return wide.T if tall else wide


def matrix_nbytes(shape: torch.Size, numbers: MuonNumbers) -> tuple[int, int]:
    """Return the bytes of a direction, and the peak of the temporaries of ``orthogonal``."""
    whole, gram = shape.numel(), min(shape) ** 2
    # The scaled matrix, one before and one after an iteration, and matrices of the Gram matrix's size.
    beside = 3 * whole + (2 if numbers.method == "standard" else 5) * gram
    return whole * dtype_of(numbers).itemsize, beside * dtype_of(numbers).itemsize


def _iterate(wide: torch.Tensor, numbers: MuonNumbers) -> torch.Tensor:
    a, b, c = numbers.coefficients
    for _ in range(numbers.steps):
        gram = wide @ wide.T
        factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        wide = torch.addmm(wide, factor, wide, beta=a)
    return wide


def _iterate_gram(wide: torch.Tensor, numbers: MuonNumbers) -> torch.Tensor:
    """Iterate on the small Gram matrix: the factors of all iterations commute, and multiply the matrix once."""
    a, b, c = numbers.coefficients
    for count in (min(_RESTART, numbers.steps), numbers.steps - _RESTART):
        gram, product = wide @ wide.T, None
        for number in range(count):
            factor = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            factor.diagonal().add_(a)
            product = factor if product is None else factor @ product
            if number + 1 < count:
                gram = factor @ gram @ factor
        if product is not None:
            wide = product @ wide
    return wide


def rate_of(shape: torch.Size, numbers: MuonNumbers) -> float:
    """Return the learning rate of a matrix's orthogonal update."""
    rows, columns = shape
    if numbers.rate == "match_rms_adamw":
        return numbers.lr * (0.2 * math.sqrt(max(rows, columns)))
    return numbers.lr * math.sqrt(max(1, rows / columns))


def change_weight(weight: torch.Tensor, update: torch.Tensor, rate: float, numbers: MuonNumbers) -> None:
    """Decay a weight and subtract an orthogonal update at ``rate``, in place, element by element."""
    weight.mul_(1 - numbers.lr * numbers.decay)
    weight.add_(update, alpha=-rate)


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError naming an option out of its range."""
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not 0 <= float(group[name]) < math.inf:
            raise ValueError(f"{name}={group[name]} must be a number of at least 0")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients={group['ns_coefficients']} must be three numbers")
    steps = group["ns_steps"]
    if int(steps) != steps or not 0 <= steps < 100:
        raise ValueError(f"ns_steps={steps} must be a whole number from 0 to 99")
    for name, known in (("adjust_lr_fn", RATES), ("ns_method", METHODS)):
        if group[name] not in known:
            raise ValueError(f"{name}={group[name]!r} must be one of {', '.join(map(repr, known))}")


def is_muon(group: dict[str, Any]) -> bool:
    """Return whether Muon updates a group. Raises: ValueError for a ``use_muon`` that is not a bool."""
    value = group.get("use_muon", True)
    if not isinstance(value, bool):
        raise ValueError(f"use_muon={value!r} must be True (Muon) or False (AdamW)")
    return value


def check_matrix(where: str, shape: torch.Size) -> None:
    """Raise ValueError for a parameter of a Muon group that is not a matrix."""
    if len(shape) != 2:
        raise ValueError(
            f"{where} of shape {tuple(shape)}: Muon updates only matrices, of 2 dimensions; put it into a param "
            'group with "use_muon": False, which AdamW updates'
        )


def _adamw() -> torch.optim.AdamW:
    return torch.optim.AdamW([torch.zeros(1)])


class Muon(torch.optim.Optimizer):
    """Muon for matrices; AdamW for the param groups with ``"use_muon": False``.

    params: fp32 or fp64 parameters (or groups), on any device. For other dtypes pass it to a ZeroOptimizer.
    lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as torch.optim.Muon's, with its
    numbers. ns_method: "standard", torch's iterations in bf16; "gram": on the Gram matrix, in fp32.
    A group of AdamW uses this ``lr`` unless it has its own. Its ``betas``, ``eps`` and ``weight_decay`` default to
    torch.optim.AdamW's.
    State per parameter: ``momentum_buffer``; of AdamW ``step``, ``exp_avg``, ``exp_avg_sq``.

    Raises: ValueError naming a hyperparameter out of range, or a parameter of another shape. NotImplementedError for a
    sparse gradient.
    """

    def __init__(
        self,
        params: Iterable[torch.Tensor] | Iterable[dict[str, Any]],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        ns_method: str = "standard",
    ) -> None:
        defaults = {**given(locals()), "use_muon": True}
        check_group(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's. Raises: ValueError; the optimizer is then as before."""
        muon = is_muon(param_group)
        given = param_group["params"]
        params = [given] if isinstance(given, torch.Tensor) else list(given)
        if muon:
            check_group({**self.defaults, **param_group})
            for number, param in enumerate(params):
                check_matrix(f"parameter {number} of group {len(self.param_groups)}", param.shape)
        else:
            param_group = {**_adamw().defaults, "lr": self.defaults["lr"], **param_group}
        super().add_param_group({**param_group, "params": params})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the parameters. closure: re-evaluates the model and returns the loss, as in torch."""
        loss = evaluated(closure)
        for group in self.param_groups:
            if not is_muon(group):
                adamw = _adamw()
                adamw.param_groups, adamw.state = [{**adamw.defaults, **group}], self.state
                adamw.step()
                continue
            check_group(group)
            for param in group["params"]:
                if param.grad is not None:
                    self._step_param(param, numbers_of(group))
        return loss

    def _step_param(self, param: torch.Tensor, numbers: MuonNumbers) -> None:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if param.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"Muon: a parameter is {param.dtype}; give Muon to a ZeroOptimizer, which has its master")
        if grad.is_sparse:
            raise NotImplementedError("Muon: a gradient is sparse; use dense ones")
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        move_momentum(state["momentum_buffer"], grad, numbers)
        update = orthogonal(direction(state["momentum_buffer"], grad, numbers), numbers)
        change_weight(param, update, rate_of(param.shape, numbers), numbers)
