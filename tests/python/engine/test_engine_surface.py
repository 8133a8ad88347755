"""Calls of DeepSpeed's engine outside the loop: batch sizes, state dicts, compile, coalesced gradients, timers."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import SequentialSampler, TensorDataset

import zcomm
from tiers import slow
from zcomm.zero import LossScale
from zcomm.zero.loss_scale import LossScaler

Run = Callable[..., list[Any]]
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
PLACES = [(0, None), (1, None), (2, None), (3, None), (3, "nvme")]


@pytest.fixture
def job() -> Iterator[None]:
    """Leave the world of one that initialize() joins."""
    yield
    zcomm.shutdown()


def network(seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 3))


def engine_of(stage: int = 0, device: str | None = None, folder: str = "", seed: int = 3, **more: Any) -> Any:
    zero: dict[str, Any] = {"stage": stage}
    if device is not None:
        zero["offload_param"] = {"device": device, "nvme_path": folder}
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "zero_optimization": zero, **more}
    return zcomm.initialize(model=network(seed), config=settings)[0]


def loss_of(model: Any, number: int, rank: int = 0, samples: int = 2) -> torch.Tensor:
    x = torch.randn(samples, 9, generator=torch.Generator().manual_seed(100 * number + rank))
    return F.mse_loss(model(x[:, :6].to(next(model.parameters()).dtype)).float(), x[:, 6:])


def weights(engine: Any) -> torch.Tensor:
    return torch.cat([value.flatten() for value in engine.module_state_dict().values()])


def by_torch(steps: list[list[float]], ranks: int = 1) -> torch.Tensor:
    """Train by torch: each step lists the factors of its micro-steps' losses; losses are numbered consecutively."""
    net, number = network(), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for factors in steps:
        for factor in factors:
            for rank in range(ranks):
                (loss_of(net, number, rank) * factor / ranks).backward()
            number += 1
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in net.parameters()])


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)


def test_the_batch_size_can_change_between_steps(job: None) -> None:
    engine = engine_of(gradient_accumulation_steps=3)
    number = 0

    def micro_steps(count: int) -> None:
        nonlocal number
        for _ in range(count):
            engine.backward(loss_of(engine, number))
            engine.step()
            number += 1

    micro_steps(3)
    assert engine.get_batch_info() == (6, 2, 3)
    engine.set_train_batch_size(8)  # after 3 micro-steps: the next boundary is 4 micro-steps later, not at the 4th
    assert engine.get_batch_info() == (8, 2, 4) and engine.config["gradient_accumulation_steps"] == 3
    micro_steps(3)
    assert engine.global_steps == 1
    with pytest.raises(RuntimeError, match=r"set_train_batch_size\(\) during the accumulation"):
        engine.set_train_batch_size(2)
    micro_steps(1)
    engine.set_train_batch_size(2)
    micro_steps(2)
    assert (engine.global_steps, engine.global_samples) == (4, 6 + 8 + 2 * 2)
    close(weights(engine), by_torch([[1 / 3] * 3, [1 / 4] * 4, [1.0], [1.0]]))
    with pytest.raises(ValueError, match=r"set_train_batch_size\(3\): it must be a multiple of 2 samples per rank x 1"):
        engine.set_train_batch_size(3)
    engine.set_train_micro_batch_size(5)
    assert engine.get_batch_info() == (5, 5, 1)
    engine.destroy()


def coalesced(folder: str) -> list[torch.Tensor]:
    rank, ends = zcomm.init().rank, []
    for stage, device in PLACES:
        engine = engine_of(stage, device, folder)
        for first in (0, 3):
            with engine.coalesce_grad_reduction():
                for number in range(first, first + 2):
                    engine.backward(loss_of(engine, number, rank))
                with pytest.raises(RuntimeError, match=r"step\(\) inside of coalesce_grad_reduction"):
                    engine.step()
                with pytest.raises(RuntimeError, match=r"no_sync\(\) inside of"):
                    engine.no_sync()
            engine.allreduce_gradients()
            engine.step()
            if not first:  # a step of the ordinary kind between them
                engine.backward(loss_of(engine, 2, rank))
                engine.step()
        assert engine.was_step_applied() and engine.global_steps == 3
        ends.append(weights(engine))
        engine.destroy()
    return ends


