"""Learning-rate schedules with the numbers of DeepSpeed 0.19.8, as torch LRSchedulers.

Counting rule: building the schedule sets the first learning rate; each ``step()`` (once per optimizer step) sets the
next. DeepSpeed counts its first ``step()`` as iteration 0, so the first two optimizer steps of a warm-up run at the
minimum. ``last_batch_iteration`` is that count, one less than torch's ``last_epoch``. ``step(n)`` goes to iteration n,
and state_dicts are read in both forms.
Needs only torch. Source: DeepSpeed's documentation of schedulers; Smith (arXiv:1803.09820) for the last two.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

_PLACE = ("last_epoch", "_step_count", "_last_lr")  # in torch's state of a schedule


class _Schedule(LRScheduler):
    """A torch schedule that counts iterations as DeepSpeed does. Subclasses give the rates of ``last_epoch``.

    last_epoch: the iteration to go on after (-1: from the start), DeepSpeed's ``last_batch_iteration``.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int, last_batch_iteration: int | None) -> None:
        if last_batch_iteration is not None:
            if last_epoch != -1:
                raise ValueError(
                    f"last_epoch={last_epoch} and last_batch_iteration={last_batch_iteration} say the same: give one"
                )
            last_epoch = last_batch_iteration
        if last_epoch != -1:  # torch would need an optimizer that a schedule has seen before
            for group in optimizer.param_groups:
                group.setdefault("initial_lr", group["lr"])
        super().__init__(optimizer, last_epoch)

    @property
    def last_batch_iteration(self) -> int:
        """Iteration of the current rates; -1 before the first ``step()``."""
        return self.last_epoch - 1

    @last_batch_iteration.setter
    def last_batch_iteration(self, iteration: int) -> None:
        self.last_epoch = iteration + 1

    def step(self, epoch: int | None = None) -> None:
        """Set the rates of the next iteration, or of iteration ``epoch`` (0: as the first ``step()`` does).

        Raises: ValueError for an ``epoch`` that is not a number of at least -1.
        """
        if epoch is not None:
            self.last_epoch = self._place(epoch)  # super().step() increments it
        super().step()

    def _place(self, iteration: object) -> Any:
        if isinstance(iteration, bool) or not isinstance(iteration, Real) or not float(iteration) >= -1:
            raise ValueError(f"{type(self).__name__}.step({iteration!r}) needs an iteration, a number >= -1")
        return iteration

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state, and DeepSpeed's ``last_batch_iteration``."""
        return {**super().state_dict(), "last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the iteration from a ``state_dict`` of zcomm or DeepSpeed. The next ``step()`` sets the rates.

        They follow this schedule's own arguments, as in DeepSpeed, so a run may continue with a longer schedule.
        Raises: ValueError if the state has no iteration.
        """
        rest = {key: state_dict[key] for key in _PLACE if key in state_dict}
        if "last_batch_iteration" not in state_dict and "last_epoch" not in state_dict:
            raise ValueError(f"{type(self).__name__}: neither last_epoch nor last_batch_iteration in the state")
        super().load_state_dict(rest)
        if "last_epoch" not in rest:
            self.last_batch_iteration = state_dict["last_batch_iteration"]


class WarmupLR(_Schedule):
    """Rise of each group's learning rate from ``warmup_min_lr`` to ``warmup_max_lr``, which it then keeps.

    In iteration i < warmup_num_steps (n, at least 2) lr = min + (max - min) * gamma. There gamma is log(i + 1) / log(n)
    for ``warmup_type`` "log" and i / n for "linear". Later lr = max.
    warmup_min_lr, warmup_max_lr: one number, or one per parameter group. Max None = each group's own lr.
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
        *,
        last_batch_iteration: int | None = None,
    ) -> None:
        _check_type(warmup_type)
        _whole("warmup_num_steps", warmup_num_steps, 0)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        count = len(optimizer.param_groups)
        self.min_lrs = _per_group(warmup_min_lr, count, "warmup_min_lr")
        self.max_lrs = _per_group(warmup_max_lr, count, "warmup_max_lr")
        self.warmup_num_steps = max(2, warmup_num_steps)  # log(1) = 0 cannot divide
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at the current count of steps."""
        gamma = self._gamma(self.last_epoch - 1)
        return [low + (high - low) * gamma for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _gamma(self, iteration: int) -> float:
        if iteration >= self.warmup_num_steps:
            return 1.0
        return _warm_up(iteration, self.warmup_num_steps, self.warmup_type)


class WarmupDecayLR(WarmupLR):
    """WarmupLR, but after the warm-up a line from the maximum down to 0 at iteration ``total_num_steps``.

    warmup_max_lr: DeepSpeed's default is 0.001 here; None = each group's own lr, as in WarmupLR.
    Raises: ValueError as WarmupLR, and for a total_num_steps below 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_lr: float | Sequence[float] = 0.0,
        warmup_max_lr: float | Sequence[float] | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_epoch: int = -1,
        *,
        last_batch_iteration: int | None = None,
    ) -> None:
        self.total_num_steps = _whole("total_num_steps", total_num_steps)
        super().__init__(
            optimizer,
            warmup_min_lr,
            warmup_max_lr,
            warmup_num_steps,
            warmup_type,
            last_epoch,
            last_batch_iteration=last_batch_iteration,
        )

    def _gamma(self, iteration: int) -> float:
        if iteration < self.warmup_num_steps:
            return super()._gamma(iteration)
        return max(0.0, (self.total_num_steps - iteration) / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Each group's own learning rate times a ratio: a warm-up, then half a cosine.

    The ratio rises from ``warmup_min_ratio`` to 1. It then falls to ``cos_min_ratio`` at iteration ``total_num_steps``
    - 1, and remains there.

    Raises: ValueError for another warmup_type, or a count below 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_epoch: int = -1,
        *,
        last_batch_iteration: int | None = None,
    ) -> None:
        _check_type(warmup_type)
        self.total_num_steps = _whole("total_num_steps", total_num_steps)
        self.warmup_num_steps = max(2, _whole("warmup_num_steps", warmup_num_steps, 0))
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.warmup_type = warmup_type
        super().__init__(optimizer, last_epoch, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at the current count of steps."""
        ratio = self.get_lr_ratio()
        return [base * ratio for base in self.base_lrs]

    def get_lr_ratio(self) -> float:
        """Return the ratio to each group's own rate at the current count of steps; 0 before the first ``step()``."""
        return self._ratio(self.last_epoch - 1)

    def _ratio(self, iteration: int) -> float:
        if iteration < 0:
            return 0.0
        if iteration < self.warmup_num_steps:
            warm = _warm_up(iteration, self.warmup_num_steps, self.warmup_type)
            return self.warmup_min_ratio + warm * (1.0 - self.warmup_min_ratio)
        done = min(1.0, (iteration - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        cosine = (1.0 + math.cos(math.pi * done)) / 2.0
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine)


class LRRangeTest(_Schedule):
    """Range test, to find the largest rate that trains.

    After k steps lr = min * (1 + rate * k / size), or with whole stairs of ``size`` steps.
    lr_range_test_min_lr: one number, or one per parameter group. Raises: ValueError for a step_size below 1.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        lr_range_test_min_lr: float | Sequence[float] = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_epoch: int = -1,
        *,
        last_batch_iteration: int | None = None,
    ) -> None:
        self.min_lrs = _per_group(lr_range_test_min_lr, len(optimizer.param_groups), "lr_range_test_min_lr")
        self.step_size = _whole("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate, self.staircase = lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_epoch, last_batch_iteration)

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at the current count of steps."""
        interval = self.last_epoch / self.step_size
        increase = 1.0 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [low * increase for low in self.min_lrs]


class OneCycle(_Schedule):
    """One cycle of the learning rate from ``cycle_min_lr`` up to ``cycle_max_lr`` and back, then a decay.

    There it is the minimum / (1 + rate * d / size), d steps after the cycle. Adam's first beta goes the other way, and
    its second is 0.99.

    cycle_min_lr, cycle_max_lr, cycle_min_mom, cycle_max_mom: one number, or one per parameter group.
    cycle_first_step_size, cycle_second_step_size: steps up and down (second None: as first).
    cycle_first_stair_count, cycle_second_stair_count: climb and descend in so many stairs; 0 = a line (second None: as
    first). decay_step_size: steps of one decay interval; 0 = no decay. cycle_momentum: if False, or if the optimizer
    has no betas, betas are not changed.
    decay_mom_rate: after the cycle the first beta is the maximum * (1 + rate * d / size). The constructor warns if that
    leaves [0, 1) at some step, because optimizers then raise.
    Raises: ValueError for a count below 1 (stairs, steps down and decay: below 0), or a list of the wrong length. Also
    for a momentum outside of [0, 1).
    """

    def __init__(
        self,
        optimizer: Optimizer,
        cycle_min_lr: float | Sequence[float],
        cycle_max_lr: float | Sequence[float],
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: float | Sequence[float] = 0.8,
        cycle_max_mom: float | Sequence[float] = 0.9,
        decay_mom_rate: float = 0.0,
        last_epoch: int = -1,
        *,
        last_batch_iteration: int | None = None,
    ) -> None:
        self.up = _whole("cycle_first_step_size", cycle_first_step_size)
        down = self.up if cycle_second_step_size is None else cycle_second_step_size
        self.down = _whole("cycle_second_step_size", down, 0)
        self.stairs_up = _whole("cycle_first_stair_count", cycle_first_stair_count, 0)
        stairs_down = self.stairs_up if cycle_second_stair_count is None else cycle_second_stair_count
        self.stairs_down = _whole("cycle_second_stair_count", stairs_down, 0)
        self.total_size = self.up + self.down
        self.step_ratio = self.up / self.total_size
        self.decay_step_size = _whole("decay_step_size", decay_step_size, 0)
        self.decay_lr_rate, self.decay_mom_rate = decay_lr_rate, decay_mom_rate
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        count = len(optimizer.param_groups)
        self.min_lrs = _per_group(cycle_min_lr, count, "cycle_min_lr")
        self.max_lrs = _per_group(cycle_max_lr, count, "cycle_max_lr")
        self.min_moms = _per_group(cycle_min_mom, count, "cycle_min_mom")
        self.max_moms = _per_group(cycle_max_mom, count, "cycle_max_mom")
        if self.cycle_momentum:
            self._check_momenta()
        super().__init__(optimizer, last_epoch, last_batch_iteration)

    def _check_momenta(self) -> None:
        for name, momenta in (("cycle_min_mom", self.min_moms), ("cycle_max_mom", self.max_moms)):
            for momentum in momenta:
                if not 0 <= momentum < 1:
                    raise ValueError(f"OneCycle: {name}={momentum}: Adam's first beta must lie in [0, 1)")
        rate, high = self.decay_mom_rate, max(self.max_moms)
        if not (rate and high and self.decay_step_size):
            return
        # 1 + rate * d / size is 1 / high, or less than 0, after so many steps of decay.
        steps = self.decay_step_size * ((1 / high - 1) / rate if rate > 0 else -1 / rate)
        if steps > 2**40:
            return
        last = self.total_size + math.floor(steps)
        while not 0 <= self._decayed(high, last) < 1:  # steps is rounded
            last -= 1
        while 0 <= self._decayed(high, last + 1) < 1:
            last += 1
        warnings.warn(
            f"OneCycle: decay_mom_rate={rate} takes Adam's first beta out of [0, 1) after {last + 1} calls of step(), "
            f"to {self._decayed(high, last + 1):g}, and the optimizer raises then: give a rate closer to 0 if training "
            "goes on so long",
            stacklevel=3,
        )

    def _decayed(self, momentum: float, iteration: int) -> float:
        """Return the momentum that ``momentum`` has become at an iteration after the cycle."""
        return momentum * self._decay(self.decay_mom_rate, iteration)

    def _height(self) -> float:
        """Return the height in the cycle: 0 at its ends, 1 at its top."""
        k = self.last_epoch
        x = 1.0 + k / self.total_size - math.floor(1 + k / self.total_size)
        rising = x <= self.step_ratio
        stairs = self.stairs_up if rising else self.stairs_down
        if not stairs:
            return x / self.step_ratio if rising else (x - 1.0) / (self.step_ratio - 1.0)
        at = k % self.total_size  # stairs from whole numbers: x may fall just short of one
        climbed = at * stairs / self.up if at <= self.up else (self.total_size - at) * stairs / self.down
        return math.floor(climbed) / stairs

    def _decay(self, rate: float, iteration: int) -> float:
        intervals = (iteration - self.total_size) / self.decay_step_size if self.decay_step_size else 0.0
        return 1.0 + rate * intervals

    def get_lr(self) -> list[float | Tensor]:
        """Return the learning rate of each group at the current count of steps."""
        if self.last_epoch > self.total_size:
            return [low / self._decay(self.decay_lr_rate, self.last_epoch) for low in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Return the betas of each group at the current count of steps; None if momentum is not cycled."""
        return [(momentum, 0.99) for momentum in self._momenta()] if self.cycle_momentum else None

    def _momenta(self) -> list[float]:
        if self.last_epoch == 0:
            return self.min_moms
        if self.last_epoch > self.total_size:
            return [self._decayed(high, self.last_epoch) for high in self.max_moms]
        height = self._height()
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def step(self, epoch: int | None = None) -> None:
        """Set learning rates and betas of the next iteration, or of iteration ``epoch``."""
        super().step(epoch)
        if self.cycle_momentum:
            for group, momentum in zip(self.optimizer.param_groups, self._momenta(), strict=True):
                group["betas"] = (momentum, 0.99)


def _warm_up(iteration: int, steps: int, kind: str) -> float:
    """Rise from 0 towards 1 in ``steps`` (at least 2) iterations."""
    if iteration <= 0:
        return 0.0
    if kind == "log":
        return (1.0 / math.log(steps)) * math.log(iteration + 1)
    return iteration / steps


def _check_type(warmup_type: str) -> None:
    if warmup_type not in ("log", "linear"):
        raise ValueError(f'warmup_type must be "log" or "linear", got {warmup_type!r}')


def _whole(name: str, count: int, least: int = 1) -> int:
    if isinstance(count, bool) or not isinstance(count, int) or count < least:
        raise ValueError(f"{name} must be a whole number >= {least}, got {count!r}")
    return count


def _per_group(value: float | Sequence[float], count: int, name: str) -> list[float]:
    if not isinstance(value, Sequence):
        return [float(value)] * count
    if len(value) != count:
        raise ValueError(f"{name} has {len(value)} values for {count} parameter groups")
    return [float(item) for item in value]
