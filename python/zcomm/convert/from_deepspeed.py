"""Conversion of a checkpoint of DeepSpeed's ZeRO (stages 1 to 3): weights, exact masters, optimizer state.

Layout (DeepSpeed 0.19.8, as its utils/zero_to_fp32.py reads it): stages 1, 2 cut each param group's flat vector into
equal parts. Stage 3 cuts each parameter, and concatenates a rank's parts. Its universal form: universal.py.
Memory: one whole tensor; the files are mapped.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zcomm.convert import universal
from zcomm.convert.deepspeed_files import load_kind
from zcomm.convert.universal import Read
from zcomm.zero.checkpoint import extra_state
from zcomm.zero.checkpoint.json_values import to_json
from zcomm.zero.checkpoint.manifest import Manifest
from zcomm.zero.checkpoint.shard_files import VALUES, rounded
from zcomm.zero.files import durable
from zcomm.zero.files.staging import NewFolder
from zcomm.zero.files.tensor_file import Writer, write_tensors
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.saved_names import matched

_OPTIONS = (  # of a param group, by torch's names; DeepSpeed's own options are not converted
    "lr",
    "initial_lr",
    "betas",
    "eps",
    "weight_decay",
    "maximize",
    "momentum",
    "dampening",
    "nesterov",
    "lr_decay",
)
_OF_DEEPSPEED = {  # keys that DeepSpeed writes next to the caller's client state
    *"module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments".split(),
    *"lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps".split(),
    *"global_samples dp_world_size mp_world_size checkpoint_parallel_dimensions ds_config ds_version".split(),
}


@dataclass(frozen=True)
class _Trained:
    """A parameter: its shape and param group, and the readers of its master and arrays."""

    name: str
    shape: torch.Size
    group: int
    arrays: Mapping[str, Read]
    master: Read


def convert(source: Path, out: Path) -> list[str]:
    """Write folder ``out`` from DeepSpeed's folder of one tag, zero or universal (or the one above, with ``latest``).

    Returns: lines of text that list the converted and the omitted content.
    Raises: FileNotFoundError, FileExistsError, ValueError (no ZeRO checkpoint, a class that is not in the allowlist),
    NotImplementedError (model parallelism).
    """
    if out.exists():
        raise FileExistsError(17, "there is something already", str(out))
    folder = durable.latest_in(source) or source
    models = load_kind(folder, "model")
    optims = [] if universal.is_universal(folder) else load_kind(folder, "optim")
    try:
        return _convert(folder, models, optims, out)
    except (LookupError, TypeError, AttributeError, RuntimeError) as error:
        if isinstance(error, NotImplementedError):
            raise
        raise ValueError(f"{folder} is not a ZeRO checkpoint as DeepSpeed writes it: {error!r}") from error


def _convert(folder: Path, models: list[Any], optims: list[Any], out: Path) -> list[str]:
    paths = list(universal.names_of(models[0]["param_shapes"]))
    models = [_in_names_of_module(each) for each in models]
    model, state = models[0], [optim["optimizer_state_dict"] for optim in optims]
    if not optims:
        state = [universal.optimizer_state(folder, [names[0] for names in paths])]
    stage = int(state[0]["zero_stage"])
    count = state[0]["partition_count"]
    world_size = max(count) if isinstance(count, list) else int(count)
    if optims and world_size != len(optims):
        raise ValueError(f"{folder}: {world_size} ranks wrote it, but {len(optims)} *_optim_states.pt are there")
    if int(model.get("mp_world_size", 1)) != 1:
        raise NotImplementedError(f"{folder}: tensor parallelism (mp_world_size {model['mp_world_size']}) is not read")
    if optims:
        trained = _stage_3(model, state) if stage == 3 else _stages_1_2(model, state)
    else:
        trained = _universal(folder, model, _inner(state[0]), paths)
    dtype = _precision(model, trained)
    inner = _inner(state[0])
    values: dict[str, torch.Tensor] = {}
    client_state, lost = _client_state(model, values)
    extra, lost_extra = _extra(model, values)
    schedule, lost_schedule = _schedule(model.get("lr_scheduler"))
    counters: dict[str, Any] = {"step_count": int(model["global_steps"]), "skipped_steps": int(model["skipped_steps"])}
    name = _optimizer_name(inner, trained)
    manifest = Manifest(
        world_size=world_size,
        stage=stage,
        precision={torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype],
        optimizer_name=name or f"an optimizer with {', '.join(sorted(trained[0].arrays)) or 'no state'}",
        parameters=[one.name for one in trained],
        groups=_groups(inner, trained),
        progress=None if name else _progress(inner),
        counters=counters | _loss_scale(state[0].get("loss_scaler")),
        scheduler=schedule,
        aliases={str(alias): str(first) for alias, first in model["shared_params"].items()},
        client_state=client_state,
        extra=extra,
    )
    others = list(_others(models, trained, stage))
    manifest.frozen = [name for name, _ in others if name not in model["buffer_names"]]
    with NewFolder(out) as new:
        _write(new.path, manifest, trained, others, dtype, values)
        new.put()
    lines = [f"stage {stage}, world {world_size}, step {manifest.counters['step_count']}: {len(trained)} parameters"]
    lines += [f"not converted: lr_scheduler ({lost_schedule})"] if lost_schedule else []
    lines += [f"not converted: {name}, which a checkpoint cannot keep" for name in lost_extra]
    lines += [f"not converted: of the client state {', '.join(lost)}, which a checkpoint cannot keep"] if lost else []
    return [*lines, f"not in DeepSpeed's files: random number generators. Written: {out}"]


def _in_names_of_module(model: Any) -> Any:
    """Return a copy with the names of the module's state dict in all its parts.

    The other parts have paths, with attributes of wrappers (checkpoint_wrapper) that the module's hooks remove.
    """
    listed = list(model["param_shapes"])
    tables = {key: model.get(key) or {} for key in ("shared_params", "frozen_param_shapes", "frozen_param_fragments")}
    paths = [name for table in (*listed, *tables.values(), model["buffer_names"]) for name in table]
    new = matched([*paths, *tables["shared_params"].values()], list(model["module"]))
    if not new:
        return model

    def renamed(table: Mapping[str, Any]) -> dict[str, Any]:
        return {new.get(name, name): value for name, value in table.items()}

    shared = {name: new.get(first, first) for name, first in tables["shared_params"].items()}
    return {
        **model,
        **{key: renamed(table) for key, table in tables.items()},
        "shared_params": renamed(shared),
        "param_shapes": [renamed(table) for table in listed],
        "buffer_names": [new.get(name, name) for name in model["buffer_names"]],
    }


# --- reading ------------------------------------------------------------------------------------------------------


def _inner(state: dict[str, Any]) -> dict[str, Any]:
    """Return the optimizer's own state_dict."""
    found: dict[str, Any] = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    return found