@pytest.mark.parametrize("world_size", [1, 2])
def test_coalesced_gradients_are_reduced_once(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    want = by_torch([[1.0, 1.0], [1.0], [1.0, 1.0]], world_size)
    for ends in run_ranks(coalesced, world_size, str(tmp_path)):
        for end in ends:
            close(end, want)


def test_one_block_is_one_step_amid_a_longer_accumulation(job: None) -> None:
    engine = engine_of(gradient_accumulation_steps=2)
    with engine.coalesce_grad_reduction():
        for number in range(3):
            engine.backward(loss_of(engine, number))
    engine.step()
    assert engine.global_steps == 1
    for number in (3, 4):
        engine.backward(loss_of(engine, number))
        engine.step()
    assert engine.global_steps == 2
    close(weights(engine), by_torch([[0.5] * 3, [0.5] * 2]))
    engine.destroy()


def states(folder: str) -> None:
    rank = zcomm.init().rank
    other = network(9).state_dict()
    for stage, device in PLACES:
        engine = engine_of(stage, device, folder)
        engine.backward(loss_of(engine, 0, rank))
        engine.step()
        engine.module[0].requires_grad_(False)
        lean = engine.module_state_dict(exclude_frozen_parameters=True, prefix="a.")
        assert list(lean) == [f"a.{name}" for name in other if not name.startswith("0.")]
        for given in ({"module": other}, other):
            engine.load_module_state_dict(given)
            state = engine.module_state_dict()
            assert all(torch.equal(state[name], value) for name, value in other.items()), (stage, device)
        with pytest.raises(RuntimeError, match="Missing key"):
            engine.load_module_state_dict({"module": {}})
        engine.load_module_state_dict({"module": {}}, strict=False)
        seen: list[Any] = []
        engine.load_module_state_dict({"module": other}, custom_load_fn=lambda src, dst, to=seen: to.append((src, dst)))
        assert seen == [(other, engine.module)]
        for call in (lambda e=engine: e.offload_states(include=["optim_states"]), engine.reload_states):
            call()
        engine.empty_partition_cache()
        with torch.no_grad():
            want = network(9)
            assert torch.equal(loss_of(engine, 1), loss_of(want, 1))
        engine.destroy()


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_module_state_dicts_go_round(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(states, world_size, str(tmp_path))


def test_states_that_cannot_be_named_are_errors(job: None) -> None:
    engine = engine_of(2)
    with pytest.raises(ValueError, match=r"include=\['momentum'\]\): expected some of optim_states"):
        engine.offload_states(include=["momentum"])
    with pytest.raises(ValueError, match=r"device='nvme'\): expected \"cpu\""):
        engine.offload_states(device="nvme")
    engine.device = torch.device("meta")  # any device but the host
    with pytest.raises(NotImplementedError, match=r"optim_states \(\d+ bytes\), .* of this rank are on meta"):
        engine.offload_states()
    for call in (engine.train_batch, engine.eval_batch):
        with pytest.raises(NotImplementedError, match=r"_batch\(\) belongs to a PipelineEngine"):
            call(data_iter=iter(()))
    engine.destroy()


HALF = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 1}}


@pytest.mark.parametrize("precision", [{}, HALF])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_scale_and_a_backward_of_the_program(job: None, stage: int, precision: dict[str, Any]) -> None:
    found = []
    for scale in (False, True):
        engine = engine_of(stage, gradient_accumulation_steps=2, managed_gradient_accumulation=True, **precision)
        assert engine.managed_gradient_accumulation()
        for number in range(8):
            loss = loss_of(engine, number)
            if scale:
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
        found.append((weights(engine), engine.optimizer.cur_scale, engine.optimizer.grad_norm))
        engine.destroy()
    assert torch.equal(found[0][0], found[1][0]) and found[0][1:] == found[1][1:]
    assert (found[0][1] > 256.0) == bool(precision), "the scale has grown between steps"


