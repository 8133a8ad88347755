"""``deepspeed.runtime.sequence_parallel.ulysses_sp``: sequence parallelism as Accelerate and Trainer call it."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from zcomm.compat.deepspeed.runtime.sequence_parallel import parallel_state_sp
from zcomm.parallel.attention import RegisteredAttention
from zcomm.parallel.heads import SequenceRanks, cut
from zcomm.parallel.sequence import IGNORED, check_layers, part_of
from zcomm.parallel.tiled import reduced, tiled


class UlyssesSPAttentionHF(RegisteredAttention):
    """An attention function of transformers over parts of a sequence. Each call has its own shapes."""

    def __init__(
        self,
        attn: Callable[..., Any],
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: Any,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        super().__init__(attn, getattr(attn, "__name__", "attn"), SequenceRanks(process_group), disable_in_eval)

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> Any:
        """Put an attention over parts in the place of ``core_attn_implementation`` in transformers. Collective.

        model_name_or_path: a model, an object with its ``config``, or a name or path. All models of the process with
        this attention are called with parts then. disable_in_eval: not in eval(). Lengths and batch sizes may vary.
        Returns: the mpu for ``deepspeed.initialize``; None for a size of 1. Raises: ValueError.
        """
        if sequence_parallel_size == 1:
            return None
        if not seq_length_is_variable and seq_length is None and max_length is None:
            raise ValueError("seq_length_is_variable=False needs seq_length=")
        from transformers import AutoConfig
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        core = core_attn_implementation
        config = getattr(model_name_or_path, "config", None)
        if config is None:
            config = AutoConfig.from_pretrained(model_name_or_path)
        used = getattr(config, "_attn_implementation", None)
        if used is not None and used != core:
            raise ValueError(
                f"core_attn_implementation={core!r} does not match model config attn_implementation={used!r}: give the "
                "same to both"
            )
        check_layers(types.SimpleNamespace(config=config))
        if core.count("/") == 1:  # a kernel of the hub, which transformers registers when it is asked for
            from transformers.modeling_flash_attention_utils import lazy_import_flash_attention

            lazy_import_flash_attention(core)
        if core not in ALL_ATTENTION_FUNCTIONS and core != "eager":
            raise ValueError(f"{core} is not a valid attn_implementation: {ALL_ATTENTION_FUNCTIONS.valid_keys()}")
        function: Any = ALL_ATTENTION_FUNCTIONS.get(core)
        if isinstance(function, RegisteredAttention):
            function = function.core  # registered again
        parallel_state_sp.initialize_sequence_parallel(sequence_parallel_size)
        ranks = SequenceRanks(parallel_state_sp.get_sequence_parallel_group())
        ALL_ATTENTION_FUNCTIONS[core] = RegisteredAttention(function, core, ranks, disable_in_eval)
        return parallel_state_sp


class UlyssesSPDataLoaderAdapter:
    """A loader of parts: the ranks of a sequence divide the batch of the first of them, then of the second, and so on.

    dl: this rank's loader of batches, dicts with tensors of [batch, tokens]. ``position_ids`` are added if they are
    missing; ``labels`` become ``shift_labels``. Iteration is collective over ``sp_group``.
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        self.dl, self.sp_rank, self.sp_group, self.sp_world_size = dl, sp_rank, sp_group, sp_world_size
        self.device = device
        self._parts: Iterator[dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)  # sampler, set_epoch and so on

    def __len__(self) -> int:
        return len(self.dl) * self.sp_world_size

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self.dl)
        while True:
            found: list[Any] = [None] * self.sp_world_size
            dist.all_gather_object(found, _whole(next(batches, None)), group=self.sp_group)
            ended = [rank for rank, batch in enumerate(found) if batch is None]
            if len(ended) == len(found):
                return
            if ended:
                raise RuntimeError(
                    f"UlyssesSPDataLoaderAdapter: the loaders of ranks {ended} ended before other ranks' loaders: "
                    "give each rank as many batches"
                )
            for batch in found:
                tokens = batch["input_ids"].shape[1]
                if tokens < self.sp_world_size:
                    raise ValueError(f"{tokens} tokens cannot be divided among {self.sp_world_size} ranks")
                part = cut(tokens, self.sp_world_size)[self.sp_rank]
                yield {name: part_of(name, value, part, tokens) for name, value in batch.items()}

    def __next__(self) -> dict[str, Any]:
        self._parts = self._parts or iter(self)
        try:
            return next(self._parts)
        except StopIteration:
            self._parts = None
            raise


