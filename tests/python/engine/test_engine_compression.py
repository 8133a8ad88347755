"""DeepSpeed's keys of quantised weights and gradients: the bits of the same Compression by hand, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import zcomm
from zcomm import Compression
from zero_jobs import batch, digest, loss_of, share_small_buckets, small_gpt

Run = Callable[..., list[Any]]
STEPS = 4
LOCO = {"err_beta": 0.5, "reset_T": 3}
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}}


def by_engine(**keys: Any) -> Any:
    return zcomm.initialize(model=small_gpt(), config={**CONFIG, "zero_optimization": keys})[0]


def losses_by_keys(**keys: Any) -> list[str]:
    """Return the bits of the losses, and of the weights."""
    engine = by_engine(**keys)
    losses = []
    for number in range(STEPS):
        loss = loss_of(engine, *batch(engine.global_rank, number))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()).hex())
    losses.append(digest(engine.optimizer.full_state_dict()))
    engine.destroy()
    return losses


def losses_by_hand(stage: int, given: Compression | None, **more: Any) -> list[str]:
    comm, model, losses = zcomm.init(), small_gpt(), []
    common: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.0, "clip_norm": 1.0, **more}
    opt = zcomm.ZeroOptimizer(model, stage=stage, compression=given, **common)
    for number in range(STEPS):
        loss = loss_of(model, *batch(comm.rank, number))
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()).hex())
    losses.append(digest(opt.full_state_dict()))
    opt.close()
    return losses


def frozen(**keys: Any) -> float:
    model = small_gpt().requires_grad_(False)
    generator = torch.Generator().manual_seed(5)
    for param in model.parameters():  # the last layer begins at zero
        param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": keys}
    engine = zcomm.initialize(model=model, config=config)[0]
    with torch.no_grad():
        loss = float(loss_of(engine, *batch(0, 0)))
    engine.destroy()
    return loss


def keys_and_hand() -> list[tuple[str, bool]]:
    zcomm.init(backend="tcp", timeout=60)  # on which weights travel
    share_small_buckets()
    weights, gradients = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
    exact = {stage: losses_by_hand(stage, None) for stage in (2, 3)}
    assert losses_by_keys(stage=2, zero_quantized_gradients=False) == exact[2]
    found = []
    assert frozen(stage=3) != frozen(stage=3, **weights)  # weights that are not trained travel encoded, too
    cases: list[tuple[int, dict[str, Any], Compression]] = [
        (3, weights, Compression(weights="int8")),
        (2, gradients, Compression(gradients="int4")),
        (2, {**gradients, "zeropp_loco_param": {}}, Compression(gradients="int4", keep=0.8, reset_steps=1024)),
        (
            3,
            {**weights, **gradients, "zeropp_loco_param": LOCO},
            Compression(weights="int8", gradients="int4", keep=0.5, reset_steps=3),
        ),
    ]
    for stage, keys, given in cases:
        wanted = losses_by_hand(stage, given)
        assert wanted != exact[stage]
        found.append((str(given), losses_by_keys(stage=stage, **keys) == wanted))
    return found


def test_keys_have_the_bits_of_a_compression(run_ranks: Run) -> None:
    for found in run_ranks(keys_and_hand, 2):
        assert [text for text, equal in found if not equal] == [] and len(found) == 4


def told(**keys: Any) -> str:
    try:
        by_engine(**keys).destroy()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return ""


def groups_and_refusals() -> tuple[list[Any], list[str]]:
    comm = zcomm.init(timeout=60)
    weights, gradients = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
    made = []
    for keys in (gradients, weights, {**weights, **gradients}):
        engine = by_engine(stage=3, mics_shard_size=1, **keys)
        made.append(engine.optimizer.compression)
        engine.destroy()
    return made, [
        told(stage=2, **weights, **gradients),
        told(stage=3, zero_hpz_partition_size=1, **(gradients if comm.rank else weights)),
        one_bit(**gradients),
    ]


def one_bit(**keys: Any) -> str:
    config = {**CONFIG, "optimizer": {"type": "OneBitAdam", "params": {"lr": 1e-3}}, "zero_optimization": keys}
    try:
        zcomm.initialize(model=small_gpt(), config=config)[0].destroy()
    except ValueError as error:
        return str(error)
    return ""


WEIGHTS, GRADIENTS = (f'"zero_optimization.zero_quantized_{name}"' for name in ("weights", "gradients"))


def test_groups_and_refusals(run_ranks: Run) -> None:
    for made, (stage, ranks, rule) in run_ranks(groups_and_refusals, 2):
        assert made == [
            Compression(gradients="int4"),
            Compression(weights="int8", hops="all"),
            Compression(weights="int8", gradients="int4", hops="all"),
        ]
        wanted = f'{WEIGHTS}: true and {GRADIENTS}: true: {WEIGHTS} is of gathers in stage 3, and "zero_optimization.st'
        assert stage.startswith(wanted), stage
        assert f"the codec of {WEIGHTS} and {GRADIENTS} is Compression(weights=None, gradients='int4'" in ranks, ranks
        assert rule.startswith(f"{GRADIENTS}: true: onebit_adam sends moments as signs"), rule


def hpz() -> tuple[Any, bool, bool]:
    """Train by the three keys of ZeRO++ together, and by hand."""
    zcomm.init(timeout=60)
    share_small_buckets()
    keys = {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
    found = losses_by_keys(zero_quantized_weights=True, **keys)
    mesh = zcomm.ProcessMesh(replicate=2, shard=2)
    given = {"mesh": mesh, "hpz": True}
    by_hand = losses_by_hand(3, Compression(weights="int8", gradients="int4"), **given)
    exact = losses_by_hand(3, None, **given)
    engine = by_engine(zero_quantized_weights=True, **keys)
    made = engine.optimizer.compression
    engine.destroy()
    return made, found == by_hand, found == exact


def test_keys_of_zero_plus_plus_together(run_ranks: Run) -> None:
    for found in run_ranks(hpz, 4):
        assert found == (Compression(weights="int8", gradients="int4"), True, False)


def test_a_frozen_model_and_a_world_of_one(world_of_one: None) -> None:
    assert frozen(stage=3) == frozen(stage=3, zero_quantized_weights=True, zero_quantized_gradients=True)
