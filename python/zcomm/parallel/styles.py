"""Styles of a plan: the words of Hugging Face's plans, the dimension that each divides, and the module's new forward.

torch's ColwiseParallel and RowwiseParallel serve nn.Linear and nn.Embedding. Other modules run on their rank's parts
([Note: on parts]): fused projections, transformers' Conv1D, and modules with parameters of their own, such as experts.
[Note: on parts] In forward such a module has this rank's parts in place of its DTensors. A sum in forward has the
identity as its gradient, and an input that all ranks share gets the sum of the ranks' gradients.
[Note: packed] A fused weight has N blocks along a dimension, such as gate and up. Each rank has its part of each block.
torch's name for that is _StridedShard.
Thread rule: the main thread, and autograd's in backward; all ranks of the axis run the same modules in the same order.
Source: Megatron-LM (arXiv:1909.08053), section 3; the words come from transformers.distributed.tensor_parallel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrize

from zcomm.zero.layout.cut import Cut

REPLICATE = "replicate"  # the module stays as it is
SUMMED = "replicated_with_grad_allreduce"
_EXPERTS, _REDUCED, _LOCAL = "moe_tp_experts", "all_reduce", "local_params"
_IDENTITY, _LATENT = "moe_identity_expert", "mla_kv_a_proj"
OWNERS = (_EXPERTS, _REDUCED, _LOCAL)  # of modules that run on parts of their own parameters
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep", "embedding_colwise", "packed_colwise")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep", "embedding_rowwise", "packed_rowwise")
WHOLE = (
    "colwise_gather_output",
    "colwise_rep",
    "embedding_rowwise",
    "embedding_colwise",
)  # inputs and outputs are whole
STYLES = (*_COLUMNS, *_ROWS, *OWNERS, _IDENTITY, _LATENT, REPLICATE, SUMMED)
REFUSED = {
    "sequence_parallel": 'norms over parts of the sequence: leave it out, or use mesh= with the axis "sequence"',
    "ep_dispatch_experts": "experts of several ranks: use zcomm.parallel.divide_experts",
    "grouped_gemm": "experts of several ranks: use zcomm.parallel.divide_experts",
}
Division = tuple[int, int]  # dimension, and blocks of it that are divided one by one


def word_of(style: Any) -> str:
    """Return a style's word, without its number of blocks."""
    return style.partition(":")[0] if isinstance(style, str) else type(style).__name__


def check_style(style: Any, pattern: str, name: str) -> None:
    """Raise NotImplementedError for a style that is not served, ValueError for a number of blocks that is none."""
    if not isinstance(style, str):
        return
    if (word := word_of(style)) not in STYLES:
        why = f" ({REFUSED[word]})" if word in REFUSED else ""
        raise NotImplementedError(
            f"plan: the style {style!r} of {pattern!r} ({name}) is not available{why}, known are "
            f"{', '.join(STYLES)}: give plan= without it"
        )
    if word != style and (not word.startswith("packed_") or not re.fullmatch(r":[1-9]\d*", style[len(word) :])):
        raise ValueError(f'plan: the style {style!r} of {pattern!r} is no style with a number of blocks: "{word}:3"')


def is_transposed(module: nn.Module) -> bool:
    """Return True for transformers' Conv1D: a linear layer with the weight [inputs, outputs]."""
    weight = module._parameters.get("weight")
    return type(module).__name__ == "Conv1D" and weight is not None and getattr(module, "nf", 0) == weight.shape[1]


def division(module: nn.Module, key: str, style: Any) -> Division | None:
    """Return the division of a module's parameter ``key`` by the module's style; None: it stays whole."""
    word = word_of(style).lower()
    columns = word.startswith(("colwise", "embedding_colwise", "packed_colwise"))
    if not columns and not word.startswith(("rowwise", "embedding_rowwise")):
        return None
    if isinstance(module, nn.Embedding):
        return (1 if columns else 0), 1
    if key != "weight":
        return (0, _blocks(style)) if columns else None
    return int(columns == is_transposed(module)), _blocks(style)


