"""Gradients of embeddings as rows: the bits of dense sums, fewer bytes, ranks that differ, refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.sparse_gradients import SparseGradients, SparseTensor, rows_of
from zero_jobs import digest

Run = Callable[..., list[Any]]
WORDS, WIDTH, STEPS = 150, 24, 4  # shards cut rows: 24 does not divide 64


class Words(nn.Module):
    """Two embeddings, a bag, and a layer tied to one of them."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.bag = nn.EmbeddingBag(37, WIDTH, mode="sum", sparse=sparse)
        self.tied = nn.Embedding(20, WIDTH)
        self.head = nn.Linear(WIDTH, 20)
        self.head.weight = self.tied.weight
        for param in self.parameters():
            param.data = torch.randn(param.shape, generator=generator) * 0.1

    def forward(self, words: torch.Tensor, unused: bool = False) -> torch.Tensor:
        x = self.tied(words % 20)
        if not unused:
            x = x + self.embed(words) + self.bag((words % 37).view(-1, 1)).view(x.shape)
        return self.head(x).logsumexp(-1).mean()


def config(sparse: bool, stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 3,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-2}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 2000},
        "sparse_gradients": sparse,
        **more,
    }


def train(stage: int, module_sparse: bool, key: bool, **more: Any) -> tuple[list[str], int]:
    """Return losses and weights, and the bytes of reduced gradients."""
    engine = zcomm.initialize(model=Words(module_sparse), config=config(key, stage, **more))[0]
    rank, losses = engine.global_rank, []
    for number in range(2 * STEPS):
        generator = torch.Generator().manual_seed(100 * number + rank)
        words = torch.randint(0, WORDS, (3, 4), generator=generator)
        unused = number == 3 and rank == 0  # this rank has no rows, the others have
        if number == 4:
            with engine.no_sync():
                engine.backward(engine(words))
        else:
            engine.backward(engine(words, unused))
        if number == 5:
            engine.module.embed.weight.grad.mul_(0.5)  # the program may change it
        engine.step()
        losses.append(engine._last_loss.item().hex())
    losses.append(digest(engine.optimizer.full_state_dict()))
    moved = _moved(engine)
    engine.destroy()
    return losses, moved


def _moved(engine: Any) -> int:
    from zcomm.zero.registry import parts_of

    return int(parts_of(engine.optimizer).reducer.accumulators.moved_nbytes)


def compare(stages: tuple[int, ...], **more: Any) -> list[Any]:
    torch.set_num_threads(1)
    found = [train(0, False, False, **more)]
    for stage in stages:
        found += [train(stage, sparse, True, **more) for sparse in (False, True)]
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_bits_of_dense_sums_in_fewer_bytes(run_ranks: Run, world_size: int) -> None:
    stages = (0, 1, 2) if world_size == 2 else (1,)
    for results in run_ranks(compare, world_size, stages):
        dense, *others = results
        assert len(set(dense[0])) == len(dense[0])
        for losses, moved in others:
            assert losses == dense[0]
            assert moved < dense[1]


def compare_bf16() -> list[Any]:
    return compare((2,), bf16={"enabled": True})


def test_in_bf16(run_ranks: Run) -> None:
    for dense, *others in run_ranks(compare_bf16, 2):
        assert all(losses == dense[0] and moved < dense[1] for losses, moved in others)


def faults() -> list[Any]:
    """Return a NaN's place by all ranks, and the errors of an option that ranks give differently."""
    comm, model = zcomm.init(), Words(True)
    opt = zcomm.ZeroOptimizer(model, stage=1, skip_nonfinite=True, sparse_gradients=SparseGradients(model))
    loss = model(torch.tensor([[5, 7]])) * (float("nan") if comm.rank == 1 else 1.0)
    opt.backward(loss)
    opt.step()
    found = [opt.skipped_steps, opt.nonfinite.parameter]
    opt.zero_grad()
    opt.close()
    model = Words(True)
    rows = SparseGradients(model, only=[model.embed] if comm.rank else None)
    with pytest.raises(ValueError, match=r"sparse_gradients is .*embed.weight.*, not .*bag.weight"):
        zcomm.ZeroOptimizer(model, stage=1, sparse_gradients=rows)
    return found


def test_nan_and_options_that_differ(run_ranks: Run) -> None:
    first, second = run_ranks(faults, 2)
    assert first == second == [1, "embed.weight"]


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"stage": 3}, "is not available: units gather"),
        ({"stage": 1, "zero_quantized_gradients": True}, "exactly"),
    ],
)
def test_refusals(world_of_one: None, more: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        zcomm.initialize(model=Words(True), config=config(True, 1) | {"zero_optimization": more})


def test_a_weight_that_was_replaced(world_of_one: None) -> None:
    model = Words(False)
    rows = SparseGradients(model)
    model.embed = nn.Embedding(*model.embed.weight.shape)
    with pytest.raises(ValueError, match=r"embed\.weight is no longer in the model"):
        zcomm.ZeroOptimizer(model, stage=1, sparse_gradients=rows)


def test_weights_that_are_chosen() -> None:
    model = Words(False)
    assert SparseGradients(model).names == ["embed.weight", "bag.weight"]  # the tied one is dense
    assert SparseGradients(nn.Embedding(3, 2)).names == ["weight"]
    with pytest.raises(ValueError, match="1 modules are given, of which 0 are embeddings"):
        SparseGradients(model, only=[model.tied])


def test_rows_of_a_gradient() -> None:
    dense = torch.tensor([[0.0, 0.0], [1.0, -1.0], [0.0, 0.0], [float("nan"), 0.0]])  # a row's sum may be 0
    rows, values = rows_of(dense)
    assert rows.tolist() == [1, 3] and torch.equal(values, dense[[1, 3]]) is False  # NaN
    coo = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), torch.ones(3, 2), (4, 2), check_invariants=True)
    rows, values = rows_of(coo)
    assert rows.tolist() == [1, 3] and values.tolist() == [[1, 1], [2, 2]]


def test_sparse_tensor() -> None:
    dense = torch.tensor([[0.0, 0.0], [1.0, -1.0], [2.0, 0.0]])
    sparse = SparseTensor(dense)
    assert torch.equal(sparse.to_dense(), dense) and torch.equal(sparse.to_coo_tensor().to_dense(), dense)
    assert sparse.sparse_size() == (6, 6) and sparse.type() == "deepspeed.SparseTensor"
    sparse.add(sparse)
    assert torch.equal(sparse.to_dense(), 2 * dense)
    with pytest.raises(ValueError, match="shape"):
        sparse.add(SparseTensor(torch.ones(1, 2)))
