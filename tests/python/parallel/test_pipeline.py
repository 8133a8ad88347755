"""Pipelines: losses, gradients, norms and weights of each schedule equal the whole model's on one rank.

The oracle is the same model, batch by batch, with torch's AdamW, after 20 steps. Pipelines without ZeroOptimizer are
in float64 and equal it to 1e-9, the others in fp32 to 1e-5. Batches have 9 samples, for 4 micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zcomm

Run = Callable[..., list[Any]]
STEPS, SAMPLES, WORDS = 20, 9, 11


class Pair(nn.Module):
    """A layer with two outputs, of which one has no gradient."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, (x.detach() > 0).long()


class Join(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, mask = pair
        return x * (1 + mask)


def layers(kind: str, dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(5)
    if kind == "tied":
        embedding, head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS, bias=False)
        head.weight = embedding.weight
        middle = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)]
        return nn.Sequential(embedding, *middle, head).to(dtype)
    return nn.Sequential(
        nn.Linear(7, 13),
        nn.ReLU(inplace=True),
        nn.Linear(13, 11),
        Pair(),
        Join(),
        nn.Linear(11, 9),
        nn.ReLU(inplace=True),  # begins a stage, if each part has two
        nn.Linear(9, 3),
    ).to(dtype)


def batch(kind: str, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    if kind == "tied":
        words = torch.randint(WORDS, (2, SAMPLES, 4), generator=generator)
        return words[0], words[1]
    values = torch.randn(SAMPLES, 10, generator=generator, dtype=torch.float64).to(dtype)
    return values[:, :7].contiguous(), values[:, 7:].contiguous()


def loss_of(kind: str) -> Callable[..., torch.Tensor]:
    if kind == "tied":
        return lambda output, target: functional.cross_entropy(output.flatten(0, 1), target.flatten())
    return functional.mse_loss


def train(sizes: dict[str, int], case: dict[str, Any]) -> None:
    """Train a pipeline, and the whole model next to it; compare after each step."""
    kind, zero, accum, clip = case.get("kind", "plain"), case.get("zero"), case.get("accum", 1), case.get("clip")
    dtype, near = (torch.float64, 1e-9) if zero is None else (torch.float32, 1e-5)
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(comm, **sizes)
    replicas, own = mesh.size("data"), mesh.ranks("data").index(comm.rank)
    model, whole, loss = layers(kind, dtype), layers(kind, dtype), loss_of(kind)
    if own:
        for param in model.parameters():  # the first replica wins
            param.data.add_(1)
    pipe = zcomm.parallel.pipeline(model, mesh, 4, case["schedule"], loss=loss, **case.get("options", {}))
    opt: Any = torch.optim.AdamW(pipe.module.parameters(), lr=1e-2)
    if zero is not None:
        opt = zcomm.ZeroOptimizer(pipe.module, "adamw", lr=1e-2, mesh=mesh, clip_norm=clip, grad_accum=accum, **zero)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    for step in range(STEPS):
        for micro in range(accum):
            batches = [batch(kind, dtype, (step * accum + micro) * 10 + place) for place in range(replicas)]
            wanted = sum(loss(whole(x), y) for x, y in batches) / replicas
            (wanted / accum).backward()
            x, y = batches[own]
            found = pipe.step(x if pipe.is_first else None, y if pipe.is_last else None)
            assert abs(found.item() - wanted.item()) < near, (step, found.item(), wanted.item())
            if zero is not None:
                opt.step()
                opt.zero_grad()
        if zero is None:
            for param in pipe.module.parameters():
                param.grad /= accum
            norm = pipe.clip_grad_norm_(clip or 1e9)
            named = dict(whole.named_parameters(remove_duplicate=False))
            for name, param in pipe.module.named_parameters() if not clip else ():
                torch.testing.assert_close(param.grad, named[name].grad, rtol=near, atol=near)
            opt.step()
            opt.zero_grad()
        else:
            norm = opt.grad_norm
        wanted_norm = nn.utils.clip_grad_norm_(whole.parameters(), clip or 1e9)
        assert abs(norm - wanted_norm) < near, (step, norm, wanted_norm)
        reference.step()
        reference.zero_grad()
    state = whole.state_dict()
    for name, value in pipe.module.state_dict().items():
        torch.testing.assert_close(value, state[name], rtol=near, atol=near, msg=lambda text, n=name: f"{n}: {text}")
    x, y = batch(kind, dtype, own)
    found, outputs = pipe.eval(x, y)
    with torch.no_grad():
        each = [loss(whole(x), y) for x, y in (batch(kind, dtype, place) for place in range(replicas))]
    assert abs(found.item() - sum(each).item() / replicas) < near
    if pipe.is_last:
        torch.testing.assert_close(torch.cat(outputs), whole(x).detach(), rtol=near, atol=near)
    else:
        assert outputs is None
    assert 0 < pipe.bubble.measured < 1 and f"formula {pipe.bubble.formula:.3f}" in repr(pipe)
    if zero is not None:
        opt.close()
    pipe.close()


def train_all(sizes: dict[str, int], cases: list[dict[str, Any]]) -> None:
    for case in cases:
        try:
            train(sizes, case)
        except Exception as error:
            raise AssertionError(f"{sizes} {case}: {error}") from error


CASES: list[dict[str, Any]] = [
    {"schedule": "gpipe"},
    {"schedule": "1f1b", "clip": 0.1, "accum": 2},
    {"schedule": "1f1b", "zero": {"stage": 1}, "clip": 0.1},
    {"schedule": "1f1b", "zero": {"stage": 0}, "accum": 2, "kind": "tied", "clip": 0.5},
    {"schedule": "gpipe", "kind": "tied"},
    {"schedule": "1f1b", "kind": "tied", "options": {"checkpoint_every": 1}},
]
INTERLEAVED: list[dict[str, Any]] = [
    {"schedule": "interleaved", "zero": {"stage": 1}, "clip": 0.1},
    {"schedule": "interleaved", "kind": "tied"},
]


def test_a_pipeline_of_two_trains_as_the_whole_model(run_ranks: Run) -> None:
    run_ranks(train_all, 2, {"data": 1, "pipe": 2}, [*CASES, *INTERLEAVED])


def test_data_and_pipe_train_as_the_whole_model(run_ranks: Run) -> None:
    run_ranks(train_all, 4, {"data": 2, "pipe": 2}, [CASES[1], CASES[2], CASES[3]])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "pipe": 2}, {"pipe": 2, "data": 2}, {"data": 1, "pipe": 4}])
