"""Compression under an engine: equal bits in all stages, schedules by steps, checkpoints, export and cleaning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import zcomm
from compression_parts import bits, config, everything, method, model, rows, tokens
from tiers import slow
from zcomm import compression
from zcomm.zero import Units
from zero_jobs import digest, share_small_buckets

Run = Callable[..., list[Any]]
SECTION = everything("topk", offset=1)
OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 3e-2}}, "train_micro_batch_size_per_gpu": 3}


def engine_of(stage: int, section: dict[str, Any] = SECTION, seed: int = 0, **more: Any) -> Any:
    given = {**OPTIMIZER, **section, "zero_optimization": {"stage": stage}, **more}
    return zcomm.initialize(model=compression.prepare(model(seed=seed), given), config=given)[0]


def take_steps(engine: Any, first: int, last: int) -> list[str]:
    losses = []
    for step in range(first, last):
        out = engine(tokens(10 * step + engine.global_rank))
        loss = F.mse_loss(out, torch.ones_like(out))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()).hex())
    return losses


def stages(folder: str, which: tuple[int, ...]) -> dict[str, Any]:
    """Train, save, continue, export and clean in each stage, and return digests by stage."""
    zcomm.init(timeout=60)
    share_small_buckets()
    found: dict[str, Any] = {}
    for stage in which:
        engine = engine_of(stage)
        losses = take_steps(engine, 0, 3)
        place = Path(folder) / str(stage)
        engine.save_checkpoint(place)
        engine.save_16bit_model(place, exclude_frozen_parameters=stage == 1, wait=stage != 2)
        losses += take_steps(engine, 3, 5)
        whole = engine.optimizer.full_state_dict()
        found[f"losses {stage}"] = losses
        found[f"weights {stage}"] = digest(whole)
        engine.destroy()
        again = engine_of(stage, seed=1)
        again.load_checkpoint(place)
        assert again.compression_scheduler.training_steps == 3
        bits_now = [part.bits for part in again.module.modules() if hasattr(part, "target_bits")]
        assert bits_now == [4] * len(bits_now) and bits_now
        take_steps(again, 3, 5)
        later = again.optimizer.full_state_dict()
        found[f"again {stage}"] = digest(later)
        again.eval()
        with torch.no_grad():
            before = again(tokens())
        assert compression.clean(again, SECTION) is again
        torch.testing.assert_close(again(tokens()).detach(), before, rtol=1e-5, atol=1e-5)
        found[f"sizes {stage}"] = [tuple(param.shape) for param in again.module.parameters()]
        with pytest.raises(RuntimeError, match="this engine is closed"):
            take_steps(again, 5, 6)
        again.destroy()
    return found


@pytest.mark.parametrize("which", [(0, 3), slow((0, 1, 2))])
def test_all_stages_have_the_same_bits(run_ranks: Run, tmp_path: Path, which: tuple[int, ...]) -> None:
    found, _ = run_ranks(stages, 2, str(tmp_path), which)
    for stage in which:
        assert found[f"losses {stage}"] == found["losses 0"]
        assert found[f"weights {stage}"] == found[f"again {stage}"] == found["weights 0"]
        assert found[f"sizes {stage}"] == found["sizes 0"]
    sizes = found["sizes 0"]
    assert (12, 16) in sizes and (16, 12) in sizes and (8, 16) in sizes and (16, 8) in sizes
    plain = model().state_dict()
    files = [load_file(tmp_path / str(stage) / "model.safetensors") for stage in which]
    for each in files:
        assert {name: value.shape for name, value in each.items()} == {n: v.shape for n, v in plain.items()}
        assert digest(each) == digest(files[0])
        assert (each["blocks.0.fc.weight"] == 0).all(1).sum() == 12 == (each["blocks.0.fc.bias"] == 0).sum()
        assert (each["blocks.1.out.weight"] == 0).sum() == 96
    net = model()
    net.load_state_dict(files[0])  # under the names of a plain model


def test_the_file_has_the_values_of_the_step(tmp_path: Path) -> None:
    """One rank: the exported model computes the same as the engine, before and after the offset."""
    section = config(bits(6, 4, ["head", "embed"], 2, schedule_offset=1), rows("topk", schedule_offset=2))
    engine = engine_of(3, section)
    for step in range(4):
        engine.save_16bit_model(tmp_path)
        plain = model(seed=5)
        plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
        with torch.no_grad():
            assert torch.equal(plain(tokens()), engine(tokens())), step
        state = engine._zero3_consolidated_16bit_state_dict()
        assert state.keys() == plain.state_dict().keys()
        take_steps(engine, step, step + 1)
    engine.destroy()


def test_units_and_rows_of_prepared_layers_have_the_same_bits() -> None:
    found = set()
    for units in (None, Units(max_bytes=150_000), Units(max_bytes=70_000, rows=True)):
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.Sequential(nn.Linear(16, 2048), nn.ReLU(), nn.Linear(2048, 16)) for _ in range(2)))
        compression.prepare(net, config(bits(4, 4, [r"\d\.\d"], quantize_groups=16)))
        opt = zcomm.ZeroOptimizer(net, "adamw", lr=1e-2, stage=0 if units is None else 3, units=units or Units())
        for step in range(2):
            net(torch.ones(2, 16) * (step + 1)).square().sum().backward()
            opt.step()
            opt.zero_grad()
        found.add(digest(opt.full_state_dict()))
        opt.close()
    assert len(found) == 1


def test_skipped_steps_do_not_count() -> None:
    engine = engine_of(2, bf16={"enabled": True})
    take_steps(engine, 0, 1)
    engine.backward(engine(tokens()).sum() * float("nan"))
    engine.step()
    assert (engine.global_steps, engine.skipped_steps, engine.compression_scheduler.training_steps) == (2, 1, 1)
    engine.destroy()


def test_models_that_an_engine_refuses() -> None:
    with pytest.raises(ValueError, match=r"blocks.0.q is not prepared for it: call init_compression"):
        zcomm.initialize(model=model(), config={**OPTIMIZER, **SECTION})
    with pytest.raises(NotImplementedError, match="divides weights"):
        engine_of(0, tensor_parallel={"autotp_size": 2})
    from zcomm.engine.pipeline_module import PipelineModule

    with pytest.raises(NotImplementedError, match="not for the stages of a PipelineModule"):
        zcomm.initialize(model=PipelineModule([nn.Linear(3, 3)], 1), config={**OPTIMIZER, **SECTION})
    with pytest.raises(NotImplementedError, match=r"different_groups.one.*: begin with target_bits"):
        engine_of(0, eigenvalue={"enabled": True, "layer_name": "blocks", "layer_num": 2})
    engine = engine_of(0, config())
    with pytest.raises(ValueError, match=r"head has an optimizer: prepare the model before initialize"):
        compression.prepare(engine.module, config(bits(8, 8, ["head"])))
    assert engine.compression_scheduler is None
    engine.destroy()


def differing() -> str:
    rank = zcomm.init(timeout=60).rank
    try:
        engine_of(2, everything("topk", offset=rank))
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_schedules_are_an_error_on_all_ranks(run_ranks: Run) -> None:
    first, second = run_ranks(differing, 2)
    assert first == second and 'the ranks\' "compression_training" differ: ' in first
    assert "schedule_offset=0" in first and "schedule_offset=1" in first


def test_a_prepared_model_without_a_schedule_is_told(caplog: pytest.LogCaptureFixture) -> None:
    net = compression.prepare(model(), SECTION)
    zcomm.initialize(model=net, config=OPTIMIZER)[0].destroy()
    assert "enables no method: call step() of a zcomm.compression.Schedule" in caplog.text


def test_layer_by_layer_distillation_and_a_student_with_fewer_layers() -> None:
    """The loop of layer-by-layer knowledge distillation, with plain torch optimizers of single layers."""
    teacher = model(blocks=4)
    reduction = {
        "enabled": True,
        "keep_number_layer": 2,
        "module_name_prefix": "blocks",
        "teacher_layer": [1, 3],
        "other_module_name": ["embed", "head"],
    }
    given = config(bits(2, 2, ["blocks"], quantize_groups=4), {"layer_reduction": reduction})
    student = model(blocks=2, seed=3)
    with pytest.raises(ValueError, match="give the teacher_model="):
        compression.prepare(student, given)
    with pytest.raises(ValueError, match=r"the student has 3 layers in blocks"):
        compression.prepare(model(blocks=3), given, teacher)
    with pytest.raises(ValueError, match=r"the teacher has no module 'blocks.3'"):
        compression.prepare(model(blocks=2), given, model(blocks=3))
    compression.prepare(student, given, teacher)
    raw = student.blocks[1].fc.parametrizations["weight"].original
    assert torch.equal(raw, teacher.blocks[3].fc.weight) and torch.equal(student.head.bias, teacher.head.bias)
    for mine, its in zip(student.blocks, (teacher.blocks[1], teacher.blocks[3]), strict=True):
        x = teacher.embed(torch.arange(11).view(1, 11)).detach()
        before = F.mse_loss(mine(x), its(x)).item()
        optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
        for _ in range(40):
            optimizer.zero_grad()
            F.mse_loss(mine(x), its(x).detach()).backward()
            optimizer.step()
        assert F.mse_loss(mine(x), its(x)).item() < 0.7 * before
    compression.clean(student, given)
    assert len(student.blocks[0].fc.weight.unique()) <= 4 * 3


def distilled(stage: int | None) -> list[float]:
    """Return the losses of one layer; stage: None: without an engine."""
    given = config(bits(4, 4, ["blocks"], quantize_groups=4))
    teacher, student = model(), compression.prepare(model(), given)
    engine = None
    if stage is not None:
        settings = {**OPTIMIZER, **given, "zero_optimization": {"stage": stage}}
        engine = zcomm.initialize(model=student, config=settings)[0]
    layer, x = student.blocks[0], teacher.embed(tokens()).detach()
    optimizer, losses = torch.optim.AdamW(layer.parameters(), lr=1e-3), []
    for _ in range(3):
        loss = F.mse_loss(layer(x), teacher.blocks[0](x).detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if engine is not None:
        assert torch.equal(engine(tokens()), student(tokens()))
        engine.destroy()
    return losses


def test_a_layer_of_an_engine_is_distilled_by_an_optimizer_of_the_program() -> None:
    """The engine has an optimizer of its own, which takes no step, as in the example of DeepSpeed."""
    plain = distilled(None)
    assert plain[2] < plain[0] and distilled(0) == distilled(2) == plain


def test_static_ranges_and_l1_masks_are_in_checkpoints(tmp_path: Path) -> None:
    section = config(
        method("activation_quantization", {"bits": 8}, ["head"], range_calibration="static"),
        method("sparse_pruning", {"dense_ratio": 0.5}, ["head"], method="l1"),
    )
    first = engine_of(1, section)
    take_steps(first, 0, 2)
    first.save_checkpoint(tmp_path)
    second = engine_of(3, section, seed=1)
    second.load_checkpoint(tmp_path)
    for engine in (first, second):
        engine.eval()
    assert torch.equal(first(tokens()), second(tokens()))
    for engine in (first, second):
        engine.destroy()
