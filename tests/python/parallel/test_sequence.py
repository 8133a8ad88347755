"""Ulysses: attention over parts of a sequence equals attention over all of it; training on parts, as on one rank."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import zcomm
from tiers import slow
from zcomm.parallel import mean_over_sequence, split_sequence, ulysses
from zcomm.parallel.heads import cut, deal, shared_keys

Run = Callable[..., list[Any]]
TOKENS, WORDS, HEADS, STEPS = 11, 13, 5, 20
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.7,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
}


@pytest.mark.parametrize("queries", range(1, 13))
def test_heads_are_dealt_once_and_with_their_keys(queries: int) -> None:
    for keys in (each for each in range(1, queries + 1) if queries % each == 0):
        group = queries // keys
        for ranks in range(1, queries + 1):
            own, theirs = deal(queries, keys, ranks)
            assert [head for each in own for head in range(queries)[each]] == list(range(queries))
            for mine, key in zip(own, theirs, strict=True):
                local = list(range(keys)[key])
                wanted = [head // group for head in range(queries)[mine]]
                of = shared_keys(mine, key, group)
                each = len(wanted) // len(local)
                assert [local[index] for index in of or [place // each for place in range(len(wanted))]] == wanted


def test_refused_heads() -> None:
    with pytest.raises(ValueError, match="3 attention heads cannot be divided among 4 ranks; use sequence=3 at most"):
        deal(3, 3, 4)
    with pytest.raises(ValueError, match="5 query heads are not a multiple of 2 key heads"):
        deal(5, 2, 2)


def attentions() -> float:
    """Return the largest difference of outputs and gradients to attention over whole sequences, in float64."""
    mesh = zcomm.ProcessMesh(zcomm.init(timeout=60), sequence=zcomm.world_size())
    attention, worst = ulysses(F.scaled_dot_product_attention, mesh), 0.0
    for queries, keys, tokens, batch in ((4, 4, 7, 2), (5, 5, 9, 1), (6, 2, 8, 2), (6, 1, 11, 2), (4, 2, 5, 3)):
        generator = torch.Generator().manual_seed(tokens)
        shapes = [(batch, heads, tokens, size) for heads, size in ((queries, 8), (keys, 8), (keys, 6), (queries, 6))]
        *given, weight = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        part = cut(tokens, zcomm.world_size())[zcomm.rank()]
        whole = [tensor.clone().requires_grad_() for tensor in given]
        mine = [tensor[:, :, part].clone().requires_grad_() for tensor in given]
        wanted = F.scaled_dot_product_attention(*whole, is_causal=True, enable_gqa=True)
        (wanted * weight).sum().backward()
        out = attention(*mine, is_causal=True, enable_gqa=True)
        (out * weight[:, :, part]).sum().backward()
        pairs = [(out, wanted[:, :, part])]
        for one, other in zip(mine, whole, strict=True):
            assert one.grad is not None and other.grad is not None
            pairs.append((one.grad, other.grad[:, :, part]))
        worst = max(worst, *(float((one - other).abs().max()) for one, other in pairs))
    return worst


@pytest.mark.parametrize("ranks", [2, 3, slow(4)])
def test_attention_over_parts_is_attention_over_the_whole(run_ranks: Run, ranks: int) -> None:
    assert max(run_ranks(attentions, ranks)) < 1e-14


class Net(nn.Module):
    """Two blocks of causal attention with 5 heads, and a loss of labels that are -100 in parts."""

    def __init__(self, mesh: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words, self.places = nn.Embedding(WORDS, HEADS * 4), nn.Embedding(TOKENS, HEADS * 4)
        self.mixes = nn.ModuleList(nn.Linear(HEADS * 4, HEADS * 12, bias=False) for _ in range(2))
        self.ends = nn.ModuleList(nn.Linear(HEADS * 4, HEADS * 4) for _ in range(2))
        self.mesh = mesh
        self.attention = (
            F.scaled_dot_product_attention if mesh is None else ulysses(F.scaled_dot_product_attention, mesh)
        )

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor, **_: Any) -> Any:
        x = self.words(input_ids) + self.places(position_ids)
        for mix, end in zip(self.mixes, self.ends, strict=True):
            query, key, value = mix(x).unflatten(-1, (3, HEADS, 4)).permute(2, 0, 3, 1, 4)
            out = self.attention(query, key, value, is_causal=True)
            x = x + end(out.transpose(1, 2).flatten(2)).tanh()
        logits = x @ self.words.weight.T
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        count = (labels != -100).sum()
        return total / count if self.mesh is None else mean_over_sequence(total, count, self.mesh)


def batches(seed: int, data: int) -> list[dict[str, torch.Tensor]]:
    """Return a micro-batch for each data rank: 2 samples each, with equally many labels on each data rank."""
    words = torch.randint(WORDS, (data, 2, TOKENS), generator=torch.Generator().manual_seed(seed))
    labels = words.clone()
    labels[:, 0, : 3 + seed % 5] = -100
    labels[:, 1, -2:] = -100
    return [{"input_ids": own, "labels": each} for own, each in zip(words, labels, strict=True)]


def on_one_rank(dtype: torch.dtype, data: int) -> tuple[list[float], list[float], torch.Tensor]:
    """Return losses, norms and weights of training on whole sequences by torch."""
    model = Net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    losses, norms = [], []
    for step in range(STEPS):
        for micro in range(2):
            for batch in batches(2 * step + micro, data):
                given = {**batch, "position_ids": torch.arange(TOKENS).expand(2, -1)}
                given["labels"] = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
                loss = model(**given)
                losses.append(loss.item())
                (loss / 2 / data).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.7).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, torch.cat([param.detach().flatten() for param in model.parameters()])


def on_parts(sizes: dict[str, int], stages: list[int]) -> Any:
    """Return the same by the engine, for each stage, and in float64 by torch's optimizer and sums of gradients."""
    zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(**sizes)
    own = mesh.ranks("data").index(zcomm.rank()) if "data" in sizes else 0
    data = sizes.get("data", 1)
    found = {}
    for stage in stages:
        model = Net(mesh)
        config = {**CONFIG, "zero_optimization": {"stage": stage}}
        engine, *_ = zcomm.initialize(model=model, config=config, mesh=mesh)
        losses, norms = [], []
        for step in range(2 * STEPS):
            loss = engine(**split_sequence(batches(step, data)[own], mesh))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            if step % 2:
                norms.append(engine.get_global_grad_norm())
        with zcomm.zero.GatheredParameters(list(model.parameters())):
            weights = torch.cat([param.detach().flatten() for param in model.parameters()]).clone()
        engine.destroy()
        found[stage] = losses, norms, weights
    model = Net(mesh).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    losses, norms = [], []
    for step in range(2 * STEPS):
        loss = model(**split_sequence(batches(step, data)[own], mesh))
        losses.append(loss.item())
        (loss / 2 / data).backward()
        if step % 2:
            zcomm.all_reduce([param.grad for param in model.parameters() if param.grad is not None])
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.7).item())
            optimizer.step()
            optimizer.zero_grad()
    found["float64"] = losses, norms, torch.cat([param.detach().flatten() for param in model.parameters()])
    return own, found


