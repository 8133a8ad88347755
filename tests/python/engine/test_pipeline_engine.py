"""PipelineEngine: train_batch and eval_batch of stages give the numbers of one stage; checkpoints resume to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import zcomm
from zcomm.engine.pipeline_engine import PipelineEngine
from zcomm.engine.pipeline_module import PipelineError, PipelineModule
from zcomm.engine.pipeline_schedule import InferenceSchedule, TrainSchedule
from zcomm.engine.pipeline_topology import PipeDataParallelTopology, ProcessTopology
from zcomm.parallel import LayerSpec, TiedLayerSpec

Run = Callable[..., list[Any]]
WORDS, MICRO, STEPS = 11, 2, 4
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": MICRO,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 1},
    "steps_per_print": None,
}


def head(layer: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, layer.weight)


def loss_fn(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(output.flatten(0, 1), labels.flatten())


def module(**where: Any) -> PipelineModule:
    layers = [
        TiedLayerSpec("words", nn.Embedding, WORDS, 6),
        LayerSpec(nn.Linear, 6, 8),
        torch.tanh,
        LayerSpec(nn.Linear, 8, 6),
        TiedLayerSpec("words", nn.Embedding, WORDS, 6, forward_fn=head),
    ]
    return PipelineModule(layers, loss_fn=loss_fn, seed_layers=True, partition_method="parameters", **where)


def batches(start: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield micro-batches, the same on each data rank."""
    while True:
        generator = torch.Generator().manual_seed(start)
        words = torch.randint(WORDS, (2, MICRO, 4), generator=generator)
        yield words[0], words[1]
        start += 1


def engine_of(model: PipelineModule, **more: Any) -> PipelineEngine:
    made, optimizer, _, _ = zcomm.initialize(model=model, config=CONFIG | more)
    assert isinstance(made, PipelineEngine) and optimizer is not None
    return made


def train(stages: int, folder: str) -> dict[str, Any]:
    """Train; save after two steps, and let another engine go on from there."""
    comm = zcomm.init(timeout=60)
    engine, data = engine_of(module(num_stages=stages)), batches()
    losses = []
    for step in range(STEPS):
        losses.append(engine.train_batch(data).item())
        if step == 1:
            assert engine.save_checkpoint(folder, client_state={"seen": 8})
    assert (engine.global_steps, engine.micro_steps, engine.micro_batches) == (STEPS, STEPS * 4, 4)
    evaluated = engine.eval_batch(batches(50)).item()
    loss, logits = engine.eval_batch(batches(50), return_logits=True)
    assert loss.item() == evaluated and (logits is not None) == engine.is_last_stage()
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(PipelineError, match="train_batch"):
            call()
    with pytest.raises(ValueError, match="data ends before the 4 micro-batches"):
        engine.train_batch(iter(list(zip(range(1), batches(), strict=False))[:0]))
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.destroy()
    again = engine_of(module(num_stages=stages))
    path, client = again.load_checkpoint(folder)
    assert client == {"seen": 8} and path is not None and path.endswith("global_step2")
    resumed = batches(8)
    assert [again.train_batch(resumed).item() for _ in range(2)] == losses[2:]
    for name, value in again.module.state_dict().items():
        assert torch.equal(value, weights[name]), name
    with pytest.raises((FileNotFoundError, OSError), match="no-such"):
        again.load_checkpoint(folder, tag="no-such")
    again.destroy()
    del comm
    if stages > 1:  # the whole model on each rank goes on from the same folder
        whole = engine_of(module(num_stages=1))
        assert whole.load_checkpoint(folder)[1] == {"seen": 8} and whole.global_steps == 2
        resumed = batches(8)
        assert [whole.train_batch(resumed).item() for _ in range(2)] == pytest.approx(losses[2:], abs=1e-5)
        whole.destroy()
    return {"losses": losses, "eval": evaluated, "weights": {name: w.tolist() for name, w in weights.items()}}


def compare(folder: str, stages: int) -> None:
    found = train(stages, f"{folder}/stages")
    whole = train(1, f"{folder}/one")
    assert found["losses"] == pytest.approx(whole["losses"], abs=1e-5)
    assert found["eval"] == pytest.approx(whole["eval"], abs=1e-5)
    for name, values in found["weights"].items():
        torch.testing.assert_close(torch.tensor(values), torch.tensor(whole["weights"][name]), rtol=1e-5, atol=1e-5)


