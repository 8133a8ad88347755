"""ParamGroups: the param groups of a ZeroOptimizer, shared with the torch optimizer that was given to it.

[Note: one list] The program continues to use its optimizer: schedules write rates into its groups, the program sets
options in them. So both optimizers have the same list of the same dicts, and a value set on either counts in the next
step. State, gradients and the step itself are ZeroOptimizer's: the given optimizer's own calls for them raise, because
they would do nothing, or save nothing, silently.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from zcomm.zero.rules.counters import reset_counters
from zcomm.zero.rules.rule import SWITCHES, Rule

_INSTEAD = {
    "step": "call step() of the ZeroOptimizer (zcomm.initialize() returns it), or the engine's",
    "state_dict": "call state_dict() of the ZeroOptimizer, or save a checkpoint with save() or save_checkpoint()",
    "load_state_dict": "call load_state_dict() of the ZeroOptimizer",
    "add_param_group": "give all groups to the optimizer before the ZeroOptimizer is made",
}

_HOOKS = [
    f"_optimizer_{call}_{when}_hooks" for call in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
]


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """Return a group without its parameters and torch's switches."""
    return {key: value for key, value in group.items() if key != "params" and key not in SWITCHES}


class ParamGroups:
    """The param groups of ``owner``.

    given: the torch optimizer with its options; None: there is none. Thread rule: as ZeroOptimizer.
    """

    def __init__(self, owner: torch.optim.Optimizer, given: torch.optim.Optimizer | None) -> None:
        self._given = given
        self._sharded: Any = owner.state
        self._watched = [] if given is None else [given]  # by schedules, for their order of steps
        self._before: list[list[torch.Tensor]] = []  # of the given optimizer, frozen parameters included
        self._state: Any = None  # of the given optimizer
        self._calls: dict[str, Any] = {}  # of its own that are set on the instance: schedules watch step()
        if given is not None:
            self._share(owner, given)
        self._made = [options_of(group) for group in owner.param_groups]  # the options at construction
        self._ids = [list(map(id, group["params"])) for group in owner.param_groups]  # the store keeps the parameters

    def _share(self, owner: torch.optim.Optimizer, given: torch.optim.Optimizer) -> None:
        """See [Note: one list]."""
        for ours, theirs in zip(owner.param_groups, given.param_groups, strict=True):
            self._before.append(theirs["params"])
            theirs.update(ours)
        owner.param_groups = given.param_groups
        for hooks in _HOOKS:
            setattr(owner, hooks, getattr(given, hooks))
        self._state, given.state = given.state, owner.state
        alive = weakref.ref(owner)  # the given optimizer keeps no memory of shards
        self._calls = {call: vars(given)[call] for call in (*_INSTEAD, "zero_grad") if call in vars(given)}
        for call in _INSTEAD:
            setattr(given, call, _refusal(given, call))
        vars(given)["zero_grad"] = lambda set_to_none=True: _zero_grad(alive, set_to_none)

    def check(self, groups: list[dict[str, Any]], rule: Rule) -> None:
        """Check the groups before anything is updated.

        Raises: RuntimeError if the list, a group's parameters or their number have changed; ValueError or
        NotImplementedError for an option that a step does not support.
        """
        given = self._given
        if given is not None and given.param_groups is not groups:
            raise RuntimeError(
                f"step(): the list param_groups of this ZeroOptimizer or of the {type(given).__name__} that was given "
                "to it was replaced, so they no longer share their options: change the groups' values in place"
            )
        if given is not None and given.state is not self._sharded:
            raise RuntimeError(
                f"step(): state of the {type(given).__name__} that was given to this ZeroOptimizer was replaced, which "
                "changes nothing: the arrays are sharded; use load_state_dict() of the ZeroOptimizer"
            )
        if len(groups) != len(self._ids):
            raise RuntimeError(f"step(): there were {len(self._ids)} param groups, now {len(groups)}: {_ADDED}")
        for number, (group, ids) in enumerate(zip(groups, self._ids, strict=True)):
            now = group["params"]
            if list(map(id, now)) != ids:
                raise RuntimeError(
                    f"step(): param group {number} has {len(now)} parameters, and not the {len(ids)} that it had at "
                    f"construction: {_ADDED}"
                )
            rule.check_fixed(self._made[number], group)
            rule.check_now(group)

    def tie(self, ours: list[dict[str, Any]], other: Any) -> bool:
        """Return True if ``other``, a schedule's optimizer, has these groups, so that its rates count. It is the given
        one, or another one that was made of the same dicts (as Accelerate does for offload)."""
        if other is not self._given:
            groups = getattr(other, "param_groups", [])
            if len(groups) != len(ours) or any(map(operator.is_not, groups, ours)):
                return False
            self._watched.append(other)
        return True

    def stepped(self) -> None:
        """Mark the given optimizer as stepped: torch's schedules warn if it has taken no step before them."""
        for optimizer in self._watched:
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def end(self) -> None:
        """Turn the given optimizer into an ordinary one again, which has taken no step."""
        if self._given is None:
            return
        for call in (*_INSTEAD, "zero_grad"):
            vars(self._given).pop(call, None)
        vars(self._given).update(self._calls)
        self._given.state = self._state
        for group, params in zip(self._given.param_groups, self._before, strict=False):
            group["params"] = params
            reset_counters(group)
        self._given, self._sharded = None, None
        self._watched.clear()


_ADDED = "every parameter has its place in the shards; close() this ZeroOptimizer and make another one"


def _refusal(given: torch.optim.Optimizer, call: str) -> Callable[..., Any]:
    name = f"{type(given).__name__}.{call}()"

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"{name}: this optimizer was given to a ZeroOptimizer, which has its state and gradients: {_INSTEAD[call]}"
        )

    refuse._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # torch's schedules leave it as it is
    return refuse


def _zero_grad(alive: weakref.ref[torch.optim.Optimizer], set_to_none: bool) -> None:
    owner = alive()
    if owner is not None:  # None: it was closed, which restored the optimizer's own
        owner.zero_grad(set_to_none)
