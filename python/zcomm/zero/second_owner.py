"""Refusal of a second owner of the weights: wrappers of torch that replicate, shard or reduce them, too.

``fully_shard`` and ``parallelize_module`` put DTensors into the modules, and DistributedDataParallel and FSDP reduce
gradients. ZeroOptimizer would train weights that the model does not read, or reduce twice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_REMEDY = (
    "a weight has one owner: leave that out, because ZeroOptimizer shards weights and reduces gradients itself (tensor "
    'parallelism: give mesh= with an axis "tensor")'
)
_SHARDED = "sharded by fully_shard, parallelize_module or distribute_tensor"
# Classes of modules, with their module and the call that makes them.
_WRAPPERS = (
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "wrapped by DistributedDataParallel (DDP)"),
    ("torch.distributed.fsdp", "FullyShardedDataParallel", "wrapped by FullyShardedDataParallel"),
    ("torch.distributed.fsdp", "FSDPModule", "sharded by fully_shard"),
    ("torch.distributed._composable.replicate_with_fsdp", "ReplicateModule", "replicated by replicate"),
)


def second_owner(
    modules: Iterable[tuple[str, nn.Module]], params: Iterable[tuple[str, torch.Tensor]], in_parts: bool = False
) -> str:
    """Describe another owner of a weight, with the remedy; return "" if there is none. Imports nothing. in_parts:
    DTensors are parts of a mesh, which ``MeshComms.check_parts`` checks."""
    loaded = [(getattr(sys.modules.get(where), name, None), how) for where, name, how in _WRAPPERS]
    wrappers = [(kind, how) for kind, how in loaded if isinstance(kind, type)]
    for name, module in modules:
        for kind, how in wrappers:
            if isinstance(module, kind):
                return f"{f'module {name}' if name else 'the model'} is {how}: {_REMEDY}"
    wraps: Callable[[object], bool] = is_traceable_wrapper_subclass
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    for name, param in params:
        if dtensor is not None and isinstance(param, dtensor):
            if in_parts:
                continue
            return f"{name} is a DTensor, {_SHARDED}: {_REMEDY}"
        if wraps(param):
            return f"{name} is a {type(param).__name__}, which has no memory of its own: give ordinary tensors"
    return ""


def check_one_owner(model: nn.Module, params: Iterable[tuple[str, torch.Tensor]], in_parts: bool) -> None:
    """Raise ValueError if something else owns a module of ``model`` or one of ``params``. in_parts: see above.

    Raises: NotImplementedError for an adapter of a layer in parts that is not divided with it.
    """
    found = second_owner(model.named_modules(), params, in_parts)
    if found:
        raise ValueError(found)
    for name, layer in model.named_modules() if in_parts else ():
        base = getattr(layer, "base_layer", None)  # peft's name
        if isinstance(base, nn.Module) and any(hasattr(param, "placements") for param in base.parameters()):
            added = {key: each for key, each in layer.named_parameters() if not key.startswith("base_layer.")}
            if added and not any(hasattr(param, "placements") for param in added.values()):
                raise NotImplementedError(
                    f"{name}.{next(iter(added))} is an adapter of a layer in parts, and is not divided with it: let "
                    "transformers divide the model (DistributedConfig(tp_size=)) before peft adds adapters, or train "
                    "them without the axis 'tensor'"
                )
