"""Micro-steps: backward passes and calls of step(). Every ``grad_accum``-th one is an optimizer step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch

from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.remedy import with_remedy
from zcomm.zero.steps.step import NoGradientsError, OptimizerStep


class MicroSteps:
    """The micro-steps of one optimizer. step: run by the last one of an accumulation."""

    def __init__(self, parts: Parts, train: TrainState, step: OptimizerStep) -> None:
        self._parts, self._train, self._step = parts, train, step

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the scaled loss. The caller runs its ``backward()`` once."""
        train, reducer, scale = self._train, self._parts.reducer, self._train.loss_scale
        if train.scaler.scales:
            loss = loss.float() * scale

        def begin(grad: torch.Tensor) -> None:
            train.scaled_passes += 1
            train.pass_scale = scale  # a step changes the scale, but not the kept gradients
            reducer.arm()

        if loss.grad_fn is not None:
            loss.register_hook(begin)
        return loss

    def end(self) -> None:
        """End a micro-step: see ZeroOptimizer.step."""
        train = self._train
        self._check_passes()
        train.micro_step += 1
        train.stepped = train.boundary if train.boundary is not None else train.micro_step >= train.grad_accum
        if not train.stepped:
            train.poison.check("step()")
            self._parts.join()  # before the next pass adds to gradients of replaced parameters
        else:
            train.micro_step = 0
            start = time.perf_counter()
            with torch.no_grad(), contextlib.suppress(NoGradientsError), with_remedy("step()", train):
                self._step.run()
            self._parts.reducer.step_has_used()
            train.step_s += time.perf_counter() - start
        train.tied.stepped()
        if train.stepped:
            train.scaler.check(train.step_count, "none" if train.nonfinite is None else train.nonfinite.parameter)

    def _check_passes(self) -> None:
        """Raise RuntimeError for a program that calls ``step`` once for several micro-steps."""
        train, passes = self._train, self._parts.reducer.backwards
        since, train.backwards = passes - train.backwards, passes
        if since > 1 and train.grad_accum > 1 and train.boundary is None:
            train.backwards -= since  # until zero_grad()
            raise RuntimeError(
                f"step() after {since} backward passes with grad_accum={train.grad_accum}: either call step() and "
                f"zero_grad() after each backward pass (they act on every {_ordinal(train.grad_accum)}), or give "
                f"grad_accum=1, divide the loss by {train.grad_accum} and call them after the last one. (Of several "
                "losses in a micro-step: add them up, or set opt.boundary to whether this call shall update.)"
            )

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the gradients: see ZeroOptimizer.zero_grad."""
        train, reducer = self._train, self._parts.reducer
        self._parts.updates.begin_zero()
        self._parts.store.clear_interrupted()
        train.backwards = reducer.backwards
        if reducer.broken:
            train.micro_step = 0  # its gradients are lost: the accumulation begins again
        if train.stepped or train.micro_step == 0:
            train.scaled_passes = 0
            reducer.zero(set_to_none)
            self._parts.updates.reset()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of backward passes inside on this rank: see ZeroOptimizer.no_sync."""
        reducer = self._parts.reducer
        before, reducer.sync = reducer.sync, False
        try:
            yield
        finally:
            reducer.sync = before

    @contextlib.contextmanager
    def one(self, joins: bool, scaled: bool) -> Iterator[None]:
        """Count the backward passes inside as one micro-step: see ZeroOptimizer.one_micro_step."""
        train, reducer = self._train, self._parts.reducer
        before = reducer.backwards
        if scaled:
            train.pass_scale = train.loss_scale
        try:
            yield
        finally:
            train.scaled_passes = reducer.scaled_passes if scaled else train.scaled_passes
            train.backwards += max(reducer.backwards - before - (not joins), 0)
            if reducer.local:  # the last pass has reached no parameter, or slots round
                reducer.consensus.coalesces = True


def _ordinal(number: int) -> str:
    """Return 2nd for 2, 11th for 11, 21st for 21."""
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