def _whole(batch: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a batch in host memory with positions and labels of the next tokens."""
    if batch is None:
        return None
    found = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    if found.get("position_ids") is None:
        rows, tokens = found["input_ids"].shape[:2]
        found["position_ids"] = torch.arange(tokens).expand(rows, -1).contiguous()
    if (labels := found.pop("labels", None)) is not None:
        found["shift_labels"] = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)
    return found


def sequence_tiled_compute(
    fn: Callable[..., torch.Tensor],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, torch.Tensor],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Any = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> torch.Tensor:
    """Return ``fn`` of tiles along dimension 1, joined along ``output_unshard_dimension`` or reduced.

    kwargs_to_shard: tensors of [batch, tokens, ...]. output_unshard_dimension: 0 stacks scalars, such as losses.
    output_reduction: None, "mean" (weighted by the tiles' tokens) or "sum". compute_params has no effect: a parameter
    of several tiles gets one gradient.
    """
    outs = tiled(fn, kwargs_to_shard, shards, 1, **kwargs_to_pass)
    if output_unshard_dimension == 0:
        if output_reduction is not None:
            return reduced(outs, output_reduction)
        return torch.stack([out for out, _ in outs])
    joined = torch.cat([out for out, _ in outs], output_unshard_dimension)
    return joined if output_reduction is None else joined.mean() if output_reduction == "mean" else joined.sum()


class SequenceTiledCompute:
    """DeepSpeed's autograd function by its call; see ``sequence_tiled_compute``."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Any,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> torch.Tensor:
        cut_args, passed = args[: len(keys_to_shard)], args[len(keys_to_shard) :]
        return sequence_tiled_compute(
            fn,
            seqlen,
            shards,
            dict(zip(keys_to_shard, cut_args, strict=True)),
            dict(zip(keys_to_pass, passed, strict=True)),
            grad_requiring_tensor_key,
            compute_params,
            output_unshard_dimension,
            output_reduction,
        )


class TiledMLP:
    """``fn(self, x)`` in tiles of tokens."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor], self: Any, x: torch.Tensor, shards: int, compute_params: Any = None
    ) -> torch.Tensor:
        """Return the results for x of [..., tokens, size], joined. Memory between: one tile."""
        outs = tiled(lambda x: fn(self, x), {"x": x}, shards, -2)
        return torch.cat([out for out, _ in outs], -2)


class TiledFusedLogitsLoss:
    """The loss ``fn(self, x, y)`` in tiles of tokens, so that logits of one tile exist."""

    @staticmethod
    def apply(
        fn: Callable[..., torch.Tensor],
        self: Any,
        x: torch.Tensor,
        y: torch.Tensor,
        mask: torch.Tensor | None,
        shards: int,
        compute_params: Any = None,
        output_reduction: str = "mean",
    ) -> torch.Tensor:
        """Return the "sum" or the "mean" of the tiles' losses. x: [batch, tokens, size]; y, mask: [batch, tokens].

        Each tile is of flat tokens. mask: passed as a third argument unless it is None.
        """
        if x.shape[:2] != y.shape[:2] or (mask is not None and mask.shape != x.shape[:2]):
            raise ValueError("x, y and mask need equal batch sizes and numbers of tokens")
        given = {"x": x, "y": y} | ({} if mask is None else {"mask": mask})
        flat = {name: tensor.flatten(0, 1) for name, tensor in given.items()}
        return reduced(tiled(lambda **tile: fn(self, *tile.values()), flat, shards, 0), output_reduction)