@pytest.mark.parametrize(
    ("sizes", "stages"),
    [({"sequence": 2}, [0, 1, 2, 3]), ({"sequence": 3}, [2]), slow({"data": 2, "sequence": 2}, [0, 1, 2, 3])],
)
def test_training_on_parts_is_training_on_one_rank(run_ranks: Run, sizes: dict[str, int], stages: list[int]) -> None:
    data = sizes.get("data", 1)
    wanted = {dtype: on_one_rank(dtype, data) for dtype in (torch.float32, torch.float64)}
    for own, found in run_ranks(on_parts, data * sizes["sequence"], sizes, stages):
        for stage, (losses, norms, weights) in found.items():
            exact = stage == "float64"
            rel = 1e-9 if exact else 1e-5
            all_losses, all_norms, all_weights = wanted[torch.float64 if exact else torch.float32]
            assert losses == pytest.approx(all_losses[own::data], rel=rel), stage
            assert norms == pytest.approx(all_norms, rel=rel), stage
            torch.testing.assert_close(weights, all_weights, rtol=rel, atol=rel)


def parts_that_differ() -> list[str]:
    zcomm.init(timeout=60)
    mesh, rank = zcomm.ProcessMesh(sequence=2), zcomm.rank()
    attention, said = ulysses(F.scaled_dot_product_attention, mesh), []
    batch = {"input_ids": torch.arange(8).view(1, 8)}
    calls: list[Callable[[], Any]] = [
        lambda: split_sequence({"input_ids": batch["input_ids"] + rank}, mesh),
        lambda: split_sequence({"input_ids": batch["input_ids"][:, :1]}, mesh),
        lambda: split_sequence({**batch, "pixels": torch.ones(1, 3)}, mesh),
        lambda: attention(*[torch.ones(1 + rank, 4, 3, 2)] * 3),
        lambda: attention(*[torch.ones(1, 4 + rank, 3, 2)] * 3),
        lambda: attention(torch.ones(1, 4, 3, 2), *[torch.ones(1, 4, 4 + rank, 2)] * 2),
        lambda: attention(*[torch.ones(1, 1, 3, 2)] * 3),
        lambda: split_sequence({}, mesh),
        lambda: ulysses(F.scaled_dot_product_attention, zcomm.ProcessMesh(data=2)),
    ]
    for call in calls:
        with pytest.raises(ValueError) as error:
            call()
        said.append(str(error.value))
    whole = split_sequence({**batch, "name": "x"}, mesh)
    assert whole["name"] == "x" and whole["position_ids"].tolist() == [[4 * rank + place for place in range(4)]]
    return said


