"""Checkpoints of an engine: schedules, data, DeepSpeed's terms."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import zcomm
import zcomm.schedulers
from zcomm.compat.deepspeed.utils.zero_to_fp32 import load_state_dict_from_zero_checkpoint
from zcomm.zero.checkpoint.json_values import from_json, to_json

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "one cycle of torch": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequence": lambda o: lr_scheduler.SequentialLR(o, [lr_scheduler.ConstantLR(o), lr_scheduler.LinearLR(o)], [2]),
    "one cycle": lambda o: zcomm.schedulers.OneCycle(o, 0.1, 0.2, cycle_first_step_size=3),
    "warm-up": lambda o: zcomm.schedulers.WarmupCosineLR(o, 9, warmup_num_steps=3),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_go_through_json(name: str) -> None:
    seen = []
    for resumed in (False, True):
        opt = torch.optim.AdamW([torch.zeros(1)], lr=0.01)
        schedule = SCHEDULES[name](opt)
        for step in range(8):
            opt.step()
            schedule.step()
            if resumed and step == 3:
                saved = json.loads(json.dumps(to_json(schedule.state_dict(), "scheduler")))
                group = opt.param_groups[0]
                opt = torch.optim.AdamW([torch.zeros(1)], lr=0.01)
                schedule = SCHEDULES[name](opt)
                opt.param_groups[0].update(group)
                schedule.load_state_dict(from_json(saved))
            seen.append((opt.param_groups[0]["lr"], opt.param_groups[0]["betas"]))
    assert seen[:8] == seen[8:]


def engine(folder: Path) -> Any:
    torch.manual_seed(0)
    config = {
        "train_batch_size": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
        "zero_optimization": {"stage": 2},
    }
    return zcomm.initialize(model=nn.Linear(4, 2), config=config)[0]


def go(one: Any, steps: int) -> None:
    for number in range(one.global_steps + 1, one.global_steps + 1 + steps):
        before, rates = one.module.weight.detach().clone(), one.get_lr()
        one.backward(one(torch.full((4, 4), float(number))).square().mean())
        one.step()
        assert one.global_steps == number
        assert torch.equal(one.module.weight, before) == (rates == [0.0]), "warm-up begins at 0"
    assert one.get_lr() > [0.0]


def test_an_engine_goes_on_amid_its_data(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        data = torch.utils.data.TensorDataset(torch.arange(96.0).view(24, 4) / 100)
        config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 0.01}}}
        return zcomm.initialize(model=model, config=config, training_data=data)

    def run(one: Any, loader: Any, steps: int) -> None:
        while steps:
            for (x,) in loader:
                one.backward(one(x).square().mean())
                one.step()
                steps -= 1
                if one.global_steps == 8:
                    one.save_checkpoint(tmp_path)
                if not steps:
                    break

    whole, _, loader, _ = make()
    run(whole, loader, 15)  # 6 steps are an epoch
    resumed, _, loader, _ = make()
    resumed.load_checkpoint(tmp_path)
    assert resumed.global_steps == 8 and loader.state_dict() == {"epoch": 1, "samples": 8}
    run(resumed, loader, 7)
    for mine, wanted in zip(resumed.module.parameters(), whole.module.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    for each in (whole, resumed):
        each.destroy()
    zcomm.shutdown()


def test_engine_checkpoints_in_deepspeeds_terms(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = engine(tmp_path)
    assert one.load_checkpoint(tmp_path / "none") == (None, None)
    go(one, 3)
    assert one.save_checkpoint(tmp_path, client_state={"epoch": 1})
    go(one, 2)
    one.save_checkpoint(tmp_path, tag="best", save_latest=False)
    assert (tmp_path / "latest").read_text() == "global_step3"
    wanted = one.module.weight.clone(), one.get_lr()
    two = engine(tmp_path)
    assert two.load_checkpoint(tmp_path) == (str(tmp_path / "global_step3"), {"epoch": 1})
    assert (two.global_steps, two.micro_steps, two.global_samples) == (3, 3, 12)
    go(two, 2)
    assert torch.equal(two.module.weight, wanted[0]) and two.get_lr() == wanted[1]
    two.load_checkpoint(tmp_path, "global_step3", load_module_only=True)
    assert two.global_steps == 5
    assert not torch.equal(two.module.weight, wanted[0])
    two.save_16bit_model(tmp_path / "export")
    saved = load_file(tmp_path / "export" / "model.safetensors")
    assert torch.equal(saved["weight"], two.module.weight)
    for name, wanted_name in (("pytorch_model.bin", "model.safetensors"), ("best.pt", "best.safetensors")):
        caplog.clear()
        two.save_16bit_model(tmp_path / name, name)
        assert [path.name for path in (tmp_path / name).iterdir()] == [wanted_name]
        assert torch.equal(load_file(tmp_path / name / wanted_name)["weight"], two.module.weight)
        assert "never a pickle" in caplog.text and wanted_name in caplog.text
        shutil.rmtree(tmp_path / name)
    with pytest.raises(ValueError, match="plain folder name"):
        two.save_checkpoint(tmp_path, tag="a/b")
    with pytest.raises(ValueError, match="give a folder"):
        two.save_checkpoint("")
    for name in ("latest", "..", "", " x ", "a\r", "a\u3000", "a\udcff"):
        with pytest.raises(ValueError, match="plain folder name"):
            two.save_checkpoint(tmp_path, tag=name)
    assert two.save_checkpoint(tmp_path, tag=7) and (tmp_path / "latest").read_text() == "7"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["7", "best", "export", "global_step3"]
    for each in (one, two):
        each.destroy()
    zcomm.shutdown()


def tags_that_differ(folder: str, validation: str) -> list[Any]:
    import logging

    logging.getLogger("zcomm").propagate = True
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        "checkpoint": {"tag_validation": validation},
    }
    one = zcomm.initialize(model=nn.Linear(4, 2), config=config)[0]
    tag, said = f"of-rank-{one.global_rank}", []
    for call in (lambda: one.save_checkpoint(folder, tag), lambda: one.load_checkpoint(folder, tag)):
        try:
            said.append(call())
        except ValueError as error:
            said.append(str(error))
    for wrong in ("a/b", "latest", ""):
        with pytest.raises(ValueError, match="must be a plain folder name"):
            one.save_checkpoint(folder, wrong if one.global_rank == 0 else "good" if validation == "Ignore" else wrong)
    one.save_checkpoint(folder, "same", client_state={"n": 1})
    said.append(one.load_checkpoint(folder)[1])
    one.destroy()
    zcomm.shutdown()
    return said


@pytest.mark.parametrize("validation", ["Ignore", "Warn", "Fail"])
def test_tags_that_differ_between_ranks(run_ranks: Any, tmp_path: Path, validation: str) -> None:
    """Ranks ignore it, warn or fail, as DeepSpeed's key says; the folder is the same in any case."""
    results = run_ranks(tags_that_differ, 2, str(tmp_path), validation, check=False)
    logs = "".join(result.log for result in results)
    made = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    for result in results:
        assert result.error is None, result.describe()
        saved, loaded, state = result.value
        assert state == {"n": 1}
        if validation == "Fail":
            for said, call in ((saved, "save"), (loaded, "load")):
                assert said.startswith(f"{call}_checkpoint: the ranks' tags differ ('of-rank-0' on rank 0, 'of-rank-1'")
        else:
            assert saved is True and loaded == (str(tmp_path / "of-rank-0"), {})
    assert made == ["same"] if validation == "Fail" else made == ["of-rank-0", "same"]
    assert logs.count("so the tag of rank 0 is taken") == (2 if validation == "Warn" else 0), logs


