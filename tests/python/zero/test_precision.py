"""The dtype of gradients in flight, steps that are skipped in every precision, and options that ranks compare."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.planning import estimate
from zcomm.zero.step_options import plain_text

Run = Callable[..., list[Any]]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 3)).to(dtype)


def loss_of(net: nn.Module, rank: int) -> torch.Tensor:
    x = torch.randn(4, 40, generator=torch.Generator().manual_seed(rank)).to(next(net.parameters()).dtype)
    return net(x).float().square().mean()


def travels(folder: str) -> list[bool]:
    """Return whether each averaged gradient is the mean of the ranks' own gradients, rounded to the dtype in flight."""
    comm = zcomm.init(timeout=60)
    right = []
    for precision in ("fp32", "bf16"):
        own = []
        for rank in range(comm.world_size):
            net = network(DTYPES[precision])
            loss_of(net, rank).backward()
            own.append([p.grad for p in net.parameters()])
        for travel in (None, "fp32", "bf16", "fp16"):
            for stage, offload in ((0, None), (2, "cpu"), (3, "nvme")):
                net = network()
                opt = zcomm.ZeroOptimizer(
                    net, "sgd", lr=0.1, stage=stage, offload=offload, nvme_path=folder, precision=precision,
                    communication_dtype=travel, bucket_mb=0.003,
                )  # fmt: skip
                loss_of(net, comm.rank).backward()
                dtype = DTYPES[travel or precision]
                for number, param in enumerate(net.parameters()):
                    want = torch.zeros_like(own[0][number], dtype=torch.float32)
                    for rank in range(comm.world_size):
                        want += own[rank][number].to(dtype).float()
                    right.append(torch.equal(zcomm.zero.full_grad(param), want / comm.world_size))
                if stage == 2:
                    planned = estimate(
                        network(), stage, offload, comm.world_size, precision, "sgd", bucket_mb=0.003,
                        communication_dtype=travel,
                    ).memory  # fmt: skip
                    right.append(planned["device"]["slots"] == opt.memory()["device"]["slots"])
                opt.close()
    return right


@pytest.mark.parametrize("world_size", [1, 2])
def test_gradients_are_rounded_once_to_what_travels(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for right in run_ranks(travels, world_size, str(tmp_path)):
        assert len(right) > 90 and all(right), right


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_steps_that_are_not_finite_are_skipped(precision: str, stage: int, caplog: pytest.LogCaptureFixture) -> None:
    net = network()
    opt = zcomm.ZeroOptimizer(net, stage=stage, precision=precision, skip_nonfinite=True, lr=0.1)
    with caplog.at_level(logging.WARNING, "zcomm"):
        for step in range(4):
            before = opt.full_state_dict()["0.weight"]
            loss = loss_of(net, step)
            if step in (1, 2):
                loss = loss * float("inf")
            loss.backward()
            opt.step()
            opt.zero_grad()
            assert torch.equal(before, opt.full_state_dict()["0.weight"]) == opt.overflow == (step in (1, 2))
    assert opt.skipped_steps == 2 and opt.step_count == 4 and opt.loss_scale == 1.0
    assert opt.nonfinite is not None and opt.nonfinite.step == 3
    said = [record.getMessage() for record in caplog.records]
    assert said == [f"step {step}: the gradient of 0.weight is not finite; step skipped" for step in (2, 3)]
    opt.close()
    zcomm.shutdown()


@pytest.mark.parametrize("stage", [1, 3])
def test_fp16_tells_accelerate_which_steps_were_skipped(stage: int) -> None:
    """Accelerate reads ``overflow`` if the optimizer has it when it is wrapped, and then pauses schedules."""
    net = network()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1},
        "zero_optimization": {"stage": stage},
    }
    engine, zero, *_ = zcomm.initialize(model=net, optimizer=opt, config=config)
    assert zero.overflow is False
    skipped, rates = [], []
    for step in range(8):
        engine.backward(loss_of(engine.module, step) * (float("inf") if step == 3 else 1.0))
        engine.step()
        if step % 2:
            skipped.append(zero.overflow)
            if not zero.overflow:
                schedule.step()
            rates.append(engine.get_lr()[0])
    assert skipped == [False, True, False, False]
    assert rates == [0.05, 0.05, 0.025, 0.0125]
    engine.destroy()
    zcomm.shutdown()


