"""Keys of the configuration by their effect on training: sums, autocast, unmanaged accumulation, small state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

SGD = {"type": "SGD", "params": {"lr": 0.1}}


@pytest.fixture
def job() -> Iterator[None]:
    """Leave the world of one that initialize() joins."""
    import zcomm

    yield
    zcomm.shutdown()


def engine_of(model: nn.Module | None = None, **config: Any) -> Any:
    import zcomm

    torch.manual_seed(3)
    model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "gradient_clipping": 0, **config}
    return zcomm.initialize(model=model, config=config)[0]


def own_rank() -> int:
    import zcomm

    return zcomm.init().rank


def micro_step(engine: Any, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, 4, generator=generator), torch.randn(2, 2, generator=generator)
    loss = F.mse_loss(engine(x).float(), y)
    engine.backward(loss)
    return loss.detach()


def weights(engine: Any) -> torch.Tensor:
    whole = engine.optimizer.full_state_dict()
    return torch.cat([value.float().flatten() for value in whole.values()])


def by_torch(seeds: list[list[int]], divide: float, clip: float | None = None, autocast: Any = None) -> torch.Tensor:
    """Train as engine_of does: per step, the gradients of all losses are summed and divided."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for of_step in seeds:
        for seed in of_step:
            generator = torch.Generator().manual_seed(seed)
            x, y = torch.randn(2, 4, generator=generator), torch.randn(2, 2, generator=generator)
            with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                out = model(x)
            (F.mse_loss(out.float(), y) / divide).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([param.detach().flatten() for param in model.parameters()])


def sums(rank: int, stage: int, op: str, clip: float) -> tuple[torch.Tensor, float]:
    config = {"gradient_allreduce_op": op, "zero_optimization": {"stage": stage}, "gradient_clipping": clip}
    engine = engine_of(gradient_accumulation_steps=2, **config)
    for step in range(2):
        for micro in range(2):
            micro_step(engine, 100 * step + 10 * micro + rank)
            engine.step()
    found = weights(engine), engine.get_global_grad_norm()
    engine.destroy()
    return found


def sums_of_all() -> list[Any]:
    rank = own_rank()
    cases = [(0, "sum", 0.0), (1, "sum", 0.0), (2, "sum", 0.05), (3, "sum", 0.0), (2, "mean", 0.0)]
    return [sums(rank, *case) for case in cases]


SEEDS = [[100 * step + 10 * micro + rank for micro in range(2) for rank in range(2)] for step in range(2)]


def test_gradient_allreduce_op(run_ranks: Callable[..., list[Any]]) -> None:
    """The sum over 2 ranks equals torch's with losses divided only by the micro-steps; the norm follows."""
    wanted = [by_torch(SEEDS, 2), by_torch(SEEDS, 2), by_torch(SEEDS, 2, clip=0.05), by_torch(SEEDS, 2)]
    wanted.append(by_torch(SEEDS, 4))
    for of_rank in run_ranks(sums_of_all, 2):
        for (found, _), expected in zip(of_rank, wanted, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        assert of_rank[0][1] > of_rank[4][1] > 0
    assert not torch.allclose(wanted[0], wanted[4])


def other_op() -> str:
    rank = own_rank()
    with pytest.raises(ValueError, match="differ") as caught:
        engine_of(gradient_allreduce_op=("sum", "mean")[rank])
    return str(caught.value)


def test_ranks_that_ask_for_different_sums_raise(run_ranks: Callable[..., list[Any]]) -> None:
    assert all("gradient_allreduce_op" in text for text in run_ranks(other_op, 2))


class Seen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(x)
        self.dtypes.append(out.dtype)
        return out


def stage(of: str, folder: Path) -> dict[str, Any]:
    """Return the section of stage 0 or 3, or of unit-wise stage 3, which the CPU has only for swapped weights."""
    return (
        {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(folder)}}
        if of == "units"
        else {"stage": int(of)}
    )


@pytest.mark.parametrize("of", ["0", "3", "units"])
@pytest.mark.parametrize(("name", "dtype"), [("bfloat16", torch.bfloat16), ("fp16", torch.float16)])
def test_torch_autocast(job: None, tmp_path: Path, of: str, name: str, dtype: torch.dtype) -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": name}, "zero_optimization": stage(of, tmp_path)}
    torch.manual_seed(3)
    engine = engine_of(Seen(), fp16={"initial_scale_power": 4}, **config)
    for seed in range(3):
        micro_step(engine, seed)
        engine.step()
    assert engine.module.dtypes == [dtype] * 3 and not torch.is_autocast_enabled("cpu")
    assert engine.optimizer.loss_scale == (16.0 if dtype == torch.float16 else 1.0)
    expected = by_torch([[seed] for seed in range(3)], 1, autocast=dtype)
    tolerance = 1e-3 if dtype == torch.float16 else 1e-6  # the loss scale changes the rounding
    torch.testing.assert_close(weights(engine), expected, rtol=tolerance, atol=tolerance)
    plain = by_torch([[seed] for seed in range(3)], 1)
    assert not torch.equal(weights(engine), plain)
    engine.destroy()


