"""Learning-rate schedules with DeepSpeed's numbers, as torch LRSchedulers.

Counting rule: building the schedule sets the first learning rate; each ``step()`` (once per optimizer step) sets the
next. DeepSpeed counts its first ``step()`` as iteration 0, so the first two optimizer steps run at the minimum.
Needs torch alone. Source: DeepSpeed's documentation of schedulers (WarmupLR).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler


class WarmupLR(LRScheduler):
    """Raise each group's learning rate from ``warmup_min_lr`` to ``warmup_max_lr``, then hold it.

    In iteration i < warmup_num_steps (n, at least 2) lr = min + (max - min) * gamma, where gamma is
    log(i + 1) / log(n) for ``warmup_type`` "log" and i / n for "linear"; later lr = max.
    warmup_min_lr, warmup_max_lr: one number, or one per parameter group; max None = the first group's lr.
    Raises: ValueError for another warmup_type, a count below 1, or a list of the wrong length.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
    ) -> None:
        if warmup_type not in ("log", "linear"):
            raise ValueError(f'warmup_type must be "log" or "linear", got {warmup_type!r}')
        if isinstance(warmup_num_steps, bool) or not isinstance(warmup_num_steps, int) or warmup_num_steps < 1:
            raise ValueError(f"warmup_num_steps must be a whole number >= 1, got {warmup_num_steps!r}")
        if warmup_max_lr is None:
            warmup_max_lr = float(optimizer.param_groups[0]["lr"])
        count = len(optimizer.param_groups)
        self.min_lrs = _per_group(warmup_min_lr, count, "warmup_min_lr")
        self.max_lrs = _per_group(warmup_max_lr, count, "warmup_max_lr")
        self.warmup_num_steps = max(2, warmup_num_steps)  # log(1) = 0 cannot divide
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each group at the current count of steps."""
        gamma = self._gamma(self.last_epoch - 1)
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self, iteration: int) -> float:
        if iteration >= self.warmup_num_steps:
            return 1.0
        if iteration <= 0:
            return 0.0
        if self.warmup_type == "log":
            return (1.0 / math.log(self.warmup_num_steps)) * math.log(iteration + 1)
        return iteration / self.warmup_num_steps


def _per_group(value: float | Sequence[float], count: int, name: str) -> list[float]:
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} parameter groups")
    return [float(item) for item in value]