def _arrays(entry: dict[str, Any]) -> list[str]:
    return [key for key, value in entry.items() if isinstance(value, torch.Tensor) and value.dim() == 1]


def _owners(inner: dict[str, Any], count: int) -> list[int]:
    """Return the param group of each of ``count`` flat tensors: stage 3 cuts large groups into several."""
    owners = {index: group for group, each in enumerate(inner["param_groups"]) for index in each.get("params", [])}
    return [owners.get(number, number) for number in range(count)]


def _first(group: dict[str, Any], number: int) -> int:
    """Return the number of a param group's first flat tensor."""
    return next(iter(group.get("params", [])), number)


def _universal(folder: Path, model: Any, inner: dict[str, Any], paths: list[list[str]]) -> list[_Trained]:
    """Read a universal checkpoint. paths: of the parameters in each part of a group, under which the files lie."""
    trained = []
    owners = _owners(inner, len(paths))
    for number, shapes in enumerate(model["param_shapes"]):
        for path, (name, shape) in zip(paths[number], shapes.items(), strict=True):
            master, arrays = universal.readers(folder, path, torch.Size(shape))
            trained.append(_Trained(str(name), torch.Size(shape), owners[number], arrays, master))
    return trained


def _stages_1_2(model: Any, state: list[Any]) -> list[_Trained]:
    trained = []
    paddings = state[0].get("param_alignment_paddings")
    for group, shapes in enumerate(model["param_shapes"]):
        masters = [one["single_partition_of_fp32_groups"][group] for one in state]
        entries = [_inner(one)["state"].get(group, {}) for one in state]
        at = 0
        for number, (name, shape) in enumerate(shapes.items()):
            shape = torch.Size(shape)
            read = partial(_of_flat, at, shape)
            arrays = {key: partial(read, [entry[key] for entry in entries]) for key in _arrays(entries[0])}
            trained.append(_Trained(str(name), shape, group, arrays, partial(read, masters)))
            at += shape.numel() + (paddings[group][number] if paddings is not None else 0)
    return trained