def test_parts_that_differ_are_named_on_all_ranks(run_ranks: Run) -> None:
    words = [
        "rank 1 of the sequence has another batch than rank 0",
        "1 tokens cannot be divided among 2 ranks",
        "pixels of shape (1, 3) has no dimension of 8 tokens",
        "rank 0 of the sequence has batch 1, 4 query and 4 key heads, but rank 1 has batch 2",
        "but rank 1 has batch 1, 5 query and 5 key heads",
        "rank 0 of the sequence: query and key have different lengths",
        "1 attention heads cannot be divided among 2 ranks",
        "the batch has no tensor",
        "axis='sequence' is not one of data",
    ]
    for said in run_ranks(parts_that_differ, 2):
        for text, word in zip(said, words, strict=True):
            assert word in text


def one_dies() -> None:
    zcomm.init(timeout=60)
    attention = ulysses(F.scaled_dot_product_attention, zcomm.ProcessMesh(sequence=zcomm.world_size()))
    part = torch.ones(1, 4, 3, 2, requires_grad=True)
    out = attention(part, part, part)
    if zcomm.rank() == 1:
        os._exit(3)
    out.sum().backward()


def test_the_loss_of_a_rank_in_backward_is_named(run_ranks: Run) -> None:
    first, second = run_ranks(one_dies, 2, check=False)
    assert second.exitcode == 3
    assert first.error is not None and "PeerLost" in first.error.kinds and first.error.rank == 1
    assert "ulysses" in first.error.message


def test_one_rank_divides_nothing(world_of_one: None) -> None:
    mesh = zcomm.ProcessMesh(sequence=1)
    model, batch = Net(mesh), batches(1, 1)[0]
    other = Net(mesh)
    other.attention = copy.deepcopy(model.attention)
    given = split_sequence(batch, mesh)
    assert given["num_items_in_batch"] == int((batch["labels"][:, 1:] != -100).sum())
    assert model(**given).item() == other(**given).item()