def test_an_accumulation_begins_again_after_a_load(tmp_path: Path) -> None:
    """Gradients are not saved, so the next boundary is a whole accumulation later, of the present length."""

    def make(accumulation: int) -> Any:
        torch.manual_seed(0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
        }
        return zcomm.initialize(model=nn.Linear(4, 2), config=config)[0]

    one = make(4)
    for number in range(6):
        if number == 5:
            one.save_checkpoint(tmp_path, client_state={"n": number})
        one.backward(one(torch.ones(1, 4)).sum())
        one.step()
    assert (one.global_steps, one.micro_steps) == (1, 6)
    for accumulation in (4, 3):
        two = make(accumulation)
        two.load_checkpoint(tmp_path)
        before = two.module.weight.detach().clone()
        for number in range(accumulation):
            assert two.is_gradient_accumulation_boundary() == (number == accumulation - 1)
            assert torch.equal(two.module.weight, before)
            two.backward(two(torch.ones(1, 4)).sum())
            two.step()
        assert two.global_steps == 2 and not torch.equal(two.module.weight, before)
        two.destroy()
    one.destroy()
    zcomm.shutdown()


def test_an_accumulation_begins_again_after_weights_alone(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    }
    one = zcomm.initialize(model=nn.Linear(4, 1, bias=False), config=config)[0]
    one.save_checkpoint(tmp_path)
    one.backward(one(torch.ones(1, 4)).sum())
    one.step()
    one.load_checkpoint(tmp_path, load_module_only=True)
    before = one.module.weight.detach().clone()
    for number in range(2):
        assert one.is_gradient_accumulation_boundary() == (number == 1)
        one.backward(one(torch.ones(1, 4)).sum())
        one.step()
    torch.testing.assert_close(before - one.module.weight, torch.ones(1, 4))
    one.destroy()
    zcomm.shutdown()