def test_two_stages_train_and_resume_as_one(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(compare, 2, str(tmp_path), 2)


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_four_ranks_train_and_resume_as_one(stages: int, run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(compare, 4, str(tmp_path), stages)


def test_refusals(world_of_one: None) -> None:
    with pytest.raises(RuntimeError, match="num_stages= or topology="):
        PipelineModule([nn.Linear(2, 2)])
    with pytest.raises(RuntimeError, match="num_stages=2 does not divide the 1 ranks"):
        PipelineModule([nn.Linear(2, 2)], num_stages=2)
    with pytest.raises(NotImplementedError, match="stage"):
        engine_of(module(num_stages=1), zero_optimization={"stage": 3})


def test_topology() -> None:
    topology = ProcessTopology(["pipe", "data", "model"], [2, 2, 2])
    assert topology.get_rank(pipe=1, data=0, model=1) == 5 and topology.get_coord(5) == (1, 0, 1)
    assert topology.get_axis_comm_lists("data") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert topology.filter_match(pipe=0, model=1) == [1, 3] and topology.get_axis_list("pipe", 1) == [4, 5, 6, 7]
    assert topology.get_rank_repr(5) == "model_01" and PipeDataParallelTopology(2, 3).get_dim("data") == 3
    with pytest.raises(ValueError, match="each axis"):
        topology.get_rank(pipe=1)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_schedules_match_between_stages(stages: int, count: int) -> None:
    """Each send of a step has its receive in the same step of the neighbour, and each pass comes once, in order."""
    for kind in (TrainSchedule, InferenceSchedule):
        steps = [list(kind(count, stages, stage)) for stage in range(stages)]
        assert len({len(each) for each in steps}) == 1
        names = [[[each.name for each in step] for step in of_stage] for of_stage in steps]
        for stage in range(stages):
            flat = [name for step in names[stage] for name in step]
            assert flat.count("ForwardPass") == count
            assert flat.count("BackwardPass") == (count if kind is TrainSchedule else 0)
            for step, found in enumerate(names[stage]):
                if stage + 1 < stages:
                    beside = names[stage + 1][step]
                    assert found.count("SendActivation") == beside.count("RecvActivation")
                    assert found.count("RecvGrad") == beside.count("SendGrad")


def casts(stages: int, folder: str) -> list[Any]:
    """Train on floating-point inputs in fp16, and with autocast. Returns: losses, scale and the dtypes of outputs."""
    zcomm.init(timeout=60)
    found: list[Any] = []
    half = {"enabled": True, "auto_cast": True, "initial_scale_power": 8, "loss_scale_window": 2}
    for more in ({"fp16": half}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}):
        layers = [LayerSpec(nn.Linear, 6, 8), torch.tanh, LayerSpec(nn.Linear, 8, 3)]
        model = PipelineModule(layers, num_stages=stages, loss_fn=functional.mse_loss, seed_layers=True)
        engine = engine_of(model, **more)
        dtypes = set()
        model.register_forward_hook(lambda module, args, output, found=dtypes: found.add(output.dtype))
        generator = torch.Generator().manual_seed(3)
        samples = [(torch.randn(6, generator=generator), torch.zeros(3)) for _ in range(32)]
        engine.set_dataloader(torch.utils.data.DataLoader(samples, batch_size=MICRO))
        losses = [engine.train_batch().item() for _ in range(4)]
        scale = engine._zero.loss_scale
        engine.save_checkpoint(f"{folder}/{len(found)}")
        engine._zero.loss_scaler.scale = 1.0
        engine.load_checkpoint(f"{folder}/{len(found)}")
        assert engine._zero.loss_scale == scale
        found.append([losses, scale, sorted(map(str, dtypes))])
        engine.destroy()
    return found


def test_casts_of_stages_are_those_of_one(run_ranks: Run, tmp_path: Path) -> None:
    (wanted,) = run_ranks(casts, 1, 1, str(tmp_path / "one"))
    assert [each[1:] for each in wanted] == [[512.0, ["torch.float16"]], [1.0, ["torch.bfloat16"]]]
    for found in run_ranks(casts, 2, 2, str(tmp_path / "two")):
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours[0] == pytest.approx(theirs[0], abs=1e-2) and ours[1:] == theirs[1:]


def positions(folder: str) -> None:
    """Load a checkpoint into an engine that has read further: it reads the same samples again. Refuse bare stages."""
    zcomm.init(timeout=60)
    words = torch.randint(WORDS, (24, 2, 4), generator=torch.Generator().manual_seed(1))
    made, *_ = zcomm.initialize(model=module(num_stages=2), config=CONFIG, training_data=[(x, y) for x, y in words])
    assert isinstance(made, PipelineEngine)
    made.train_batch()
    made.save_checkpoint(folder)
    losses = [made.train_batch().item() for _ in range(3)]
    made.load_checkpoint(folder)
    assert [made.train_batch().item() for _ in range(3)] == losses
    made.destroy()
    bare = PipelineModule([nn.Linear(4, 4), nn.Tanh()], num_stages=2, loss_fn=functional.mse_loss)
    with pytest.raises(ValueError, match=r"stage 1 \(rank 1\) of the pipeline has no trained parameter"):
        engine_of(bare)


def test_a_checkpoint_sets_the_position_in_the_data(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(positions, 2, str(tmp_path))
