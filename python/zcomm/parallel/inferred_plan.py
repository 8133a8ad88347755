"""A plan for tensor parallelism of a model that has none: by the names of the linear layers in its blocks.

Layers that widen (projections of queries, the first layer of an MLP) are divided by columns, layers behind them by
rows. A plan is made only if all linear layers in a block have known names. An unknown one could be a router or a fused
projection, and a division by halves would make it wrong without any error.
Attention modules that keep their number of heads get the number of this rank.
Source: the names of DeepSpeed's AutoTP (module_inject/auto_tp.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from zcomm.parallel.styles import is_transposed

_COLUMNS = set(
    "q_proj k_proj v_proj gate_proj up_proj fc1 wi wi_0 wi_1 w1 w3 lin1 linear1 dense_h_to_4h query key value q k v "
    "q_lin k_lin v_lin intermediate.dense".split()
)
_ROWS = set("o_proj out_proj down_proj fc2 wo w2 lin2 linear2 dense_4h_to_h out_lin o output.dense".split())
_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
    "all_head_size",
    "split_size",
)
_CONV_COLUMNS, _CONV_ROWS = ("c_fc", "q_attn"), ("c_proj",)  # of GPT-2 and its relatives; c_attn is fused


def inferred_plan(model: nn.Module) -> dict[str, str]:
    """Return a plan by names of modules. Raises: ValueError naming a linear layer that it does not know, or the model
    if no block has both kinds."""
    plan: dict[str, str] = {}
    for block, name, layer in _layers(model):
        style = _conv_style(model, name, layer) if is_transposed(layer) else _style(name)
        if not style:
            raise ValueError(
                f"{type(model).__name__} has no plan for tensor parallelism (model._tp_plan, "
                f"config.base_model_tp_plan), and none can be found for {name} ({type(layer).__name__} of {block}): "
                'give plan={"pattern of names": "colwise" or "rowwise"}'
            )
        plan[name] = style
    if not {"colwise", "rowwise"} <= set(plan.values()):
        raise ValueError(
            f"{type(model).__name__} has no plan for tensor parallelism (model._tp_plan, config.base_model_tp_plan), "
            'and no blocks of linear layers with known names: give plan={"pattern of names": "colwise" or "rowwise"}'
        )
    return plan


def divide_heads(model: nn.Module, plan: dict[str, str], size: int) -> None:
    """Divide the numbers of heads that attention modules of an inferred plan keep. Raises: ValueError."""
    owners = {name.rpartition(".")[0] for name, style in plan.items() if "colwise" in style}
    for owner in sorted(owners):
        module = model.get_submodule(owner)
        for key in _HEADS:
            heads = vars(module).get(key)
            if isinstance(heads, int) and heads % size:
                raise ValueError(f'{owner}.{key}={heads}, which the {size} ranks of the axis "tensor" do not divide')
            if isinstance(heads, int):
                setattr(module, key, heads // size)


def _style(name: str) -> str:
    ends = (".".join(name.split(".")[-2:]), name.rpartition(".")[2])
    return "colwise" if _COLUMNS.intersection(ends) else "rowwise" if _ROWS.intersection(ends) else ""


def _conv_style(model: nn.Module, name: str, layer: nn.Module) -> str:
    """Return the style of transformers' Conv1D. A fused one has blocks of the size at which its owner splits them."""
    owner, _, last = name.rpartition(".")
    if last != "c_attn":
        return "colwise" if last in _CONV_COLUMNS else "rowwise" if last in _CONV_ROWS else ""
    blocks, rest = divmod(int(getattr(layer, "nf", 0)), int(getattr(model.get_submodule(owner), "split_size", 0)) or 1)
    return f"packed_colwise:{blocks}" if blocks in (2, 3) and not rest else ""


def _layers(model: nn.Module) -> Iterator[tuple[str, str, nn.Module]]:
    """Yield the layers with a matrix in blocks, which are members of a ModuleList: block, name and module."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name, module in model.named_modules():
        inside = [each for each in lists if name.startswith(f"{each}.")]
        weight = module._parameters.get("weight")
        if inside and weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding):
            yield ".".join(name[len(inside[0]) + 1 :].split(".")[:1]), name, module