def test_scale_refuses_what_backward_does(job: None) -> None:
    engine = engine_of(2, **HALF)
    assert engine.optimizer.needs_scaler()
    with pytest.raises(ValueError, match=r"scale\(\) needs a scalar loss, got shape \[2\]"):
        engine.scale(torch.ones(2, requires_grad=True))
    loss = loss_of(engine, 0)
    engine.scale(loss)  # no value uses it
    loss.backward()
    with pytest.raises(RuntimeError, match=r"needs engine\.backward\(loss\)"):
        engine.step()
    engine.destroy()
    plain = engine_of(2)
    assert not plain.optimizer.needs_scaler()
    plain.destroy()


def test_facts(job: None) -> None:
    engine = engine_of(1, gradient_clipping=0.5)
    assert (engine.dp_world_size, engine.data_parallel_group, engine.mpu) == (1, None, None)
    assert (engine.loss_scale(), engine.gradient_clipping(), engine.get_mom()) == (0.0, 0.5, [0.9])
    assert (engine.optimizer.cur_scale, engine.optimizer.loss_scaler.cur_scale) == (1.0, 1.0)
    assert engine.optimizer.overflow is False and engine.zero_optimization()
    assert engine.sparse_tensor_module_names == set()
    engine.destroy()
    adam = engine_of(0, optimizer={"type": "AdamW", "params": {"betas": [0.8, 0.9]}})
    assert [tuple(betas) for betas in adam.get_mom()] == [(0.8, 0.9)]
    adam.destroy()
    half = engine_of(2, fp16={"enabled": True, "initial_scale_power": 4})
    assert half.dynamic_loss_scale() and half.optimizer.loss_scaler.dynamic
    assert (half.optimizer.cur_scale, half.optimizer.loss_scaler.loss_scale) == (16.0, 16.0)
    assert half.optimizer.dynamic_loss_scale and not LossScaler(8.0).scale_window
    assert (half.optimizer.loss_scaler.scale_window, half.optimizer.loss_scaler.cur_iter) == (1000, 0)
    half.destroy()
    assert LossScaler(8.0).cur_scale == 8.0 and not LossScaler(8.0).dynamic and LossScaler(LossScale()).dynamic


def test_words_of_the_configuration(job: None) -> None:
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 4}}
    engine = engine_of(steps_per_print=7, wall_clock_breakdown=True, scheduler=schedule)
    assert (engine.steps_per_print(), engine.wall_clock_breakdown()) == (7, True)
    assert (engine.optimizer_name(), engine.optimizer_params()) == ("sgd", SGD["params"])
    assert (engine.scheduler_name(), engine.scheduler_params()) == ("WarmupLR", schedule["params"])
    assert engine.monitor.enabled is False
    engine.monitor.write_events([("a", 1.0, 1)])
    engine.destroy()
    net = network()
    own, *_ = zcomm.initialize(
        model=net, optimizer=torch.optim.AdamW(net.parameters()), config={"train_micro_batch_size_per_gpu": 2}
    )
    assert (own.optimizer_name(), own.optimizer_params()) == ("AdamW", None)
    assert (own.scheduler_name(), own.scheduler_params(), own.steps_per_print()) == (None, None, None)
    own.destroy()


