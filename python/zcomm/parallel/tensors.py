"""Tensor parallelism: layers of a model divided over the ranks of the axis "tensor", by torch's parallelize_module.

torch has the arithmetic and moves the activations. This module finds the plan, checks it against the model, and does it
the same on all ranks. ZeroOptimizer then trains the parts ([Note: local parts]). Needs torch >= 2.7.
Invariants: a divided size is a multiple of the ranks, because torch is wrong for uneven parts. Names of one tied
parameter are divided alike, or stay whole. Parameters that stay whole are the first rank's on all ranks of the axis.
Thread rule: the main thread; collective over the ranks of the axis.
Source: Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.torch_version import TorchVersion

from zcomm.comm.mesh import ProcessMesh
from zcomm.comm.mesh_layout import ALIASES
from zcomm.hints import did_you_mean
from zcomm.parallel.inferred_plan import divide_heads, inferred_plan
from zcomm.parallel.styles import (
    OWNERS,
    REPLICATE,
    SUMMED,
    WHOLE,
    Division,
    as_style,
    check_module,
    check_owner,
    check_style,
    division,
    division_of_bare,
    part_out,
    word_of,
)

logger = logging.getLogger("zcomm")
Plan = Mapping[str, Any]
_ACTIVATIONS = ("act_fn", "act", "activation_fn")  # Hugging Face's names
_NORMS = ("q_norm", "k_norm", "v_norm", "query_layernorm", "key_layernorm", "q_layernorm", "k_layernorm")


def tensor(model: nn.Module, mesh: Any, plan: Plan | None = None) -> nn.Module:
    """Divide layers of ``model`` over the ranks of the mesh's axis "tensor", in place, and return it. Collective.

    mesh: a ProcessMesh, or torch's DeviceMesh, with that axis (or "tp"). Give ZeroOptimizer the mesh of all ranks, too.
    plan: styles by pattern of module names, such as "layers.*.up": ``*`` is one part of a name, in front any parts. A
    style is "colwise", "rowwise", another word of Hugging Face (styles.py), or torch's ParallelStyle. A pattern can
    name parameters, too, of modules with more than a weight and a bias. None: the model's own plan (Hugging Face's), or
    one by the names of the linear layers in its blocks (inferred_plan.py).
    Weights are the first rank's. All ranks of the axis must be fed the same samples.
    Raises, the same on all ranks of the axis: ValueError naming the pattern or parameter, or a model without a plan.
    NotImplementedError for a style, and for torch < 2.7.
    """
    if TorchVersion(torch.__version__) < "2.7":
        raise NotImplementedError(f"tensor parallelism needs torch >= 2.7, not {torch.__version__}")
    from torch.distributed.tensor.parallel import parallelize_module

    at = _axis(mesh, next((p.device.type for p in model.parameters()), "cpu"))
    styles: dict[str, Any] = {}
    bare: dict[str, Any] = {}
    error: Exception | None = None
    try:
        styles, bare = _styles(model, plan, at.size())
    except (ValueError, NotImplementedError) as refused:
        error = refused
    _agree(at, error, [f"{name}: {_shown(style)}" for name, style in (styles | bare).items()])
    tied, config = _tied(model), _config(model)
    for name, style in bare.items():
        owner, _, key = name.rpartition(".")
        if (where := division_of_bare(model.get_parameter(name), style)) is not None:
            part_out(model.get_submodule(owner), key, at, where)
    parallelize_module(
        model, at, {name: as_style(style, model.get_submodule(name), config) for name, style in styles.items()}
    )
    for names in tied:
        _tie_again(model, names)
    _share_rest(model, at)
    return model


def _axis(mesh: Any, device_type: str) -> Any:
    """Return the DeviceMesh of the axis "tensor". Raises: ValueError."""
    if not dist.is_initialized():
        raise ValueError(
            'parallel.tensor() needs a process group of torch: call torch.distributed.init_process_group("zcomm") first'
        )
    if isinstance(mesh, ProcessMesh):
        if (dist.get_rank(), dist.get_world_size()) != (mesh.world.rank, mesh.world.world_size):
            raise ValueError(f"{mesh!r} has other ranks than torch.distributed: make it of the job's ranks")
        (ranks,) = mesh.groups(*mesh.axes)
        places = torch.tensor(ranks).view(mesh.shape)
        mesh = dist.DeviceMesh(device_type, places, mesh_dim_names=mesh.axes)
    axes = getattr(mesh, "mesh_dim_names", None) or ()
    found = [axis for axis in axes if ALIASES.get(axis, axis) == "tensor"]
    if not found:
        raise ValueError(f'parallel.tensor(): {mesh!r} has no axis "tensor"')
    return mesh[found[0]]


def _agree(at: Any, error: Exception | None, lines: list[str]) -> None:
    """Raise ``error`` on all ranks of the axis, and ValueError if they divide other modules. Collective."""
    every: list[Any] = [None] * at.size()
    mine = None if error is None else (isinstance(error, ValueError), str(error))
    dist.all_gather_object(every, (mine, lines), group=at.get_group())
    for rank, (told, _) in enumerate(every):
        if told is not None:
            raise (ValueError if told[0] else NotImplementedError)(
                told[1] if told == mine else f"rank {rank} of the axis: {told[1]}"
            )
    for rank, (_, theirs) in enumerate(every):
        if theirs != every[0][1]:
            differs = sorted(set(theirs).symmetric_difference(every[0][1]))[0]
            raise ValueError(f"parallel.tensor(): ranks 0 and {rank} of the axis differ in {differs}")


# --- the plan -------------------------------------------------------------------------------------------------


def _styles(model: nn.Module, plan: Plan | None, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the styles of modules, and of parameters that the plan names. Raises: ValueError, NotImplementedError."""
    given = plan if plan is not None else _own_plan(model) or inferred_plan(model)
    modules, params = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    styles: dict[str, Any] = {}
    bare: dict[str, Any] = {}
    for pattern, style in given.items():
        names = [name for name in modules if _fits(pattern, name)]
        own = [name for name in params if _fits(pattern, name)]
        if not names and not own and plan is not None:
            raise ValueError(f"plan: no module is called {pattern!r}{did_you_mean(pattern, modules)}")
        for name in (*names, *own):
            check_style(style, pattern, name)
            (styles if name in modules else bare).pop(name, None)
            if style != REPLICATE:
                (styles if name in modules else bare)[name] = style
    styles |= {name: SUMMED for name in _between(model, styles) if name not in styles}
    for name, style in styles.items():
        check_module(name, modules[name], style, _config(model))
    if plan is None:
        _keep_uneven_whole(model, styles, size)
    _drop_unequal_ties(model, styles, bare)
    divided = _divided(model, styles, bare)
    if not divided:
        raise ValueError(f"parallel.tensor(): the plan divides no layer of {type(model).__name__}: give plan=")
    for name, style in bare.items():
        owner = styles.get(name.rpartition(".")[0])
        if owner not in OWNERS:
            raise ValueError(f"plan: {name} is a parameter: give its module one of the styles {', '.join(OWNERS)}, too")
        if plan is None and name.endswith("gate_up_proj") and style == "colwise":
            raise NotImplementedError(
                f"the plan of {type(model).__name__} divides the fused {name} as one block, which computes another "
                'model: give plan= with "packed_colwise"'
            )
    for name, style in styles.items():
        check_owner(name, modules[name], style, divided)
        for key, param in modules[name]._parameters.items():
            if param is not None:
                whole = f"{name}.{key}"
                _check(whole, param, divided.get(whole), size)
    _check_heads(model, styles, size)
    if plan is None and not _own_plan(model):
        divide_heads(model, styles, size)
    return styles, bare