def test_autocast_in_fp16_skips_steps_that_overflow(job: None) -> None:
    engine = engine_of(torch_autocast={"enabled": True, "dtype": "float16"}, fp16={"initial_scale_power": 4})
    before = weights(engine).clone()
    loss = micro_step(engine, 0)
    engine.module[0].weight.grad.fill_(float("inf"))
    engine.step()
    assert torch.equal(weights(engine), before) and engine.skipped_steps == 1 and torch.isfinite(loss)
    engine.destroy()


def unmanaged(rank: int, stage: int) -> tuple[torch.Tensor, int, int]:
    config = {"managed_gradient_accumulation": False, "zero_optimization": {"stage": stage}}
    engine = engine_of(gradient_accumulation_steps=2, **config)
    for step, passes in enumerate((2, 3)):  # not the configured number of passes
        for micro in range(passes):
            assert not engine.is_gradient_accumulation_boundary()
            micro_step(engine, 100 * step + 10 * micro + rank)
        engine.step()
    with pytest.raises(RuntimeError, match="each step"):
        engine.set_gradient_accumulation_boundary(True)
    found = weights(engine), engine.global_steps, engine.global_samples
    engine.destroy()
    return found


def unmanaged_in_all() -> list[Any]:
    rank = own_rank()
    return [unmanaged(rank, stage) for stage in (0, 2, 3)]


def test_unmanaged_accumulation_updates_at_each_step(run_ranks: Callable[..., list[Any]]) -> None:
    passes = [
        [100 * step + 10 * micro + rank for micro in range(n) for rank in range(2)] for step, n in [(0, 2), (1, 3)]
    ]
    expected = by_torch(passes, 4)
    for of_rank in run_ranks(unmanaged_in_all, 2):
        for found, steps, samples in of_rank:
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
            assert (steps, samples) == (2, (2 + 3) * 2 * 2)


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize(
    "section", [{"bf16": {"enabled": True, "bf16_optimizer_states": True}}, {"fp32_optimizer_states": False}]
)
def test_moments_in_bf16(job: None, groups: bool, section: dict[str, Any]) -> None:
    import zcomm

    params = {"lr": 0.01, **({} if "bf16" in section else section)}
    model = nn.Linear(4, 2)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": params}, "bf16": section.get("bf16", {})}
    given = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.1}] if groups else None
    engine, optimizer, *_ = zcomm.initialize(model=model, config=config, model_parameters=given)
    assert optimizer.rule.state_dtype == torch.bfloat16
    engine.destroy()


def test_bf16_moments_of_an_optimizer_of_the_program_are_refused(job: None) -> None:
    import zcomm

    model = nn.Linear(4, 2)
    config = {"train_batch_size": 2, "bf16": {"enabled": True, "bf16_optimizer_states": True}}
    with pytest.raises(NotImplementedError, match=r"CPUAdam\(..., state_dtype"):
        zcomm.initialize(model=model, config=config, optimizer=torch.optim.AdamW(model.parameters()))