def scaled_backward(folder: str) -> None:
    rank = zcomm.init().rank
    halves = {"fp16": {"enabled": True, "initial_scale_power": 6}}
    for stage, more in ((0, {}), (2, halves), (3, halves), (2, {"gradient_accumulation_steps": 2})):
        ends = []
        for manual in (False, True):
            engine = engine_of(stage, **more)
            for number in range(4):
                x = torch.randn(2, 9, generator=torch.Generator().manual_seed(10 * number + rank))
                out = engine(x[:, :6].to(next(engine.parameters()).dtype))
                loss = F.mse_loss(out.float(), x[:, 6:])
                if manual:
                    engine.scale(loss).backward()
                else:
                    engine.backward(loss)
                engine.step()
            assert engine.skipped_steps == 0
            ends.append(weights(engine))
            engine.destroy()
        assert torch.equal(*ends), stage
        assert not torch.equal(ends[0], torch.cat([p.detach().flatten() for p in network().parameters()]).to(ends[0]))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_scaled_loss_has_its_own_backward(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(scaled_backward, world_size, str(tmp_path))


def test_the_configuration_is_a_dict_with_the_values_in_effect_as_attributes(job: None, tmp_path: Path) -> None:
    given = {"train_batch_size": 2, "optimizer": SGD, "bf16": {"enabled": "auto"}}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(given))
    engine = zcomm.initialize(model=network(), config=str(path))[0]
    assert engine.config == given and isinstance(engine.config, dict)
    assert engine.config.bf16.enabled is False and engine.config.zero_optimization.stage == 0
    assert engine.config.get("zero_optimization", {}) == {} and "fp16" not in engine.config
    with pytest.raises(AttributeError, match="is a dict and has no attribute 'bf17'"):
        _ = engine.config.bf17
    for twin in (copy.deepcopy(engine.config), pickle.loads(pickle.dumps(engine.config))):
        assert twin == given and twin.optimizer.type == "SGD"
    engine.config["bf16"]["enabled"] = True
    assert engine.config.bf16.enabled is False
    engine.destroy()


def test_the_timer_counts_samples_of_steps(job: None, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("zcomm.engine.timers.time.perf_counter", lambda: now[0])
    engine = engine_of(gradient_accumulation_steps=2)
    for number in range(8):
        loss = loss_of(engine, number)
        now[0] += 0.25
        engine.backward(loss)
        engine.step()
        now[0] += 10.0  # seconds of data loading
        with torch.no_grad():
            engine.eval()
            loss_of(engine, number)
            engine.train()
    assert engine.tput_timer.global_step_count == 4
    engine.tput_timer.stop(global_step=True, report_speed=False)  # not started, so it counts nothing
    assert engine.tput_timer.avg_samples_per_sec() == pytest.approx(4 / 0.5)
    engine.destroy()


def test_deepspeed_io_deals_micro_batches(job: None) -> None:
    engine = engine_of()
    data = TensorDataset(torch.arange(7.0))
    kept = [batch[0].tolist() for batch in engine.deepspeed_io(data, route="eval")]
    assert kept == [[0, 1], [2, 3], [4, 5], [6]]
    mixed = [batch[0].tolist() for batch in engine.deepspeed_io(data, batch_size=3)]
    every = list(chain.from_iterable(mixed))
    assert sorted(every) == list(range(7)) and every != list(range(7))
    own = engine.deepspeed_io(data, data_sampler=SequentialSampler(data), collate_fn=len)
    assert list(own) == [2, 2, 2, 1]
    with pytest.raises(ValueError, match="route='test'"):
        engine.deepspeed_io(data, route="test")
    engine.destroy()


def compiled(folder: str, backend: str) -> list[list[list[float]]]:
    rank, runs = zcomm.init().rank, []
    for stage, device in PLACES:
        pair = []
        for compiles in (False, True):
            torch._dynamo.reset()
            engine = engine_of(stage, device, folder)
            if compiles:
                engine.compile(backend=backend, compile_kwargs={"dynamic": False})
                engine.compile()
                assert engine.is_compiled
                assert all(
                    block._compiled_call_impl is not None for block in engine.module if len(list(block.parameters()))
                )
            losses = []
            for number in range(3):
                loss = loss_of(engine, number, rank)
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            pair.append(losses)
            engine.destroy()
        runs.append(pair)
    return runs


@pytest.mark.slow
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize("world_size", [1, 2])
def test_compiled_blocks_have_the_same_losses(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    for runs in run_ranks(compiled, world_size, str(tmp_path), "aot_eager", timeout_s=280):
        for eager, fast in runs:
            assert fast == pytest.approx(eager, rel=1e-5) and len(set(eager)) == 3