def _between(model: nn.Module, styles: Mapping[str, Any]) -> list[str]:
    """Return modules with whole parameters between divided layers, which plans may have forgotten: activations, and
    norms of one head. Each rank uses them for its own columns."""
    modules, config = dict(model.named_modules()), _config(model)
    divided = {
        name.rpartition(".")[0] for name, style in styles.items() if word_of(style) in ("colwise", "packed_colwise")
    }
    heads = getattr(config, "num_attention_heads", None) or 1
    size = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // heads
    found = []
    for name, module in modules.items():
        owner, _, last = name.rpartition(".")
        whole = {param.numel() for param in module._parameters.values() if param is not None}
        if owner in divided and whole and (last in _ACTIVATIONS or (last in _NORMS and whole == {size})):
            found.append(name)
    return found


def _keep_uneven_whole(model: nn.Module, styles: dict[str, Any], size: int) -> None:
    """Leave heads and embeddings of uneven sizes whole: inputs and outputs of these are whole. Logs one warning."""
    kept = []
    for name, style in list(styles.items()):
        weight = model.get_submodule(name)._parameters.get("weight")
        where = division(model.get_submodule(name), "weight", style)
        if weight is not None and where is not None and word_of(style) in WHOLE and weight.shape[where[0]] % size:
            kept.append(f"{name} {tuple(weight.shape)}")
            del styles[name]
    if kept:
        logger.warning(
            'parallel.tensor(): %s stay whole, because the %d ranks of the axis "tensor" do not divide them',
            ", ".join(kept),
            size,
        )