def test_csv_monitor_of_an_engine(job: None, tmp_path: Path) -> None:
    section = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    schedule = {"type": "WarmupLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 0.1, "warmup_type": "linear"}}
    config = {"scheduler": schedule, "wall_clock_breakdown": True, "torch_autocast": {"enabled": True, "dtype": "fp16"}}
    engine = engine_of(csv_monitor=section, gradient_accumulation_steps=2, **config)
    losses, rates = [], []
    for step in range(2):
        pair = []
        for micro in range(2):
            pair.append(micro_step(engine, 2 * step + micro).item())
            engine.step()
        losses.append(sum(pair) / 2)
        rates.append(engine.get_lr()[0])
    engine.destroy()
    files = {path.stem.removeprefix("Train_Samples_"): path.read_text().split() for path in tmp_path.glob("job/*.csv")}
    times = [f"elapsed_time_ms_{name}" for name in ("forward", "backward", "step")]
    assert sorted(files) == sorted(["train_loss", "lr", "loss_scale", *times])
    assert files["lr"] == ["step,lr", *(f"{4 * n},{rate}" for n, rate in enumerate(rates, 1))]
    assert files["loss_scale"] == ["step,loss_scale", "4,65536.0", "8,65536.0"]
    assert [float(row.split(",")[1]) for row in files["train_loss"][1:]] == pytest.approx(losses)
    assert all(float(row.split(",")[1]) > 0 for name in times for row in files[name][1:])


@pytest.mark.parametrize("of", ["0", "3", "units"])
def test_flops_profiler(job: None, tmp_path: Path, capfd: pytest.CaptureFixture[str], of: str) -> None:
    file = tmp_path / "logs" / "flops.txt"
    section = {"enabled": True, "profile_step": 1, "output_file": str(file)}
    engine = engine_of(flops_profiler=section, gradient_accumulation_steps=2, zero_optimization=stage(of, tmp_path))
    for micro in range(6):
        assert file.exists() is (micro >= 4)
        micro_step(engine, micro)
        engine.step()
    text = file.read_text()
    assert "step 1, rank 0 of 1" in text and "samples of the step, all ranks 4" in text
    flops = 2 * 2 * 2 * (4 * 8 + 8 * 2)  # two passes of two samples, a product and a sum for each weight
    assert f"forward FLOPs                  {flops} FLOPs" in text and "forward passes                 2" in text
    assert "backward latency" in text and "step latency" in text and "Sequential.0: 256 FLOPs, 66.7 %" in text
    assert capfd.readouterr().out == ""
    engine.destroy()


def logged(zero: dict[str, Any]) -> Any:
    from zcomm.profiling import comms

    engine = engine_of(comms_logger={"enabled": True}, zero_optimization=zero)
    comms.logger.reset_data()
    for seed in range(2):
        micro_step(engine, seed)
        engine.step()
    found = comms.log_summary(show_straggler=True, return_dict=True)
    plain = weights(engine)
    engine.destroy()
    count = comms.logger.get_total_operations()
    engine = engine_of(zero_optimization=zero)
    for seed in range(2):
        micro_step(engine, seed)
        engine.step()
    same = torch.equal(plain, weights(engine))
    engine.destroy()
    return found, same, comms.logger.get_total_operations() == count


def test_comms_logger_beside_a_profile(job: None, tmp_path: Path) -> None:
    import zcomm
    from zcomm.profiling import comms

    engine = engine_of(comms_logger={"enabled": True})
    core = engine.optimizer._live.comm._core
    comms.logger.reset_data()
    with zcomm.profile(tmp_path / "trace.json"):
        micro_step(engine, 0)
        engine.step()
        inside = comms.logger.get_total_operations()
    assert engine.optimizer._live.comm._core is core
    micro_step(engine, 0)
    engine.step()
    assert comms.logger.get_total_operations() > inside > 0
    assert "reduce_scatter" in (tmp_path / "trace.json").read_text()
    engine.destroy()


@pytest.mark.parametrize("of", ["0", "units"])
def test_comms_logger(run_ranks: Callable[..., list[Any]], tmp_path: Path, of: str) -> None:
    for rank, (found, same, is_over) in enumerate(run_ranks(logged, 2, stage(of, tmp_path))):
        assert same and is_over
        units = found["summary"].get("barrier", {}).get(0, {"count": 0})["count"]  # ranks of a host share slots
        assert of == "0" or units >= 2 * 2 * 2
        rows = found["summary"]["reduce_scatter"]
        count = sum(row["count"] for row in rows.values())
        assert count == 2 or of == "units"  # one bucket, two steps
        nbytes, row = max(rows.items())
        assert nbytes >= 4 * (8 * 4 if of == "units" else 8 * 4 + 8 + 8 * 2 + 2) and row["total_latency_ms"] > 0
        assert row["busbw_avg_gbps"] == pytest.approx(row["tput_avg_gbps"] / 2)
        late = found["straggler_analysis"]["reduce_scatter"][nbytes]
        assert late["total_straggler_ms"] >= 0 and late["total_comm_lat_ms"] <= row["total_latency_ms"]
        assert found["metadata"]["rank"] == rank and found["metadata"]["world_size"] == 2


@pytest.mark.parametrize("auto_cast", [True, False])
def test_auto_cast_gives_the_forward_inputs_in_fp16(job: None, auto_cast: bool) -> None:
    seen: list[Any] = []

    class Noting(nn.Linear):
        def forward(self, x: torch.Tensor, *rest: Any, **words: Any) -> torch.Tensor:
            seen.extend([x.dtype, rest[0]["ids"].dtype, rest[0]["pair"][1].dtype, words["z"].dtype])
            return super().forward(x.half())

    engine = engine_of(Noting(4, 2), fp16={"enabled": True, "auto_cast": auto_cast})
    inside = {"ids": torch.ones(1, dtype=torch.long), "pair": (1, torch.ones(1))}
    engine(torch.ones(2, 4), inside, z=torch.ones(1))
    cast = torch.float16 if auto_cast else torch.float32
    assert seen == [cast, torch.int64, cast, torch.float32] and inside["pair"][1].dtype == torch.float32
    engine.destroy()
