"""DeepSpeed's names for parts of sequences: attention, losses, groups of an mpu, the adapter of loaders, tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import zcomm.compat.deepspeed as deepspeed
from zcomm.compat.deepspeed.runtime.sequence_parallel import parallel_state_sp, ulysses_sp
from zcomm.compat.deepspeed.sequence.cross_entropy import vocab_sequence_parallel_cross_entropy
from zcomm.compat.deepspeed.sequence.layer import DistributedAttention, _SeqAllToAll, apply_rotary_pos_emb
from zcomm.compat.deepspeed.utils import groups
from zcomm.parallel.heads import cut

Run = Callable[..., list[Any]]
TOKENS, BATCH, HEADS = 6, 2, 3


def flat_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return [s, b, h * d] of [s, b, h, d], as Megatron's attention does."""
    parts = [each.permute(1, 2, 0, 3) for each in (query, key, value)]
    return F.scaled_dot_product_attention(*parts, is_causal=True).permute(2, 0, 1, 3).flatten(2)


def attention_and_losses(group: Any, rank: int) -> None:
    generator = torch.Generator().manual_seed(2)
    whole = [torch.randn(TOKENS, BATCH, HEADS, 4, generator=generator).double().requires_grad_() for _ in range(3)]
    target = torch.randint(12, (TOKENS, BATCH), generator=generator)
    turns = [torch.randn(1, TOKENS, 1, 2, generator=generator).double() for _ in range(2)]
    cos, sin = (each.permute(1, 0, 2, 3) for each in turns)
    out = flat_attention(*(apply_rotary_pos_emb(each, cos, sin) for each in whole[:2]), whole[2])
    wanted = F.cross_entropy(out.flatten(0, 1), target.flatten(), reduction="none").view(TOKENS, BATCH)
    wanted.mean().backward()
    part = cut(TOKENS, 2)[rank]
    mine = [each.detach()[part].requires_grad_() for each in whole]
    own = DistributedAttention(flat_attention, group)(*mine, 1, turns)
    losses = vocab_sequence_parallel_cross_entropy(own, target[part], group)
    torch.testing.assert_close(losses, wanted, rtol=1e-12, atol=1e-12)
    losses.mean().backward()
    for one, other in zip(mine, whole, strict=True):
        assert one.grad is not None and other.grad is not None
        torch.testing.assert_close(one.grad, other.grad[part], rtol=1e-12, atol=1e-12)
    for tokens, batch in ((0, 1), (1, 0)):
        given = torch.arange(4.0 * 3 * 5).view(2, 2, 3, 5) + 100 * rank
        heads = _SeqAllToAll.apply(group, given, 2, tokens, batch)
        assert heads.shape[tokens] == 4 and heads.shape[2] == (2, 1)[rank]
        torch.testing.assert_close(_SeqAllToAll.apply(group, heads, tokens, 2, batch), given)