def _stage_3(model: Any, state: list[Any]) -> list[_Trained]:
    """Read stage 3: a rank's concatenated sub groups hold its parts of all parameters in order."""
    world_size = len(state)
    entries = [[_inner(one)["state"].get(k, {}) for k in range(len(one["fp32_flat_groups"]))] for one in state]
    keys = _arrays(entries[0][0]) if entries[0] else []
    trained, at = [], 0
    owners = _owners(_inner(state[0]), len(model["param_shapes"]))
    for number, shapes in enumerate(model["param_shapes"]):
        for name, shape in shapes.items():
            shape = torch.Size(shape)
            part = -(-shape.numel() // world_size)
            read = partial(_of_parts, at, part, shape)
            arrays = {key: partial(read, [[entry[key] for entry in rank] for rank in entries]) for key in keys}
            master = partial(read, [one["fp32_flat_groups"] for one in state])
            trained.append(_Trained(str(name), shape, owners[number], arrays, master))
            at += part
    return trained


def _of_flat(at: int, shape: torch.Size, parts: list[torch.Tensor]) -> torch.Tensor:
    return _cut(parts, at, at + shape.numel()).view(shape)


def _of_parts(at: int, part: int, shape: torch.Size, ranks: list[list[torch.Tensor]]) -> torch.Tensor:
    whole = torch.cat([_cut(pieces, at, at + part, equal=False) for pieces in ranks])
    return whole[: shape.numel()].view(shape)


def _cut(parts: list[torch.Tensor], begin: int, end: int, equal: bool = True) -> torch.Tensor:
    """Return elements [begin, end) of the concatenated parts. equal: each begins at a multiple of the first part's
    size (the last part may be without padding)."""
    found, start = [], 0
    for number, part in enumerate(parts):
        start = number * parts[0].numel() if equal else start
        low, high = max(begin, start), min(end, start + part.numel())
        if low < high:
            found.append(part[low - start : high - start])
        start += part.numel()
    whole = torch.cat(found) if found else torch.empty(0)
    if whole.numel() != end - begin:
        raise ValueError(f"elements {begin} to {end} are not in the files: {whole.numel()} of them are")
    return whole.float()


# --- other content ------------------------------------------------------------------------------------------------


def _others(models: list[Any], trained: list[_Trained], stage: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield frozen parameters and buffers, each once."""
    model = models[0]
    known = {one.name for one in trained} | set(model["shared_params"])
    frozen = model.get("frozen_param_shapes") or {}
    for name, tensor in model["module"].items():
        if name in known or extra_state.is_extra(str(name)):
            continue
        if stage == 3 and name in frozen:
            shape = torch.Size(frozen[name])
            whole = torch.cat([one["frozen_param_fragments"][name] for one in models])
            yield str(name), whole[: shape.numel()].view(shape)
        else:
            yield str(name), tensor


def _precision(model: Any, trained: list[_Trained]) -> torch.dtype:
    dtypes = {model["module"][one.name].dtype for one in trained if one.name in model["module"]}
    if len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        raise ValueError(f"the trained parameters have dtypes {dtypes or 'unknown'}; one of fp32, bf16, fp16 is read")
    dtype: torch.dtype = dtypes.pop()
    return dtype


def _optimizer_name(inner: dict[str, Any], trained: list[_Trained]) -> str:
    """Return the name of the rule, or "" for a rule without a kernel of zcomm."""
    keys = set(trained[0].arrays)
    if "mu_product" in inner["state"].get(0, {}):
        return ""  # NAdam, which has Adam's arrays
    if keys == {"exp_avg", "exp_avg_sq"}:
        return "adam" if inner["param_groups"][0].get("decoupled_weight_decay") is False else "adamw"
    names = {"exp_avg": "lion", "momentum_buffer": "sgd", "sum": "adagrad"}
    return names.get("".join(sorted(keys)), "")


def _progress(inner: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the numbers that a class of torch keeps for each group (step, mu_product); None: no numbers."""
    found = []
    for number in range(len(inner["param_groups"])):
        entry = inner["state"].get(_first(inner["param_groups"][number], number), inner["state"].get(0, {}))
        found.append({str(key): float(value) for key, value in entry.items() if _is_number(value)})
    return found if any(found) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and value.dim() == 0)


def _groups(inner: dict[str, Any], trained: list[_Trained]) -> list[dict[str, Any]]:
    groups = []
    for number, group in enumerate(inner["param_groups"]):
        options = {key: group[key] for key in _OPTIONS if key in group}
        state = inner["state"].get(_first(group, number), inner["state"].get(0, {}))
        step = state.get("step", group.get("step"))
        if step is not None:
            options["step"] = int(step)
        if options.get("momentum"):
            options["buffered"] = True
        names = [one.name for one in trained if one.group == number]
        groups.append({"params": names, "options": to_json(options, f"param_groups[{number}]")})
    return groups


def _schedule(state: Any) -> tuple[Any, str]:
    """Return the schedule's state, with its iteration in torch's words, too; or the reason why it is left out."""
    if not state:
        return None, ""
    try:
        found = to_json(dict(state), "lr_scheduler")
    except (ValueError, TypeError) as error:
        return None, str(error)
    iteration = found.get("last_batch_iteration")
    if isinstance(iteration, int):
        found = {"last_epoch": iteration + 1, "_step_count": iteration + 2} | found
    return found, ""


def _loss_scale(scaler: Any) -> dict[str, Any]:
    """Return the counter of a dynamic loss scale; {}: the scale is static."""
    found = vars(scaler) if hasattr(scaler, "cur_hysteresis") else {}
    if "last_overflow_iter" not in found:
        return {}
    good = int(found["cur_iter"]) - int(found["last_overflow_iter"]) - 1
    scale = {"scale": float(found["cur_scale"]), "hysteresis_left": int(found["cur_hysteresis"]), "good_steps": good}
    return {"loss_scale": scale}


def _client_state(model: Any, values: dict[str, torch.Tensor]) -> tuple[Any, list[str]]:
    """Return the client state in the engine's form, and the names of values that a checkpoint cannot keep. values:
    receives its tensors."""
    client, lost = {}, []
    for key, value in model.items():
        if key not in _OF_DEEPSPEED:
            tensors: dict[str, torch.Tensor] = {}
            try:
                client[str(key)] = to_json(value, f"client_state[{json.dumps(str(key))}]", tensors)
            except ValueError:
                lost.append(str(key))
                continue
            values.update(tensors)
    config = model.get("ds_config")
    accumulation = config.get("gradient_accumulation_steps", 0) if isinstance(config, dict) else 0
    steps = int(model["global_steps"])
    micro = steps * accumulation if isinstance(accumulation, int) else 0  # 0: at the beginning of an accumulation
    counters = {"global_steps": steps, "micro_steps": micro, "global_samples": int(model.get("global_samples", 0))}
    return {"engine": counters, "client_state": client}, lost


def _extra(model: Any, values: dict[str, torch.Tensor]) -> tuple[dict[str, Any], list[str]]:
    """Return the modules' extra state, and the names of states that a checkpoint cannot keep. values: receives its
    tensors."""
    states = {str(name): state for name, state in model["module"].items() if extra_state.is_extra(str(name))}
    kept, lost = extra_state.packed(states, values)
    return kept, list(lost)


# --- writing ------------------------------------------------------------------------------------------------------


def _write(
    new: Path,
    manifest: Manifest,
    trained: list[_Trained],
    others: list[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    values: dict[str, torch.Tensor],
) -> None:
    exact = [] if dtype == torch.float32 else ["master"]
    weights = Writer(
        new / "model-00001-of-00001.safetensors",
        [(one.name, dtype, one.shape) for one in trained] + [(name, t.dtype, t.shape) for name, t in others],
    )
    keys = [f"{key}/{one.name}" for one in trained for key in [*exact, *one.arrays]]
    shapes = {one.name: one.shape for one in trained}
    state = Writer(
        new / "optimizer-00001-of-00001.safetensors",
        [(key, torch.float32, shapes[key.partition("/")[2]]) for key in keys],
    )
    try:
        for one in trained:
            master = one.master()
            weights.add(rounded(TileForm((), dtype), master))
            for read in [*([lambda master=master: master] if exact else []), *one.arrays.values()]:
                state.add(read())
        for _, tensor in others:
            weights.add(tensor.contiguous())
    finally:
        weights.close()
        state.close()
    manifest.weights, manifest.optimizer = dict(weights.entries), dict(state.entries)
    writers = [weights, state]
    if values:
        writers.append(write_tensors(new / VALUES, values))
        manifest.values = dict(writers[-1].entries)
    manifest.files = {writer.path.name: writer.nbytes for writer in writers}
    manifest.checksums = {writer.path.name: writer.header_crc32 for writer in writers}
    manifest.write(new)
