"""Names of a model's tensors in its ``state_dict()``, and how names that another wrapping gave fit them.

Hooks and overrides of state_dict() rename: torch's checkpoint_wrapper removes its own attribute from each name. So a
saved name is the state dict's, found by the identity of the tensor, and a model loads with or without the wrapper.
torch.compile, FSDP and DistributedDataParallel have attributes of their own. ``matched`` ignores these in names that do
not fit as they are, which older checkpoints have, too.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import nn

_WRAPPERS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"}
_OF_ALL = "module."  # DistributedDataParallel's, before each name


def state_tensors(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """List the tensors of ``model.state_dict()``.

    If a hook has replaced a parameter or buffer under its own name, the parameter or buffer itself is listed.
    """
    members = _members(model)
    known = {id(tensor) for tensor in members.values()}
    state = model.state_dict(keep_vars=True)
    found = ((name, value) for name, value in state.items() if isinstance(value, torch.Tensor))
    return [(name, value if id(value) in known else members.get(name, value)) for name, value in found]


def names_by_id(model: nn.Module) -> dict[int, str]:
    """Return by id() the first name of each parameter in the state dict, else its name in named_parameters().

    A state dict that cannot be made here raises when it is saved, which not every program does.
    """
    names: dict[int, str] = {}
    with contextlib.suppress(Exception):
        for name, tensor in state_tensors(model):
            names.setdefault(id(tensor), name)
    return {id(param): names.get(id(param), name) for name, param in model.named_parameters()}


def other_paths(model: nn.Module) -> dict[str, str]:
    """Return by the path of a parameter or buffer its first name in the state dict, if the path is not one there."""
    state = state_tensors(model)
    names = {id(tensor): name for name, tensor in reversed(state)}
    known = {name for name, _ in state}
    return {path: names[id(t)] for path, t in _members(model).items() if path not in known and id(t) in names}


def matched(saved: Collection[str], ours: Collection[str], paths: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return for saved names that are not among ``ours`` the name of ours that they mean, if exactly one fits.

    paths: further names of ours. Two names fit if they differ only by attributes of wrappers.
    """
    left = sorted(set(saved).difference(ours))
    free = set(ours).difference(saved)
    if not left or not free:
        return {}
    fits: dict[str, set[str]] = {}
    of_all = all(name.startswith(_OF_ALL) for name in ours)
    for own in free:
        fits.setdefault(_plain(own, of_all), set()).add(own)
    meant: dict[str, list[str]] = {}
    of_all = all(name.startswith(_OF_ALL) for name in saved)
    for name in left:
        targets = fits.get(_plain(name, of_all)) or {(paths or {}).get(name, name)} & free
        for own in targets if len(targets) == 1 else ():
            meant.setdefault(own, []).append(name)
    return {names[0]: own for own, names in meant.items() if len(names) == 1}


def _plain(name: str, of_all: bool) -> str:
    """Return the name without attributes of wrappers. of_all: also without DistributedDataParallel's."""
    short = name.removeprefix(_OF_ALL) if of_all else name
    return ".".join(part for part in short.split(".") if part not in _WRAPPERS)


def _members(model: nn.Module) -> dict[str, torch.Tensor]:
    every: Iterator[tuple[str, torch.Tensor]] = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return dict(every)
