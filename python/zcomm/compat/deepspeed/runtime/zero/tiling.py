"""``TiledLinear``: a linear layer of several ``torch.nn.Linear``, each of which stage 3 gathers by itself.

zcomm gathers the rows of a large torch.nn.Linear in blocks without it (``Units(max_bytes=)``); this class is for
programs that build it. Numbers are those of one layer to rounding: parts along the input are added up.
Source: DeepSpeed's arguments, and its names of parameters (``linears.ROW.COLUMN.weight``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from zcomm.compat.deepspeed.runtime.utils import partition_uniform
from zcomm.zero import GatheredParameters

__all__ = ["TiledLinear", "TiledLinearReturnBias"]


class TiledLinear(nn.Module):
    """A linear layer in ``out_splits`` x ``in_splits`` tiles; the larger parts come first.

    bias: in the last tile of each row. input_is_already_split: forward takes a sequence of ``in_splits`` parts.
    combine_out_splits: False returns a list of ``out_splits`` parts. linear_cls: the class of a tile, called with
    (in, out, bias=) and the other keyword arguments. init_linear: see ``copy_params_from``.
    Raises: RuntimeError for more parts than features, or fewer than one.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, parts, most in (("in_splits", in_splits, in_features), ("out_splits", out_splits, out_features)):
            if not 1 <= parts <= most:
                raise RuntimeError(f"TiledLinear: {name}={parts} must be from 1 to the {most} features")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and number == in_splits - 1, **kwargs)
                for number, columns in enumerate(_sizes(self.in_parts))
            )
            for rows in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return [..., out_features], or a list of parts. Raises: ValueError for another number of parts."""
        inputs: Sequence[Any] = [input_]
        if self.input_is_already_split:
            inputs = input_ if self.in_splits > 1 or isinstance(input_, (list, tuple)) else [input_]
            if len(inputs) != self.in_splits:
                raise ValueError(f"TiledLinear: {len(inputs)} parts of the input, and in_splits={self.in_splits}")
        elif self.in_splits > 1:
            inputs = self._split_global_input(input_, _sizes(self.in_parts))
        outputs = []
        for out_id, row in enumerate(self.linears):
            total: Any = None
            for in_id, (linear, part) in enumerate(zip(row, inputs, strict=True)):  # type: ignore[call-overload]
                total = self._reduce_local_output(in_id=in_id, out_id=out_id, current_out=total, new_out=linear(part))
            outputs.append(total)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Sequence[Any]:
        """Return the parts of the input. Subclasses of programs may replace it, and the two below."""
        parts: Sequence[Any] = input.split(split_sizes, dim=-1)
        return parts

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Add the output of a tile to the sum of the ones before it in its row (None: it is the first)."""
        return new_out if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        """Join the rows' outputs."""
        return torch.cat(outputs, dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy weight and bias of a layer of the same size. Collective if an optimizer has sharded this one.

        Raises: ValueError for another shape, or a bias on one side only.
        """
        if tuple(other.weight.shape) != (self.out_features, self.in_features) or (other.bias is not None) != bool(
            self.use_bias
        ):
            raise ValueError(
                f"TiledLinear.copy_params_from: a weight of {tuple(other.weight.shape)} with bias "
                f"{other.bias is not None}; expected {(self.out_features, self.in_features)} and {bool(self.use_bias)}"
            )
        for number, tiles in enumerate(self.linears):
            rows = slice(self.out_parts[number], self.out_parts[number + 1])
            tile: Any
            for column, tile in enumerate(tiles):  # type: ignore[arg-type]
                columns = slice(self.in_parts[column], self.in_parts[column + 1])
                held = [tile.weight] if tile.bias is None else [tile.weight, tile.bias]
                with GatheredParameters(held, modifier_rank=0):
                    tile.weight.copy_(other.weight[rows, columns])
                    if tile.bias is not None:
                        tile.bias.copy_(other.bias[rows])


class TiledLinearReturnBias(TiledLinear):
    """``TiledLinear`` of a class that returns (output, bias), as Megatron-LM's do; it returns such a pair, too."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        total, bias = (None, None) if current_out is None else current_out
        output, own = new_out
        total = super()._reduce_local_output(in_id=in_id, out_id=out_id, current_out=total, new_out=output)
        return total, bias if own is None else own

    def _combine_output_splits(self, outputs: list[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        whole = super()._combine_output_splits([output for output, _ in outputs])
        return whole, super()._combine_output_splits(biases) if biases else None


def _sizes(bounds: list[int]) -> list[int]:
    return [after - before for before, after in itertools.pairwise(bounds)]