def division_of_bare(param: torch.Tensor, style: str) -> Division | None:
    """Return the division of a parameter that the plan names itself: [..., outputs, inputs]. None: it stays whole."""
    word = word_of(style)
    if word in _COLUMNS:
        return max(0, param.dim() - 2), _blocks(style)
    return (param.dim() - 1, _blocks(style)) if word in _ROWS else None


def _blocks(style: Any) -> int:
    if not isinstance(style, str) or not style.startswith("packed_"):
        return 1
    return int(style.partition(":")[2] or 2)


def check_module(name: str, module: nn.Module, style: Any, config: Any) -> None:
    """Raise NotImplementedError for a style that ``module`` cannot have, ValueError for one that needs ``config``."""
    if parametrize.is_parametrized(module):
        raise NotImplementedError(
            f"plan: {name} has parametrizations (torch.nn.utils.parametrize), which need the whole weight: give "
            "plan= without it"
        )
    word = word_of(style)
    if word == _LATENT and not hasattr(config, "qk_rope_head_dim"):
        raise ValueError(f"plan: the style {style!r} of {name} needs model.config.qk_rope_head_dim")
    if not isinstance(style, str) or word not in (*_COLUMNS, *_ROWS):
        return
    packed, plain = word.startswith("packed_"), word in ("colwise", "rowwise", "packed_colwise")
    served = isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and not packed)
    if word == "packed_rowwise" or not (served or (plain and is_transposed(module))):
        raise NotImplementedError(
            f"plan: the style {style!r} is not available for {name} ({type(module).__name__}): give plan= without it"
        )


def part_out(module: nn.Module, key: str, at: Any, where: Division) -> None:
    """Replace a whole parameter by a DTensor with the first rank's values. Collective over the axis."""
    from torch.distributed.tensor import DTensor, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    param, (dim, packed) = module._parameters[key], where
    assert param is not None
    whole = param.detach().contiguous()
    dist.broadcast(whole, src=dist.get_global_rank(at.get_group(), 0), group=at.get_group())
    part = Cut(whole.shape, dim, at.get_local_rank(), at.size(), packed).part_of(whole).contiguous().clone()
    place: Any = Shard(dim) if packed == 1 else _StridedShard(dim, split_factor=packed)
    made = DTensor.from_local(part, at, [place], run_check=False, shape=whole.shape, stride=whole.stride())
    module.register_parameter(key, nn.Parameter(made, requires_grad=param.requires_grad))