def _divided(model: nn.Module, styles: Mapping[str, Any], bare: Mapping[str, Any]) -> dict[str, Division]:
    """Return the division of each parameter that does not stay whole, by all of its names."""
    found = {}
    for owner, module in model.named_modules():
        for key, param in module._parameters.items():
            name = f"{owner}.{key}" if owner else key
            if param is None:
                continue
            where = division_of_bare(param, bare[name]) if name in bare else division(module, key, styles.get(owner))
            if where is not None:
                found[name] = where
    return found


def _own_plan(model: nn.Module) -> Plan | None:
    """Return the model's own plan."""
    return getattr(model, "_tp_plan", None) or getattr(getattr(model, "config", None), "base_model_tp_plan", None)


def _fits(pattern: str, name: str) -> bool:
    first = r"(?:.+\.)?" if pattern.startswith("*.") else ""  # any modules before, as in plans of DeepSpeed's programs
    rest = re.escape(pattern.removeprefix("*.")).replace(r"\*", r"[^.]+")
    return re.fullmatch(first + rest, name) is not None


def _shown(style: Any) -> str:
    return style if isinstance(style, str) else word_of(style)


def _check(name: str, param: torch.Tensor, where: Division | None, size: int) -> None:
    if hasattr(param, "placements"):
        raise ValueError(f"{name} is divided already, as {param.placements}: call parallel.tensor() once")
    if param.is_meta:
        raise ValueError(f"{name} has no values yet: build the model outside of zcomm.zero.Init() and meta devices")
    dim, blocks = where or (0, 1)
    if where is not None and param.shape[dim] % (size * blocks):
        raise ValueError(
            f'{name} has size {param.shape[dim]} in dimension {dim}, which the {size} ranks of the axis "tensor" do '
            f"not divide{f' in {blocks} blocks' if blocks > 1 else ''}: use another number of ranks, or leave it out "
            "of the plan"
        )


def _check_heads(model: nn.Module, styles: Mapping[str, Any], size: int) -> None:
    """Raise ValueError if columns of a projection would end inside of a head of Hugging Face's attention."""
    config = _config(model)
    for key, name in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        heads = getattr(config, key, None)
        divided = [each for each in styles if each.rpartition(".")[2] == name]
        if divided and isinstance(heads, int) and heads % size:
            raise ValueError(
                f'{divided[0]}: {key}={heads}, which the {size} ranks of the axis "tensor" do not divide: use another '
                "number of ranks, or leave the attention out of the plan"
            )


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    return getattr(config, "text_config", config)


# --- tied and whole parameters --------------------------------------------------------------------------------


def _tied(model: nn.Module) -> list[list[tuple[str, str]]]:
    """Return the modules' names and keys of each parameter that has several."""
    found: dict[int, list[tuple[str, str]]] = {}
    for name, module in model.named_modules():
        for key, param in module._parameters.items():
            if param is not None:
                found.setdefault(id(param), []).append((name, key))
    return [places for places in found.values() if len(places) > 1]


def _drop_unequal_ties(model: nn.Module, styles: dict[str, Any], bare: dict[str, Any]) -> None:
    """Leave modules with a tied parameter whole, unless all of its modules divide it alike."""
    divided = _divided(model, styles, bare)
    for places in _tied(model):
        if len({divided.get(f"{name}.{key}") for name, key in places}) > 1:
            for name, key in places:
                styles.pop(name, None)
                bare.pop(f"{name}.{key}", None)


def _tie_again(model: nn.Module, places: list[tuple[str, str]]) -> None:
    first = model.get_submodule(places[0][0])._parameters[places[0][1]]
    for name, key in places[1:]:
        model.get_submodule(name)._parameters[key] = first


def _rest(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that stay whole on each rank."""
    for tensors in (model.parameters(), model.buffers()):
        yield from (each for each in tensors if not hasattr(each, "placements"))


def _share_rest(model: nn.Module, at: Any) -> None:
    """Make whole tensors the first rank's. Collective."""
    group = at.get_group()
    for each in _rest(model):
        if each.is_meta:
            raise ValueError("a parameter has no values yet: build the model outside of zcomm.zero.Init()")
        data = each.detach().contiguous()
        dist.broadcast(data, src=dist.get_global_rank(group, 0), group=group)
        if data.data_ptr() != each.data_ptr():
            each.detach().copy_(data)
