"""Writing DeepSpeed's universal checkpoints out of zcomm's: one folder per parameter, read by DeepSpeed in any stage.

Layout: universal.py. Model states are written in both forms: ``mp_rank_00`` for stages 0 to 2, ``zero_pp_rank_0_...``
for stage 3. They are two names of one file if the drive has hard links.
Memory: one whole tensor of state; the weights are mapped.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from zcomm.convert.from_deepspeed import convert
from zcomm.convert.universal import MASTER, OPTIMIZER, STEP, ZERO
from zcomm.zero.checkpoint import extra_state
from zcomm.zero.checkpoint.json_values import from_json
from zcomm.zero.checkpoint.load import read_decoded
from zcomm.zero.checkpoint.manifest import NAME, Manifest
from zcomm.zero.checkpoint.manifest_reader import open_checkpoint
from zcomm.zero.files import durable
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.staging import NewFolder
from zcomm.zero.files.tensor_file import check, read_part, read_whole

LATEST = "latest_universal"
DEEPSPEED = "0.19.8"  # the version of the layout
_MODEL, _MODEL_3 = "mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"
_PLAIN = (bool, int, float, str, torch.Tensor, type(None))


def to_universal(checkpoint: Path, out: Path, torch_adam: bool = False) -> list[str]:
    """Write folder ``out`` from a checkpoint of zcomm or DeepSpeed (or the one that ``latest`` names).

    The file ``latest_universal`` next to ``out`` names it afterwards.

    torch_adam: DeepSpeed will train with a torch.optim class. These count steps in tensors, its own in integers.
    Returns: lines of text that list the converted and the omitted content.
    Raises: FileNotFoundError, FileExistsError; OSError (EIO) naming a wrong checksum; ValueError for parameters that
    have taken different numbers of steps. ValueError for names that a folder cannot have.
    """
    if out.exists():
        raise FileExistsError(errno.EEXIST, "there is something already", str(out))
    source = durable.find(checkpoint)
    source = durable.latest_in(source) or source
    lines: list[str] = []
    with contextlib.ExitStack() as stack:
        if not (source / NAME).is_file() and any(source.glob("*_optim_states.pt")):  # DeepSpeed's
            durable.make_folders(out.parent)
            made = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent))
            lines = convert(source, Path(made) / "checkpoint")[1:-1]
            source = Path(made) / "checkpoint"
        return lines + _write(source, out, torch_adam)


def _write(source: Path, out: Path, torch_adam: bool) -> list[str]:
    folder, manifest = open_checkpoint(source)
    with folder:
        steps = _steps(folder, manifest)
        wrong = manifest.missing_files(folder)
        wrong += filter(None, (check(folder, name, entry) for name, entry in manifest.entries()))
        if wrong:
            raise OSError(errno.EIO, f"the checkpoint is not whole: {'; '.join(wrong)}")
        values = {name: read_whole(folder, name, entry) for name, entry in manifest.values.items()}
        with NewFolder(out) as new:
            for group, step in zip(manifest.groups, steps, strict=True):
                count: Any = torch.tensor(float(step)) if torch_adam else step
                for name in group["params"]:
                    _write_parameter(new.path / ZERO, folder, manifest, name, count)
            _save(new.path / ZERO / OPTIMIZER, _optimizer(folder, manifest, steps, torch_adam))
            states, lost = _model_states(folder, manifest, values)
            _save(new.path / _MODEL, states)
            _second_name(new.path / _MODEL, new.path / _MODEL_3)
            new.put()
    durable.replace_file(out.parent / LATEST, out.name.encode())
    lines = [f"step {manifest.counters['step_count']}: {len(manifest.parameters)} parameters"]
    lines += [f"not converted: {name}, which the file of model states cannot keep" for name in lost]
    lines += (
        ["not converted: the loss scale, which DeepSpeed starts from its configuration"]
        if "loss_scale" in manifest.counters
        else []
    )
    return [*lines, f"not in a universal checkpoint: random number generators. Written: {out}"]


def _steps(folder: Folder, manifest: Manifest) -> list[int]:
    """Return the count of steps of each param group."""
    steps = [int(group["options"].get("step", manifest.counters["step_count"])) for group in manifest.groups]
    for cohort in manifest.counters.get("cohorts", []):
        own = int(cohort["counters"].get("step", steps[cohort["group"]]))
        if own != steps[cohort["group"]]:
            raise ValueError(
                f"{folder.path}: {', '.join(cohort['params'][:3])} took {own} steps and the others of the param group "
                f"{steps[cohort['group']]}; a universal checkpoint has one count for a group"
            )
    if len(set(steps)) > 1:
        raise ValueError(f"{folder.path}: the param groups took {steps} steps; a universal checkpoint has one count")
    return steps


def _write_parameter(zero: Path, folder: Folder, manifest: Manifest, name: str, step: Any) -> None:
    if "/" in name or name in (".", ".."):
        raise ValueError(f"{folder.path}: {name!r} cannot be the name of a folder")
    state = {key.partition("/")[0]: entry for key, entry in manifest.optimizer.items() if key.partition("/")[2] == name}
    entry = state.pop("master", manifest.weights[name])
    shape = torch.Size(entry.shape)
    _save(zero / name / f"{MASTER}.pt", {"param": read_part(folder, entry).view(shape).float(), "cat_dim": 0})
    for key in state:
        if key == "scales":
            continue
        if "scales" in state:
            array = read_decoded(folder, state, key, 0, shape.numel())
        else:
            array = read_part(folder, state[key]).float()
        _save(zero / name / f"{key}.pt", {"param": array.view(shape), "cat_dim": 0})
    if state:
        _save(zero / name / f"{STEP}.pt", step)


def _optimizer(folder: Folder, manifest: Manifest, steps: list[int], torch_adam: bool) -> dict[str, Any]:
    groups = []
    for number, group in enumerate(manifest.groups):
        options = from_json(group["options"], {})
        options.pop("buffered", None)
        if torch_adam:
            options.pop("step", None)
        groups.append({**options, "params": [number]})
    counts: dict[int, Any] = {
        number: {"step": torch.tensor(float(step)) if torch_adam else step} for number, step in enumerate(steps)
    }
    return {
        "zero_stage": max(manifest.stage, 1),
        "partition_count": [manifest.world_size] * len(groups),
        "overflow": False,
        "ds_version": DEEPSPEED,
        "param_groups": groups,
        "optimizer_state_dict": {"state": counts, "param_groups": groups},
    }


def _model_states(
    folder: Folder, manifest: Manifest, values: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], list[str]]:
    """Return the content of the file of model states, and the names of values that it cannot keep."""
    tensors = {name: entry for name, entry in manifest.weights.items() if name not in manifest.added}
    maps = {entry.file: _mapped(folder, entry.file) for entry in tensors.values()}
    module: OrderedDict[str, Any] = OrderedDict()
    for name, entry in tensors.items():
        count = torch.Size(entry.shape).numel()
        flat = torch.empty(0, dtype=entry.torch_dtype)
        if count:
            flat = torch.frombuffer(maps[entry.file], dtype=entry.torch_dtype, count=count, offset=entry.begin)
        module[name] = flat.view(entry.shape)
    module.update((alias, module[name]) for alias, name in manifest.aliases.items())
    module.update(extra_state.restored(manifest.extra or {}, values, str(folder.path)))
    trained, frozen = set(manifest.parameters), set(manifest.frozen or ())
    saved = from_json(manifest.client_state, values)
    of_engine = isinstance(saved, dict) and "engine" in saved
    client = saved.get("client_state") if of_engine else saved
    engine = saved["engine"] if of_engine else {}
    kept, lost = {}, []
    for key, value in (client if isinstance(client, dict) else {}).items():
        if isinstance(key, str) and _is_plain(value):
            kept[key] = value
        else:
            lost.append(f"client_state[{key!r}]")
    for key in [key for key, value in module.items() if not _is_plain(value)]:
        del module[key]
        lost.append(key)
    counters = manifest.counters
    states = {
        "module": module,
        "buffer_names": [name for name in tensors if name not in trained | frozen],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(manifest.weights[name].shape)) for name in group["params"])
            for group in manifest.groups
        ],
        "frozen_param_shapes": OrderedDict((name, torch.Size(manifest.weights[name].shape)) for name in frozen),
        "frozen_param_fragments": OrderedDict((name, module[name].flatten()) for name in frozen),
        "shared_params": dict(manifest.aliases),
        "lr_scheduler": from_json(manifest.scheduler, values),
        "data_sampler": None,
        "random_ltd": None,
        "sparse_tensor_module_names": set(),
        "skipped_steps": counters["skipped_steps"],
        "global_steps": engine.get("global_steps", counters["step_count"]),
        "global_samples": engine.get("global_samples", 0),
        "dp_world_size": manifest.world_size,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {},
        "ds_version": DEEPSPEED,
        "universal_checkpoint_info": {"universal_checkpoint_version": 0.4},
    }
    return {**kept, **states}, lost


def _is_plain(value: Any) -> bool:
    """Return True if torch.load(weights_only=True) reads ``value``."""
    if type(value) in (list, tuple, torch.Size):
        return all(map(_is_plain, value))
    if type(value) in (dict, OrderedDict):
        return all(isinstance(key, (str, int)) and _is_plain(each) for key, each in value.items())
    return type(value) in (*_PLAIN, torch.nn.Parameter)


def _mapped(folder: Folder, name: str) -> mmap.mmap:
    return mmap.mmap(folder.kept(name).fileno(), 0, access=mmap.ACCESS_COPY)


def _save(path: Path, value: Any) -> None:
    durable.make_folders(path.parent)
    with durable.new_file(path) as raw:
        with open(raw.fileno(), "wb", closefd=False) as file:
            torch.save(value, file)
        durable.sync_file(raw.fileno(), path)


def _second_name(path: Path, other: Path) -> None:
    try:
        os.link(path, other)
    except OSError:  # the file system has no hard links
        shutil.copyfile(path, other)