def as_style(style: Any, module: nn.Module, config: Any) -> Any:
    """Return torch's ParallelStyle for a style of ``module``. config: of the model, for styles that need its sizes."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    if not isinstance(style, str):
        return style
    word = word_of(style)
    if word == SUMMED:
        return _style(lambda each, at: _on_parts(each, at, inputs=False, output=False))
    if word == _IDENTITY:
        return _style(lambda each, at: each.register_forward_pre_hook(lambda _, args: (args[0] / at.size(), *args[1:])))
    if word == _LATENT:
        return _style(lambda each, at: _sum_rotary(each, at, config.qk_rope_head_dim))
    if word in OWNERS:
        return _style(lambda each, at: _on_parts(each, at, inputs=word != _LOCAL, output=word != _LOCAL))
    if word.startswith("packed_") or is_transposed(module):
        return _style(lambda each, at: _linear_on_parts(each, at, style))
    if style in ("colwise", "rowwise"):
        return ColwiseParallel() if style == "colwise" else RowwiseParallel()
    columns = "colwise" in style
    return ColwiseParallel(output_layouts=Replicate()) if columns else RowwiseParallel(input_layouts=Replicate())


def _style(apply: Callable[[nn.Module, Any], object]) -> Any:
    """Return a ParallelStyle that calls ``apply`` with module and mesh."""
    from torch.distributed.tensor.parallel.style import ParallelStyle

    class Style(ParallelStyle):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            apply(module, device_mesh)
            return module

    return Style()


def _sum_rotary(module: nn.Module, at: Any, size: int) -> None:
    """Sum gradients of the last ``size`` outputs, the rotary part of keys, which each rank uses for its own heads."""

    def hook(_: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        latent, rotary = out.split([out.shape[-1] - size, size], -1)
        return torch.cat([latent, _shared(rotary, at.get_group())], -1)

    module.register_forward_hook(hook)


def _linear_on_parts(module: nn.Module, at: Any, style: str) -> None:
    for key, param in list(module._parameters.items()):
        if param is not None and (where := division(module, key, style)) is not None:
            part_out(module, key, at, where)
    columns = word_of(style) in _COLUMNS
    if columns and is_transposed(module):
        module.nf: Any = module.nf // at.size()  # type: ignore[misc]
    _on_parts(module, at, inputs=columns, output=not columns)


def _on_parts(module: nn.Module, at: Any, *, inputs: bool, output: bool) -> None:
    """Let a module run on its parts ([Note: on parts]). inputs: all ranks share them. output: the sum of the ranks'.

    Whole parameters are shared inputs, too. But a whole bias of a summed output is added once, after the sum.
    """
    group = at.get_group()
    running: list[tuple[nn.Module, dict[str, Any]]] = []  # modules in forward, with their DTensors

    def begin(own: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        taken = {key: param for key, param in own._parameters.items() if param is not None}
        running.append((own, taken))
        for key, param in taken.items():
            if hasattr(param, "placements"):
                own._parameters[key] = cast(Any, param).to_local()
            else:
                own._parameters[key] = cast(Any, torch.zeros_like(param) if output else _shared(param, group))
        if not inputs:
            return None
        return tuple(_shared(each, group) for each in args), {key: _shared(each, group) for key, each in kwargs.items()}

    def end(own: nn.Module, args: Any, out: Any) -> Any:
        if not running or running[-1][0] is not own:
            return None  # another hook has raised before begin()
        taken = running.pop()[1]
        own._parameters.update(taken)
        if not output or not isinstance(out, torch.Tensor):
            return None
        bias = next((param for param in taken.values() if not hasattr(param, "placements")), None)
        summed: torch.Tensor = _Sum.apply(out, group)  # type: ignore[no-untyped-call]
        return summed if bias is None else summed + bias

    module.register_forward_pre_hook(begin, with_kwargs=True)
    module.register_forward_hook(end, always_call=True)


def check_owner(name: str, module: nn.Module, style: str, divided: Mapping[str, Any]) -> None:
    """Raise ValueError for a module with summed outputs that has whole parameters, or none."""
    if style not in (_EXPERTS, _REDUCED):
        return
    own = [key for key, _ in module.named_parameters(recurse=False)]
    whole = [key for key in own if f"{name}.{key}" not in divided]
    why = f"{whole[0]} stays whole" if whole else "it has no parameters of its own"
    if len(own) < len(list(module.parameters())):
        why = "its children have parameters"
    elif own and not whole:
        return
    raise ValueError(
        f"plan: {name} has the style {style!r}, but {why}: its output is the sum of all ranks' outputs, so the plan "
        "divides all of its parameters"
    )


def _sum(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _shared(given: Any, group: Any) -> Any:
    """Return an input of all ranks: its gradient is the sum of all ranks'. Other values are returned as they are."""
    if isinstance(given, torch.Tensor) and given.requires_grad and torch.is_grad_enabled():
        return _Shared.apply(given, group)  # type: ignore[no-untyped-call]
    return given


class _Shared(torch.autograd.Function):
    """The identity; its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return given.view_as(given)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(grad, ctx.group), None


class _Sum(torch.autograd.Function):
    """The sum of the ranks' tensors; its gradient is the same on all ranks."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, group: Any) -> torch.Tensor:
        return _sum(given, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
