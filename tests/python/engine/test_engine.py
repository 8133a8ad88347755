"""The engine's loop and counters on a stand-in optimizer: no ranks, no core."""

from __future__ import annotations

import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zcomm.config import load, resolve_batch
from zcomm.engine import Engine
from zcomm.schedulers import WarmupLR


class StandIn(torch.optim.SGD):
    """A stand-in for ZeroOptimizer as the engine uses it: it accumulates, steps at the boundary, and can skip steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.boundary: bool | None = None
        self.grad_norm = 0.0
        self.skipped_steps = self.updates = 0
        self.with_gradients = True
        self.skip_next = False
        self.closed = 0
        self.calls: list[tuple[str, bool | None]] = []

    def step(self, closure: Any = None) -> None:
        self.calls.append(("step", self.boundary))
        if self.boundary:
            self.grad_norm += 1.0
            self.updates += self.with_gradients
            self.skipped_steps += self.skip_next

    def backward(self, loss: torch.Tensor, *, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.calls.append(("zero_grad", self.boundary))

    def close(self) -> None:
        self.closed += 1


def make(*, rank: int = 0, world_size: int = 1, schedule: bool = False, **config: Any) -> Engine:
    settings = load({"train_micro_batch_size_per_gpu": 2, **config})
    model = nn.Linear(3, 1)
    optimizer = StandIn(model)
    return Engine(
        model,
        optimizer,  # type: ignore[arg-type]
        comm=SimpleNamespace(rank=rank, local_rank=rank, world_size=world_size),  # type: ignore[arg-type]
        config=settings,
        batch=resolve_batch(settings, world_size),
        device=torch.device("cpu"),
        lr_scheduler=WarmupLR(optimizer, 0.0, 1.0, 4, "linear") if schedule else None,
    )


def micro_step(engine: Engine) -> None:
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()


def test_counts_boundaries_and_tells_the_optimizer() -> None:
    engine = make(world_size=3, gradient_accumulation_steps=3)
    boundaries = []
    for _ in range(6):
        boundaries.append(engine.is_gradient_accumulation_boundary())
        micro_step(engine)
    assert boundaries == [False, False, True] * 2
    assert engine.optimizer.calls == [(call, b) for b in boundaries for call in ("step", "zero_grad")]
    assert (engine.global_steps, engine.micro_steps, engine.global_samples) == (2, 6, 36)
    sizes = (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
    assert sizes == (18, 2, 3)


def test_the_boundary_is_known_before_backward() -> None:
    engine = make(gradient_accumulation_steps=2)
    seen: list[bool | None] = []
    engine.module.weight.register_post_accumulate_grad_hook(lambda _: seen.append(engine.optimizer.boundary))
    micro_step(engine)
    micro_step(engine)
    assert seen == [False, True]


def test_own_boundaries_until_counting_again() -> None:
    engine = make(gradient_accumulation_steps=4)
    engine.set_gradient_accumulation_boundary(True)
    micro_step(engine)
    engine.set_gradient_accumulation_boundary(is_boundary=False)
    for _ in range(4):
        micro_step(engine)
    assert engine.global_steps == 1
    engine.set_gradient_accumulation_boundary(None)
    assert [engine.is_gradient_accumulation_boundary() for _ in range(3) if micro_step(engine) is None] == [
        False,
        True,
        False,
    ]
    assert engine.global_steps == 2


def test_backward_returns_the_loss_over_the_accumulation_and_the_optimizer_divides_gradients() -> None:
    engine = make(gradient_accumulation_steps=4)
    loss = engine(torch.ones(2, 3)).mean()
    assert torch.equal(engine.backward(loss), loss / 4)
    assert torch.equal(engine.module.weight.grad, torch.ones(1, 3))
    engine = make(gradient_accumulation_steps=4)
    loss = engine(torch.ones(2, 3)).mean()
    assert torch.equal(engine.backward(loss, scale_wrt_gas=False), loss)


def test_samples_count_at_boundaries() -> None:
    engine = make(world_size=3, gradient_accumulation_steps=4)
    counts = [engine.global_samples for _ in range(8) if micro_step(engine) is None]
    assert counts == [0, 0, 0, 24, 24, 24, 24, 48]
    engine.set_gradient_accumulation_boundary(is_boundary=True)  # as Accelerate, which calls step() only at boundaries
    micro_step(engine)
    assert (engine.global_samples, engine.global_steps, engine.micro_steps) == (72, 3, 9)


def test_a_step_without_gradients_is_refused() -> None:
    engine = make(schedule=True)
    engine.optimizer.with_gradients = False
    with pytest.raises(RuntimeError, match=r"step\(\): no backward pass .*engine.backward\(loss\)"):
        engine.step()
    assert (engine.global_steps, engine.lr_scheduler.last_epoch, engine.micro_steps) == (0, 0, 0)
    engine.optimizer.with_gradients = True
    micro_step(engine)
    assert engine.global_steps == 1


def test_a_step_of_the_optimizer_beside_the_engines_is_refused() -> None:
    engine = make()
    micro_step(engine)
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.optimizer.boundary = True
    engine.optimizer.step()
    with pytest.raises(RuntimeError, match=r"has called step\(\) of the engine's optimizer itself"):
        engine.step()
    assert engine.global_steps == 1
    micro_step(engine)
    assert engine.global_steps == 2


def test_whether_a_step_was_applied() -> None:
    engine = make(gradient_accumulation_steps=2)
    applied = []
    for step in range(6):
        engine.optimizer.skip_next = step == 3
        micro_step(engine)
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, False, False, True]


def test_arguments_of_the_schedules_step() -> None:
    engine = make(schedule=True)
    micro_step(engine)
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step(lr_kwargs={"epoch": 3})
    assert engine.lr_scheduler.last_batch_iteration == 3


def test_a_loop_for_torch_is_told_of_micro_steps(caplog: pytest.LogCaptureFixture) -> None:
    for losses, boundary, told in ((2, None, 1), (1, None, 0), (3, None, 0), (2, True, 0)):
        engine = make(gradient_accumulation_steps=2)
        engine.set_gradient_accumulation_boundary(boundary)
        caplog.clear()
        for _ in range(4):
            for _ in range(losses):
                engine.backward(engine(torch.ones(2, 3)).mean())
            engine.step()
        found = [record for record in caplog.records if "takes it for one micro-step of 2" in record.getMessage()]
        assert len(found) == told, (losses, boundary)


@pytest.mark.parametrize("how", ["steps", "rates", "once"])
def test_a_program_that_drives_the_engines_schedule_is_told_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    engine = make(schedule=True)
    for step in range(6):
        micro_step(engine)
        if how == "steps":
            engine.lr_scheduler.step()
        elif how == "rates" or step == 2:
            engine.optimizer.param_groups[0]["lr"] = 0.1 + step
    said = [record.message for record in caplog.records if "engine's schedule WarmupLR" in record.message]
    assert len(said) == (0 if how == "once" else 1)


def test_backward_takes_a_scalar_that_needs_gradients() -> None:
    engine = make()
    with pytest.raises(ValueError, match=r"scalar loss, got shape \[2, 1\]"):
        engine.backward(engine(torch.ones(2, 3)))
    with pytest.raises(ValueError, match="got float"):
        engine.backward(1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="requires_grad is False"):
        engine.backward(torch.tensor(1.0))


def test_schedule_moves_with_real_optimizer_steps_only() -> None:
    engine = make(gradient_accumulation_steps=2, schedule=True)
    rates = []
    for step in range(6):
        engine.optimizer.skip_next = step == 2
        for _ in range(2):
            micro_step(engine)
        rates.append(engine.get_lr())
    assert rates == [[0.0], [0.25], [0.25], [0.5], [0.75], [1.0]]
    assert (engine.global_steps, engine.skipped_steps) == (6, 1)


def test_gradient_norm_is_none_before_the_first_optimizer_step() -> None:
    engine = make(gradient_accumulation_steps=2)
    micro_step(engine)
    assert engine.get_global_grad_norm() is None
    micro_step(engine)
    assert engine.get_global_grad_norm() == 1.0


def test_it_is_a_module() -> None:
    engine = make()
    assert engine.eval() is engine and not engine.module.training
    engine.train()
    assert engine.module.training and engine.device == torch.device("cpu")
    assert engine.in_features == 3  # the model's own attribute
    with pytest.raises(AttributeError, match="no attribute 'in_featurez'"):
        engine.in_featurez  # noqa: B018
    assert {id(p) for p in engine.parameters()} == {id(p) for p in engine.module.parameters()}
    with torch.no_grad():
        assert not engine(torch.ones(1, 3)).requires_grad


def test_prints_progress_on_rank_0_only(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        engine = make(rank=rank, world_size=2, steps_per_print=2, gradient_accumulation_steps=2)
        for _ in range(10):
            micro_step(engine)
        lines = capsys.readouterr().out.splitlines()
        if rank == 1:
            assert lines == []
            continue
        assert [line.split(":")[0] for line in lines] == ["step 2", "step 4"]
        for word in ("loss ", "lr [1.000e+00]", "grad norm 4.000e+00", "samples/s", "skipped 0"):
            assert word in lines[1]


def test_wall_clock_breakdown_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    engine = make(wall_clock_breakdown=True)
    micro_step(engine)
    micro_step(engine)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    found = re.fullmatch(r"step 2: forward (\S+) s, backward (\S+) s, step (\S+) s \(of (\S+) s, 1 steps\)", lines[1])
    assert found is not None
    *phases, whole = (float(number) for number in found.groups())
    assert all(phase > 0 for phase in phases), "a small model's are microseconds"
    assert sum(phases) <= whole * 1.001  # printed with four digits each


def test_destroy_closes_once_and_ends_use() -> None:
    engine = make()
    engine.destroy()
    engine.destroy()
    assert engine.optimizer.closed == 1
    for call in (engine.step, lambda: engine(torch.ones(1, 3)), lambda: engine.backward(torch.ones(()))):
        with pytest.raises(RuntimeError, match="after destroy"):
            call()


def test_importing_the_deepspeed_names_starts_nothing() -> None:
    code = (
        "import argparse, sys, zcomm.compat.deepspeed as deepspeed\n"
        "assert not {'torch', 'zcomm._core'} & set(sys.modules)\n"
        "parser = deepspeed.add_config_arguments(argparse.ArgumentParser())\n"
        "args = parser.parse_args(['--deepspeed_config', 'x.json'])\n"
        "assert args.deepspeed_config == 'x.json' and args.deepspeed is False\n"
        "try:\n    deepspeed.no_such_name\n"
        "except AttributeError as error:\n    assert 'docs/compat.md' in str(error)\n"
        "else:\n    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_loss_that_is_divided_already_is_not_divided_again() -> None:
    engine = make(gradient_accumulation_steps=2)
    x = torch.ones(2, 3)
    engine.backward(engine(x).mean(), scale_wrt_gas=False)
    assert engine.optimizer.averages is False
    with pytest.raises(ValueError, match="scale_wrt_gas=True after scale_wrt_gas=False in one accumulation"):
        engine.backward(engine(x).mean())
    engine.step()
    engine.backward(engine(x).mean(), scale_wrt_gas=False)
    engine.step()
    micro_step(engine)
    assert engine.optimizer.averages is True, "each accumulation says it anew"