class Counting(nn.Module):
    """A layer with extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.largest = nn.Linear(4, 4), 0, torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls, self.largest = self.calls + 1, self.largest + 1
        out: torch.Tensor = self.linear(x)
        return out

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "largest": self.largest, "more": b"\0\1"}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.largest = state["calls"], state["largest"]
        assert state["more"] == b"\0\1"


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("wait", [True, False])
def test_extra_state_of_modules_comes_back(
    tmp_path: Path, stage: int, wait: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
    config["optimizer"] = {"type": "SGD", "params": {"lr": 1.0}}

    def made(model: nn.Module) -> Any:
        return zcomm.initialize(model=model, config=config)[0]

    one = made(nn.Sequential(Counting(), Counting()))
    for _ in range(3):
        one.backward(one(torch.ones(1, 4)).sum())
        one.step()
    zero = one.optimizer
    task = zero.save(tmp_path / "alone", wait=wait)
    one(torch.ones(1, 4))
    if not wait:
        task.wait()
    one.save_checkpoint(tmp_path, tag="four")
    assert one.save_16bit_model(tmp_path) and "0._extra_state, 1._extra_state" in caplog.text
    one.destroy()
    model = load_state_dict_from_zero_checkpoint(nn.Sequential(Counting(), Counting()), tmp_path, "four")
    assert [each.calls for each in model] == [4, 4]  # type: ignore[union-attr]
    two = made(nn.Sequential(Counting(), Counting()))
    two.optimizer.load(tmp_path / "alone")
    assert [each.calls for each in two.module] == [3, 3] and two.module[1].largest.tolist() == [3.0, 3.0]
    two.load_checkpoint(tmp_path)
    assert [each.calls for each in two.module] == [4, 4] and two.module[0].largest.tolist() == [4.0, 4.0]
    two.destroy()
    plain = made(nn.Sequential(nn.ModuleDict({"linear": nn.Linear(4, 4)}), Counting()))
    with pytest.raises(ValueError, match=r"not in the model: 0\._extra_state"):
        plain.load_checkpoint(tmp_path)
    plain.destroy()
    zcomm.shutdown()


def test_extra_state_that_cannot_be_kept_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Counting()
    model.calls = object()  # type: ignore[assignment]
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=1)
    opt.save(tmp_path / "saved")
    assert 'not saved: extra["_extra_state"]["calls"] is object, which a checkpoint cannot keep' in caplog.text
    model.calls = 7
    opt.load(tmp_path / "saved")
    assert model.calls == 7 and "not in the checkpoint, and left as it is: _extra_state" in caplog.text
    opt.close()
    zcomm.shutdown()


def test_a_schedule_of_the_configuration_begins_later() -> None:
    def rates(steps: int, **params: Any) -> list[float]:
        config = {
            "train_batch_size": 4,
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, **params}},
        }
        one = zcomm.initialize(model=nn.Linear(4, 2), config=config)[0]
        found = []
        for _ in range(steps):
            one.backward(one(torch.ones(4, 4)).square().mean())
            one.step()
            found += one.get_lr()
        one.destroy()
        return found

    whole = rates(6)
    assert rates(3, last_batch_iteration=2)[-1] == whole[-1] and whole[-1] != whole[2]
    zcomm.shutdown()