def test_four_ranks_train_as_the_whole_model(sizes: dict[str, int], run_ranks: Run) -> None:
    cases = [case for case in [*CASES, *INTERLEAVED] if sizes["pipe"] == 2 or case["schedule"] != "interleaved"]
    run_ranks(train_all, 4, sizes, cases)


def precision(sizes: dict[str, int], dtype: str, rule: Any) -> list[Any]:
    """Train in 16 bits, and with one stage. Returns: losses, loss scale and skipped steps of both."""
    comm = zcomm.init(timeout=60)
    found = []
    for mesh in (zcomm.ProcessMesh(comm, **sizes), zcomm.ProcessMesh(comm, data=comm.world_size, pipe=1)):
        pipe = zcomm.parallel.pipeline(layers("tied", torch.float32), mesh, 4, loss=loss_of("tied"))
        options: dict[str, Any] = {"mesh": mesh, "precision": dtype, "loss_scale": rule, "clip_norm": 0.5}
        opt = zcomm.ZeroOptimizer(pipe.module, lr=1e-2, stage=1, **options)
        for step in range(STEPS):
            loss = pipe.step(*batch("tied", torch.float32, step))
            opt.step()
            opt.zero_grad()
        evaluated, _ = pipe.eval(*batch("tied", torch.float32, STEPS))
        found.append([loss.item(), evaluated.item(), opt.loss_scale, opt.skipped_steps])
        opt.close()
        pipe.close()
    return found


# The first scale makes fp16 gradients overflow: each rank skips, and halves it.
@pytest.mark.parametrize(
    ("dtype", "rule"), [("bf16", None), ("fp16", zcomm.zero.LossScale(22, hysteresis=1, window=5))]
)
def test_16_bits(run_ranks: Run, dtype: str, rule: Any) -> None:
    for found, wanted in run_ranks(precision, 2, {"pipe": 2}, dtype, rule):
        assert abs(found[0] - wanted[0]) < 0.02 and abs(found[1] - wanted[1]) < 0.02, (found, wanted)
        assert found[2:] == wanted[2:] and (dtype == "bf16" or found[3] > 0)


def few(sizes: dict[str, int]) -> None:
    """Train with fewer micro-batches than stages."""
    comm = zcomm.init(timeout=60)
    mesh = zcomm.ProcessMesh(comm, **sizes)
    whole = layers("plain", torch.float64)
    pipe = zcomm.parallel.pipeline(layers("plain", torch.float64), mesh, 1, loss=loss_of("plain"))
    x, y = batch("plain", torch.float64, 3)
    loss_of("plain")(whole(x), y).backward()
    pipe.step(x, y)
    named = dict(whole.named_parameters())
    for name, param in pipe.module.named_parameters():
        torch.testing.assert_close(param.grad, named[name].grad, rtol=1e-9, atol=1e-9)
    pipe.close()


def test_fewer_micro_batches_than_stages(run_ranks: Run) -> None:
    run_ranks(few, 2, {"pipe": 2})
