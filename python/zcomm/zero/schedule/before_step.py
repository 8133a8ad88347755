"""BeforeStep: updates that precede ``step()``: a backward pass uses its gradients up, and ``step()`` ends that.

[Note: updates before the step] Such an update needs the options of its step. They are noted before the first update,
and ``step()`` raises if they have changed. From the first launch to the end of ``step()`` (``pending``) weights and
state are of two steps. Then another pass, p.grad, state, and all looks at weights raise. Gradients are gone until
``zero_grad()``. An error of an update is kept until ``step()`` raises it. An error in the pass poisons, unless a
transaction can undo the pass (``take_back``).
Thread rule: as UpdateHooks.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zcomm.zero.param_groups import options_of
from zcomm.zero.parts import TrainState
from zcomm.zero.rules.counters import COUNTERS
from zcomm.zero.schedule.facts import Facts
from zcomm.zero.schedule.legality import name_in
from zcomm.zero.schedule.scheduler import UpdateScheduler

Options = list[dict[str, Any]]  # of param groups

GONE = "backward has used the gradients up; call zero_grad(), and run backward again"
_REMEDY = "call step() first, or give Offload(update='forward')"
_INSTEAD = "give update='forward', which allows it"


class BeforeStep(UpdateScheduler):
    """Updates of backward passes. gone: why there are no gradients; "": there may be some."""

    gone = ""

    def __init__(self, train: TrainState) -> None:
        super().__init__(train)
        self.pending = False  # a bucket was launched, and no step() has ended that
        self._ends = False  # step() ends it now
        self._error: BaseException | None = None  # of an update
        self._facts: Facts | None = None
        self._used: Options = []  # options of the updates
        self._factor = 1.0

    # --- refusals ---------------------------------------------------------------------------------------------

    def _check_begin(self) -> None:
        """Raise RuntimeError for a pass that comes between another one and its ``step()`` or ``zero_grad()``."""
        self.check("backward()")
        self._check_left("backward()")

    def _check_left(self, what: str) -> None:
        """Raise RuntimeError for the named call, if gradients are gone."""
        if self.gone:
            raise RuntimeError(f"{what}: {self.gone}")

    def _refuse(self, why: str = "") -> None:
        """Raise RuntimeError for a pass that cannot update: for ``why``, or an obstacle of the program."""
        why = self._refusal() or why or self.reducer.grads.refusal()
        if self.reducer.local:
            why = why or "gradients of no_sync() wait"
        if why:
            raise self._illegal(why)

    def _refusal(self) -> str:
        """Name an option that prevents updates in backward now, or return ""."""
        return self.train.needs_all_gradients or _thawed(self.parts.model, self.train.frozen)

    def _illegal(self, why: str, also: str = "") -> RuntimeError:
        return RuntimeError(f"Offload(update='backward'): {why}: {also}{_INSTEAD}")

    def _fail(self, why: str) -> RuntimeError:
        """Poison: something comes too late. Returns: its error."""
        error = self._illegal(why)
        self.poison.error = self.poison.error or error
        return error

    def _note_options(self) -> None:
        """Note the options of the updates that follow."""
        self._used, self._factor = _options_now(self.train.param_groups), self.train.gradient_factor

    def _is_as_used(self) -> bool:
        now = _options_now(self.train.param_groups)
        return _are_equal(self._used, now) and self._factor == self.train.gradient_factor

    def _check_unchanged(self) -> None:
        """Raise RuntimeError, which poisons, for gradients or options that have changed after the updates."""
        if self.reducer.local or any(self.reducer.grads.held()):
            raise self._fail("p.grad was dropped or assigned after backward, which had updated the weights")
        if self._refusal() or not self._is_as_used():
            raise self._fail("options were changed after backward, which had updated the weights")

    # --- calls between backward and step() ----------------------------------------------------------------------

    def take_back(self, what: str, complete: bool = False) -> bool:
        """Undo the updates of a pass that ended with an error, if that is possible; return True then.

        complete: also undo a pass without an error. Local: ``step()`` finds ranks that do otherwise.
        """
        return False

    def check(self, what: str) -> None:
        if self.pending and not self._ends and not self.take_back(what):
            self.break_off()
            self.poison.check(what)
            raise RuntimeError(f"{what}: backward has updated the weights already: {_REMEDY}")

    def break_off(self) -> None:
        if self.pending and self.poison.error is None and (self.reducer.broken or self._error is not None):
            self.poison.error = self._error or RuntimeError("an error in backward, which updates the weights,")
            self.poison.unreported = not self.reducer.broken  # otherwise the other ranks are inside the pass

    def before_sums(self) -> None:
        self.check("p.grad")
        self._check_left("p.grad")
        super().before_sums()

    def begin_zero(self) -> None:
        self.take_back("zero_grad()", complete=True)
        self.check("zero_grad()")

    def end_updates(self) -> None:
        if self.poison.error is not None:
            self._forget_pass()
        super().end_updates()

    def forget(self) -> None:
        super().forget()
        self._forget_pass()

    def _forget_pass(self) -> None:
        """Forget a failed pass: all weights and state are to be loaded."""
        raise NotImplementedError

    def end(self) -> bool:
        if self.pending and not self.take_back("close()", True):
            logging.getLogger("zcomm").warning("close(): backward has updated weights, and no step() has ended that")
            return False
        return super().end()


def _thawed(model: nn.Module, frozen: Sequence[torch.Tensor]) -> str:
    """Name a parameter that was frozen at construction, and may get a gradient now; return "" if there is none."""
    found = next((param for param in frozen if param.requires_grad), None)
    return "" if found is None else f"parameter {name_in(model, found)}, which was frozen, requires a gradient now"


def _options_now(groups: Sequence[dict[str, Any]]) -> Options:
    """Return a copy of the options of param groups, without counters."""
    return [
        {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in options_of(group).items()
            if key not in COUNTERS
        }
        for group in groups
    ]


def _are_equal(before: Options, now: Options) -> bool:
    """Return True if two results of ``_options_now`` have the same values."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        return bool(a == b)

    return len(before) == len(now) and all(
        a.keys() == b.keys() and all(same(a[key], b[key]) for key in a) for a, b in zip(before, now, strict=True)
    )