def gradients(rank: int) -> None:
    """Check that the mpu averages: each rank has the loss of the whole sequence."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    x = torch.arange(12.0).view(2, 6)
    for stage in (0, 2, 3):
        model = nn.Linear(6, 1, bias=False)
        nn.init.zeros_(model.weight)
        settings = {**config, "zero_optimization": {"stage": stage}}
        engine, *_ = deepspeed.initialize(model=model, config=settings, mpu=parallel_state_sp)
        assert (groups._get_sequence_parallel_world_size(), groups._get_data_parallel_world_size()) == (2, 1)
        assert groups._get_sequence_parallel_group() is parallel_state_sp.get_sequence_parallel_group()
        assert groups._get_sequence_parallel_rank() == rank and engine.train_batch_size() == 1
        assert engine.seq_parallel_group is groups._get_sequence_parallel_group() and engine.checkpoint_mp_rank == 0
        loss = engine(x[rank : rank + 1]).sum()
        both = torch.stack(dist.nn.functional.all_gather(loss, group=groups._get_sequence_parallel_group()))
        engine.backward(both.sum())
        engine.step()
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            torch.testing.assert_close(model.weight.detach(), -x.sum(0, keepdim=True))
        engine.destroy()


def adapted(group: Any, rank: int) -> None:
    ids = torch.arange(10).view(2, 1, 5) + 100 * rank
    batches = [{"input_ids": each, "labels": each, "number": 7 + rank} for each in ids]
    adapter = ulysses_sp.UlyssesSPDataLoaderAdapter(batches, rank, group, 2, "cpu")
    found = list(adapter)
    assert len(adapter) == len(found) == 4 and [each["number"] for each in found] == [7, 8, 7, 8]
    first, second = found[0], found[3]
    wanted = ([0, 1, 2], [1, 2, 3]) if rank == 0 else ([3, 4], [4, -100])
    assert (first["input_ids"][0].tolist(), first["shift_labels"][0].tolist()) == wanted and "labels" not in first
    assert second["input_ids"][0].tolist() == ([105, 106, 107], [108, 109])[rank]
    assert second["position_ids"][0].tolist() == ([0, 1, 2], [3, 4])[rank]
    assert next(adapter)["number"] == 7 and next(iter(adapter))["number"] == 7
    uneven = ulysses_sp.UlyssesSPDataLoaderAdapter(batches[: 1 + rank], rank, group, 2, "cpu")
    with pytest.raises(RuntimeError, match=r"the loaders of ranks \[0\] ended before other ranks' loaders"):
        list(uneven)


def two_ranks() -> None:
    deepspeed.init_distributed(timeout=60)
    rank = dist.get_rank()
    with pytest.raises(AssertionError, match="initialize_sequence_parallel"):
        parallel_state_sp.get_sequence_parallel_group()
    with pytest.raises(ValueError, match="greater than 1"):
        parallel_state_sp.initialize_sequence_parallel(1)
    with pytest.raises(RuntimeError, match="does not divide the 2 ranks"):
        parallel_state_sp.initialize_sequence_parallel(3)
    for _ in range(2):
        parallel_state_sp.initialize_sequence_parallel(2)
    group = parallel_state_sp.get_sequence_parallel_group()
    assert parallel_state_sp.get_model_parallel_rank() == parallel_state_sp.get_sequence_data_parallel_rank() == rank
    attention_and_losses(group, rank)
    adapted(group, rank)
    gradients(rank)
    dist.destroy_process_group()


def test_names_on_two_ranks(run_ranks: Run) -> None:
    run_ranks(two_ranks, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down = nn.Linear(4, 8).double(), nn.Linear(8, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.up(x).relu())
        return out


def loss_of(model: Mlp, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    losses = F.cross_entropy(model(x), y, reduction="none")
    return losses.mean() if mask is None else (losses * mask).sum()


def by_tiles(kind: str, model: Mlp, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if kind == "mlp":
        return ulysses_sp.TiledMLP.apply(Mlp.forward, model, x, 3, list(model.parameters())).square().sum()
    if kind == "any":
        return (
            ulysses_sp.sequence_tiled_compute(
                lambda x, self: self(x), 7, 3, {"x": x}, {"self": model}, "x", output_reduction=None
            )
            .square()
            .sum()
        )
    if kind == "function":
        arguments = (["x"], ["self"], "x", None, 1, "sum", x, model)
        return ulysses_sp.SequenceTiledCompute.apply(lambda x, self: self(x).square(), 7, 3, *arguments)
    mask = (y > 0).double() if kind == "mask" else None
    return ulysses_sp.TiledFusedLogitsLoss.apply(loss_of, model, x, y, mask, 4, None, "mean" if mask is None else "sum")


@pytest.mark.parametrize("kind", ["mlp", "any", "function", "loss", "mask"])
def test_tiles_are_the_whole(kind: str) -> None:
    y = torch.randint(4, (2, 7), generator=torch.Generator().manual_seed(1))
    gradients = []
    for tiles in (False, True):
        model = Mlp()
        x = torch.randn(2, 7, 4, generator=torch.Generator().manual_seed(0)).double().requires_grad_()
        if tiles:
            loss = by_tiles(kind, model, x, y)
        elif kind in ("loss", "mask"):
            loss = loss_of(model, x.flatten(0, 1), y.flatten(), (y > 0).double().flatten() if kind == "mask" else None)
        else:
            loss = model(x).square().sum()
        loss.backward()
        gradients.append([loss.detach(), x.grad, *(param.grad for param in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_wrong_tiles() -> None:
    x = torch.ones(1, 3, 4).double()
    with pytest.raises(ValueError, match="equal batch sizes and numbers of tokens"):
        ulysses_sp.TiledFusedLogitsLoss.apply(loss_of, Mlp(), x, torch.ones(1, 2).long(), None, 2)
    with pytest.raises(ValueError, match="unknown reduction 'max'"):
        ulysses_sp.TiledFusedLogitsLoss.apply(loss_of, Mlp(), x, torch.ones(1, 3).long(), None, 2, None, "max")
    with pytest.raises(ValueError, match="tiles=2 of tensors of sizes"):
        ulysses_sp.sequence_tiled_compute(max, 3, 2, {"x": x, "y": x[:, :2]}, {}, "x")