@pytest.mark.parametrize("checked", [None, True, False])
def test_bf16_of_a_configuration_skips_as_deepspeed_does(checked: bool | None) -> None:
    section: dict[str, Any] = {"enabled": True} | ({} if checked is None else {"check_grad_overflow": checked})
    config = {"train_batch_size": 4, "bf16": section, "optimizer": {"type": "AdamW"}, "communication_data_type": "fp32"}
    engine, optimizer, *_ = zcomm.initialize(model=network(), config=config)
    before = optimizer.full_state_dict()["2.bias"]
    engine.backward(loss_of(engine.module, 0) * float("nan"))
    engine.step()
    skips = checked is not False
    assert engine.skipped_steps == int(skips)
    assert torch.equal(optimizer.full_state_dict()["2.bias"], before) == skips
    assert optimizer.precision.communication_dtype == torch.float32
    engine.destroy()
    zcomm.shutdown()


class Schedule:
    def __call__(self, step: int) -> float:
        return 1.0


def test_options_are_compared_without_addresses() -> None:
    def made() -> list[Any]:
        return [lambda step: step, Schedule(), functools.partial(max, 3), Schedule().__call__, torch.relu, Schedule]

    assert [plain_text(value) for value in made()] == [plain_text(value) for value in made()]
    assert all(" at 0x" not in plain_text(value) for value in made())
    assert plain_text({"b", "a"}) == plain_text({"a", "b"}) == "{a, b}"
    assert plain_text(torch.tensor(0.5)) != plain_text(torch.tensor(0.25)) and plain_text(0.5) != plain_text(0.25)
    assert plain_text(Schedule()) != plain_text(functools.partial(max, 3))


def with_callables() -> str:
    zcomm.init(timeout=20)
    net = network()
    group = {"params": list(net.parameters()), "schedule": Schedule(), "tags": {f"tag{n}" for n in range(9)}}
    opt = zcomm.ZeroOptimizer(net, torch.optim.SGD([group], lr=0.1), stage=1)
    loss_of(net, 0).backward()
    opt.step()
    opt.close()
    return "trained"


def test_ranks_may_have_callables_in_their_groups(run_ranks: Run) -> None:
    assert run_ranks(with_callables, 2) == ["trained"] * 2


def test_every_name_of_a_dtype_is_accepted() -> None:
    for short, dtype in DTYPES.items():
        long = str(dtype).removeprefix("torch.")
        for given in (short, dtype, long, str(dtype), zcomm.Precision(dtype)):
            opt = zcomm.ZeroOptimizer(network(), stage=1, precision=given, communication_dtype=None)
            assert opt.precision == zcomm.Precision(short) and opt.precision.name == short
            assert opt.precision.communication_dtype == dtype and opt.skip_nonfinite == (short == "fp16")
            opt.close()
    zcomm.shutdown()


def test_precision_has_its_options_as_the_optimizer_has_them() -> None:
    options: dict[str, Any] = {"communication_dtype": torch.float32, "buffer_dtype": "bfloat16"}
    asked = zcomm.Precision("fp16", **options, loss_scale=8.0, skip_nonfinite=True)
    one = zcomm.ZeroOptimizer(network(), stage=1, precision=asked)
    other = zcomm.ZeroOptimizer(network(), stage=1, precision="fp16", **options, loss_scale=8.0, skip_nonfinite=True)
    assert one.precision == other.precision == asked
    assert one.loss_scale == other.loss_scale == 8.0
    assert (asked.communication_dtype, asked.buffer_dtype) == (torch.float32, torch.bfloat16)
    for optimizer in (one, other):
        optimizer.close()
    zcomm.shutdown()


@pytest.mark.parametrize(
    ("given", "precision"), [("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "bf16"), ("fp32", "bf16")]
)
def test_16_bit_weights_that_become_fp32_are_told(given: str, precision: str, caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise a forward with 16-bit inputs would end with torch's error on dtypes of matrices."""
    net = network(DTYPES[given])
    with caplog.at_level(logging.WARNING, "zcomm"):
        opt = zcomm.ZeroOptimizer(net, precision=precision)
    assert {param.dtype for param in net.parameters()} == {DTYPES[precision]}
    opt.close()
    told = [record.getMessage() for record in caplog.records if "become float32" in record.getMessage()]
    assert len(told) == ((given, precision) == ("bf16", "fp32"))
    assert all("0.weight" in text and "bfloat16" in text and "precision='bf16'" in text for text in told)
