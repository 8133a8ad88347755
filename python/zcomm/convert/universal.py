"""Reading DeepSpeed's universal checkpoints: a folder of tensors for each parameter, and options of the optimizer.

Layout (DeepSpeed 0.19.8, as its checkpoint/ds_to_universal.py writes it): ``zero/NAME/fp32.pt`` is the master,
``zero/NAME/ARRAY.pt`` an array of optimizer state (exp_avg, exp_avg_sq), ``zero/NAME/step.pt`` the count of steps.
Stages 1 and 2 write {"param": tensor}, stage 3 the flat tensor and no step. ``zero/optimizer_state.pt`` has the param
groups. ``*_model_states.pt`` are the zero checkpoint's files. Files are read by ``deepspeed_files``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zcomm.convert.deepspeed_files import load

ZERO, OPTIMIZER = "zero", "optimizer_state.pt"
MASTER, STEP = "fp32", "step"
Read = Callable[[], torch.Tensor]


def is_universal(folder: Path) -> bool:
    """Return True if ``folder`` is a universal checkpoint."""
    return (folder / ZERO / OPTIMIZER).is_file()


def optimizer_state(folder: Path, first_names: list[str]) -> dict[str, Any]:
    """Return the optimizer's file in the form of a zero checkpoint's, with the counts of steps.

    first_names: a parameter of each param group. Raises: ValueError.
    """
    state: dict[str, Any] = load(folder / ZERO / OPTIMIZER)
    groups = state["param_groups"]
    inner = state.get("optimizer_state_dict") or {"state": {}}
    steps: dict[int, Any] = {}
    for number, name in enumerate(first_names):
        path = _folder_of(folder, name) / f"{STEP}.pt"
        if path.is_file():
            steps[number] = {"step": load(path)}
    return {**state, "base_optimizer_state": {"state": steps or inner["state"], "param_groups": groups}}


def readers(folder: Path, name: str, shape: torch.Size) -> tuple[Read, dict[str, Read]]:
    """Return readers of a parameter's master and of its arrays by name. Raises: ValueError naming a missing file."""
    place = _folder_of(folder, name)
    if not (place / f"{MASTER}.pt").is_file():
        raise ValueError(f"{place / MASTER}.pt is missing: {name} is a trained parameter")
    arrays = sorted(path.stem for path in place.glob("*.pt") if path.stem not in (MASTER, STEP))
    return partial(_tensor, place / f"{MASTER}.pt", shape), {
        key: partial(_tensor, place / f"{key}.pt", shape) for key in arrays
    }


def _folder_of(folder: Path, name: str) -> Path:
    if not set(name.split("/")).isdisjoint({"", ".", ".."}):  # it would lead out of the folder
        raise ValueError(f"{folder}: the parameter's name {name!r} is not one of a file")
    return folder / ZERO / name


def _tensor(path: Path, shape: torch.Size) -> torch.Tensor:
    found = load(path)
    tensor = found["param"] if isinstance(found, dict) else found
    if not isinstance(tensor, torch.Tensor) or tensor.numel() != shape.numel():
        size = tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{path}: {size} is there, expected a tensor of shape {tuple(shape)}")
    return tensor.reshape(shape).float()


def names_of(param_shapes: list[Any]) -> Iterator[list[str]]:
    """Yield the names of each param group."""
    for group in param_shapes:
        yield list(map(str, group))
