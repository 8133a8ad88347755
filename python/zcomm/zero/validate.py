"""Checks of the arguments of ZeroOptimizer, before anything is built: an error names the fault and the remedy."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from zcomm.comm.communicator import Communicator

_unsaved_logged = False


def check_numbers(clip_norm: Any, grad_accum: Any, bucket_mb: Any, prefetch: Any) -> None:
    """Raise ValueError for a number that is out of range."""
    if clip_norm is not None and not (_is_number(clip_norm) and clip_norm > 0):
        raise ValueError(f"clip_norm={clip_norm!r} must be a number more than 0 (None: no clipping)")
    check_accumulation(grad_accum)
    if not _is_number(bucket_mb) or not 0 < bucket_mb < math.inf:
        raise ValueError(f"bucket_mb={bucket_mb!r} must be a number more than 0 MiB")
    if not _is_whole(prefetch) or prefetch < 0:
        raise ValueError(f"prefetch={prefetch!r} must be a whole number, at least 0: units gathered ahead")


def check_accumulation(grad_accum: Any) -> None:
    """Raise ValueError unless ``grad_accum`` is a whole number of at least 1."""
    if not _is_whole(grad_accum) or grad_accum < 1:
        raise ValueError(f"grad_accum={grad_accum!r} must be a whole number, at least 1: micro-steps per step")


def check_kinds(comm: Any, overlap: Any, share_parameters: Any, hpz: Any, across: Any, nvme_path: Any) -> None:
    """Raise ValueError for an argument of another type, or another word."""
    if across not in ("step", "micro"):
        raise ValueError(f"across={across!r} must be 'step' or 'micro': the micro-steps that send sums across groups")
    for name, value in (("overlap", overlap), ("share_parameters", share_parameters), ("hpz", hpz)):
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")
    if comm is not None and not isinstance(comm, Communicator):
        raise ValueError(f"comm={comm!r} must be a zcomm Communicator (None: that of zcomm.init())")
    if comm is not None and comm.is_closed:
        raise ValueError(f"comm= is closed ({comm.describe()}): give an open one (None: that of zcomm.init())")
    if nvme_path is None or isinstance(nvme_path, (str, os.PathLike)):
        return
    paths = list(nvme_path) if isinstance(nvme_path, Sequence) else []
    if not paths or not all(isinstance(path, (str, os.PathLike)) for path in paths):
        raise ValueError(f"nvme_path={nvme_path!r} must be a directory, or a list of directories, one on each drive")


def params_of(model: Any) -> list[Any]:
    """Return the parameters, or param groups with lists of them, that the caller gave. Raises: ValueError."""
    if isinstance(model, nn.Module):
        return list(model.parameters())
    if isinstance(model, (str, bytes, torch.Tensor)) or not isinstance(model, Iterable):
        shown = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ValueError(f"model is {shown}; give a module, its parameters, or param groups")
    given = list(model)
    groups = [each for each in given if isinstance(each, dict)]
    if groups and len(groups) < len(given):
        raise ValueError("model holds both param groups and parameters; give one or the other")
    if not groups:
        _check_tensors(given, "model")
        _check_once([given], lambda group: "")
        return given
    for number, group in enumerate(groups):
        if "params" not in group:
            raise ValueError(f'param group {number} has no "params"; it has {", ".join(map(str, group)) or "nothing"}')
    lists = [_listed(group["params"], f"param group {number}") for number, group in enumerate(groups)]
    _check_once(lists, lambda group: f" of group {group}")
    return [{**group, "params": params} for group, params in zip(groups, lists, strict=True)]


def check_free(groups: Iterable[dict[str, Any]], owned_elsewhere: set[int]) -> None:
    """Raise ValueError if an open optimizer has one of the parameters: two would take each other's gradients.

    owned_elsewhere: by id(), the parameters of optimizers that are open.
    """
    for number, group in enumerate(groups):
        if any(id(param) in owned_elsewhere for param in group["params"]):
            raise ValueError(f"parameters of group {number} are another open ZeroOptimizer's: close() that first")


def check_max_norm(model: nn.Module, world_size: int) -> None:
    """Raise ValueError for an embedding that would rescale the rows of each rank's own batch."""
    for name, module in model.named_modules() if world_size > 1 else ():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(
                f"{name or type(module).__name__} has max_norm={module.max_norm}, which rescales the rows of a rank's "
                f"own batch in forward, so the weights of {world_size} ranks would differ: leave max_norm out, and "
                f"rescale all rows after step(): with torch.no_grad(): e.weight.copy_(torch.renorm(e.weight, "
                f"{module.norm_type:g}, 0, {module.max_norm}))"
            )


def log_widened(named: Iterable[tuple[str, torch.Tensor]], dtype: torch.dtype, rank: int) -> None:
    """Log a warning on rank 0 if weights of 16 bits are about to become fp32, which the default precision does."""
    narrow = [(name, param.dtype) for name, param in named if param.dtype in (torch.bfloat16, torch.float16)]
    if narrow and dtype == torch.float32 and rank == 0:
        name, kind = narrow[0]
        logging.getLogger("zcomm").warning(
            "%d weights of %s (%s) become float32, twice as large, and want float32 inputs: precision=%r keeps them",
            len(narrow),
            str(kind).removeprefix("torch."),
            f"{name}, ..." if len(narrow) > 1 else name,
            "bf16" if kind == torch.bfloat16 else "fp16",
        )


def log_unsaved(waiting: int, micro_step: int, grad_accum: int) -> None:
    """Log a warning, once in a process, if a save does not hold gradients that no step has used yet.

    waiting: backward passes that no step has used.
    """
    global _unsaved_logged
    if _unsaved_logged or not (micro_step or waiting):
        return
    _unsaved_logged = True
    when = f"micro-step {micro_step} of {grad_accum}" if micro_step else "a backward pass that no step() has used"
    logging.getLogger("zcomm").warning(
        "save() after %s: gradients are not saved; a run that loads the checkpoint begins its accumulation again", when
    )


def _listed(params: Any, where: str) -> list[torch.Tensor]:
    if isinstance(params, torch.Tensor):
        return [params]
    if isinstance(params, (str, bytes, set)) or not isinstance(params, Iterable):
        raise ValueError(f'{where}: "params" is a {type(params).__name__}; give a list of parameters')
    given = list(params)
    _check_tensors(given, where)
    return given


def _check_tensors(given: list[Any], where: str) -> None:
    for number, each in enumerate(given):
        if isinstance(each, tuple):
            raise ValueError(f"{where}: element {number} is a tuple; give parameters, not named_parameters()")
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"{where}: element {number} is a {type(each).__name__}, not a parameter")


def _check_once(lists: list[list[torch.Tensor]], of_group: Any) -> None:
    first: dict[int, str] = {}
    for group, params in enumerate(lists):
        for number, param in enumerate(params):
            here = f"parameter {number}{of_group(group)}"
            if id(param) in first:
                raise ValueError(
                    f"{here}, of shape {tuple(param.shape)}, is also {first[id(param)]}; each parameter belongs into "
                    "the param groups once: take it out of one place"
                )
            first[id(param)] = here


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
