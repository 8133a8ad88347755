"""Choice of the optimizer: a name, a class or an instance becomes a Rule and the param groups that it updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zcomm.hints import EIGHT_BIT, REFUSED_OPTIMIZERS, did_you_mean
from zcomm.optim import CPUSGD, CPUAdagrad, CPUAdam, CPULion, FusedAdam, Lamb, Muon, OnebitAdam, OnebitLamb, ZeroOneAdam
from zcomm.zero.options import Offload
from zcomm.zero.rules.lamb_rule import ARGUMENTS as LAMB_ARGUMENTS
from zcomm.zero.rules.lamb_rule import LambRule
from zcomm.zero.rules.muon_rule import ARGUMENTS as MUON_ARGUMENTS
from zcomm.zero.rules.muon_rule import MuonRule
from zcomm.zero.rules.onebit_rule import OnebitAdamRule, OnebitLambRule, ZeroOneAdamRule, arguments_of_class
from zcomm.zero.rules.rule import KINDS, SWITCHES, FusedRule, NoRule, Rule, arguments_of
from zcomm.zero.rules.torch_rule import ELEMENTWISE, TorchRule
from zcomm.zero.validate import params_of

Adopting = FusedRule | LambRule | MuonRule | TorchRule
OptimizerLike = str | type[torch.optim.Optimizer] | torch.optim.Optimizer

_TWINS: dict[type, str] = {
    torch.optim.AdamW: "adamw",
    torch.optim.Adam: "adam",
    torch.optim.SGD: "sgd",
    torch.optim.Adagrad: "adagrad",
    CPUAdam: "adamw",
    FusedAdam: "adamw",
    CPULion: "lion",
    CPUSGD: "sgd",
    CPUAdagrad: "adagrad",
    Lamb: "lamb",
    Muon: "muon",
    OnebitAdam: "onebit_adam",
    ZeroOneAdam: "zero_one_adam",
    OnebitLamb: "onebit_lamb",
}
if hasattr(torch.optim, "Muon"):  # of torch 2.9 on
    _TWINS[torch.optim.Muon] = "muon"
_ONE_BIT: dict[str, tuple[type[torch.optim.Optimizer], Callable[[dict[str, Any]], Adopting]]] = {
    "onebit_adam": (OnebitAdam, OnebitAdamRule),
    "zero_one_adam": (ZeroOneAdam, ZeroOneAdamRule),
    "onebit_lamb": (OnebitLamb, OnebitLambRule),
}
_NAMES = (*KINDS, "lamb", "muon", *_ONE_BIT, *ELEMENTWISE)


# Arguments of other libraries, with ZeroOptimizer's names for them.
_ELSEWHERE = {
    "learning_rate": "lr",
    "gradient_accumulation_steps": "grad_accum",
    "accumulate_grad_batches": "grad_accum",
    "accumulation_steps": "grad_accum",
    "max_grad_norm": "clip_norm",
    "max_norm": "clip_norm",
    "gradient_clipping": "clip_norm",
    "gradient_clip_val": "clip_norm",
    "dtype": "precision",
    "mixed_precision": "precision",
    "cpu_offload": "offload",
    "reduce_bucket_size": "bucket_mb",
    "bucket_cap_mb": "bucket_mb",
}


def choose_rule(
    optimizer: OptimizerLike | None, args: dict[str, Any], groups: list[Any], own: Sequence[str] = ()
) -> tuple[Rule, list[dict[str, Any]]]:
    """Return the rule for ``optimizer`` with the caller's ``args``, and ``groups`` (or parameters) as its param groups.

    optimizer: None: nothing is trained.

    own: the arguments of ZeroOptimizer itself, for a hint if an argument is not known.
    Raises: ValueError for an optimizer that is not elementwise or not known, an unknown or impossible argument.
    NotImplementedError for an option that has no kernel (amsgrad).
    """
    if optimizer is None:
        _check_known(args, "none", (), own)
        return NoRule(), groups
    if not isinstance(optimizer, (str, type, torch.optim.Optimizer)):
        raise ValueError(f"optimizer={optimizer!r} must be a name, a class of torch.optim, or an instance of one")
    kind = optimizer if isinstance(optimizer, (type, str)) else type(optimizer)
    given = {} if isinstance(optimizer, (str, type)) else _options_of(optimizer)
    as_groups = groups if groups and isinstance(groups[0], dict) else [{"params": groups}]
    name = kind.lower() if isinstance(kind, str) else _TWINS.get(kind)
    torch_class = ELEMENTWISE.get(name or "") if isinstance(kind, str) else kind
    rule: Adopting
    if isinstance(kind, str) and name not in _NAMES:
        hint = did_you_mean(kind.lower().replace("_", "").removeprefix("fused").removeprefix("cpu"), _NAMES) or ";"
        raise ValueError(f"unknown optimizer {kind!r}{hint} Names: {', '.join(_NAMES)}; or pass a class of torch.optim")
    if name in KINDS:
        _check_known(args, str(name), arguments_of(str(name)), own)
        decoupled = given.pop("decoupled_weight_decay", None)
        if decoupled is not None:
            name = "adamw" if decoupled else "adam"
        rule = FusedRule(str(name), {**given, **args})
    elif name == "lamb":
        _check_known(args, name, LAMB_ARGUMENTS, own)
        rule = LambRule({**given, **args})
    elif name == "muon":
        _check_known(args, name, MUON_ARGUMENTS, own)
        given.pop("use_muon", None)  # each group has its own
        rule = MuonRule({**given, **args})
    elif name in _ONE_BIT:
        own_class, make = _ONE_BIT[str(name)]
        _check_known(args, str(name), arguments_of_class(own_class), own)
        rule = make({**given, **args})
    elif torch_class in ELEMENTWISE.values():
        assert torch_class is not None
        _check_known(args, torch_class.__name__.lower(), list(inspect.signature(torch_class).parameters)[1:], own)
        rule = TorchRule(torch_class, {**given, **args})
    else:
        assert not isinstance(kind, str)
        shown = f"{kind.__module__}.{kind.__qualname__}"
        known = ", ".join(_NAMES)
        raise ValueError(
            f"optimizer={shown!r} is not available: {_why_not(kind)}. Use a name or torch.optim class of {known}"
        )
    return rule, rule.adopt(as_groups)


def check_exchanges(rule: Rule, stage: int, offload: Offload, memory: object) -> None:
    """Raise ValueError for an option that a rule which exchanges moments cannot have: it needs all state on each
    rank, in memory."""
    asked = {"stage": (stage, 0), "offload": (offload, Offload()), "memory": (memory, None)}
    for name, (value, needed) in asked.items() if rule.exchanges else ():
        if value != needed:
            raise ValueError(
                f"{rule.name}: {name}={value!r}: its ranks exchange moments of whole parameters, so each rank keeps "
                "all weights and optimizer state in memory: give stage=0 without offload= and memory=, or use AdamW"
            )


def _why_not(kind: type) -> str:
    """Return why a class of an optimizer cannot run on shards."""
    package, name = kind.__module__.partition(".")[0], kind.__qualname__
    if package == "bitsandbytes":
        return EIGHT_BIT
    for known, why in REFUSED_OPTIMIZERS.items():
        if name.lower() == known.lower():
            return why
    return "it is not known to update each element by itself, so shards cannot be updated apart"


def _check_known(args: Iterable[str], name: str, known: Sequence[str], own: Sequence[str]) -> None:
    """Raise ValueError for an argument that neither ZeroOptimizer nor its rule ``name`` has."""
    for key in args:
        if key not in known:
            hint = did_you_mean(key, (*own, *known), _ELSEWHERE) or ";"
            raise ValueError(f"ZeroOptimizer has no argument {key!r}{hint} Arguments of {name}: {', '.join(known)}")


def _options_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    for state in optimizer.state.values():
        if state and float(state.get("step", 1)) > 0:
            raise ValueError("optimizer: it has taken steps already; pass it before its first step")
    return {key: value for key, value in optimizer.defaults.items() if key not in SWITCHES}


def torch_groups(
    model: nn.Module | Iterable[Any], optimizer: OptimizerLike | None
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return the parameters, or param groups, that the caller gave, without those that need no gradient yet; and these.

    Without an optimizer there is one group, which is empty. Raises: ValueError.
    """
    if optimizer is None:
        if not isinstance(model, nn.Module):
            raise ValueError("optimizer=None needs the model itself, not a list of parameters")
        return [{"params": []}], []
    given: list[Any] = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else params_of(model)
    in_groups = bool(given) and isinstance(given[0], dict)
    listed = [param for group in given for param in group["params"]] if in_groups else given
    frozen = [param for param in listed if not param.requires_grad]
    if len(frozen) == len(listed):
        raise ValueError(f"no parameter{' of the param groups' if in_groups else ''} requires a gradient")
    if in_groups:
        return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in given], frozen
    return [param for param in listed if param.requires_grad], frozen
