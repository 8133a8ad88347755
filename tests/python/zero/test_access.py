"""full_param, full_grad, full_optim_state and setters; state_dict; no_sync; fp16's loss scale; non-finite gradients."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero import LossScale
from zero_jobs import digest

Run = Callable[..., list[Any]]
PLACES: list[tuple[int, str | None]] = [(0, None), (1, "cpu"), (2, "nvme"), (3, None), (3, "nvme")]


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(9, 33), nn.Tanh(), nn.Linear(33, 40), nn.Tanh(), nn.Linear(40, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(5, 9, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(model: nn.Module, step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return model(batch(step, rank).to(dtype)).float().square().mean()


def small_tiles() -> None:
    import zcomm.zero.layout.tiles
    import zcomm.zero.optim_state.nvme

    zcomm.zero.layout.tiles.TILE_COUNT = 192
    zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = 2, 4


def look(folder: str, precision: str) -> list[dict[str, Any]]:
    """Return the results of all accessors, and of each setter's check."""
    small_tiles()
    comm = zcomm.init(timeout=60)
    seen = []
    for stage, offload in PLACES:
        model = network()
        names = dict(model.named_parameters())
        opt = zcomm.ZeroOptimizer(
            model,
            stage=stage,
            offload=offload,
            nvme_path=folder,
            precision=precision,
            lr=0.1,
            loss_scale=_scale(precision),
        )
        dtype = opt.precision.dtype
        weight = names["2.weight"]
        answers: dict[str, Any] = {"before": zcomm.zero.full_grad(weight)}
        for step in range(2):
            opt.backward(loss_of(model, step, comm.rank, dtype))
            if step == 1:
                answers["grads"] = digest({n: zcomm.zero.full_grad(p) for n, p in names.items()})
                answers["grad"] = zcomm.zero.full_grad(weight)
            opt.step()
            opt.zero_grad()
        answers["after"] = zcomm.zero.full_grad(weight)
        for key in ("exp_avg", "exp_avg_sq"):
            answers[key] = digest({n: zcomm.zero.full_optim_state(p, key) for n, p in names.items()})
        answers["masters"] = digest({n: zcomm.zero.full_param(p) for n, p in names.items()})
        answers["step"] = float(zcomm.zero.full_optim_state(weight, "step"))
        whole, rounded = zcomm.zero.full_param(weight), opt.full_state_dict()["2.weight"]
        answers["rounding"] = float((whole - rounded.float()).abs().max() / whole.abs().max())
        answers["set"] = set_and_go_on(opt, model, weight, comm.rank, dtype)
        opt.close()
        seen.append(answers)
    return seen


def _scale(precision: str) -> Any:
    return LossScale(8) if precision == "fp16" else None


def set_and_go_on(opt: Any, model: nn.Module, weight: Any, rank: int, dtype: torch.dtype) -> tuple[bool, str]:
    value = torch.linspace(-1, 1, 40 * 33).view(40, 33) / 3
    zcomm.zero.set_full_param(weight, value)
    zcomm.zero.set_full_optim_state(weight, value.abs(), "exp_avg_sq")
    same = torch.equal(zcomm.zero.full_param(weight), value)
    same = same and torch.equal(zcomm.zero.full_optim_state(weight, "exp_avg_sq"), value.abs())
    opt.backward(loss_of(model, 7, rank, dtype))
    gradient = zcomm.zero.full_grad(weight)
    zcomm.zero.set_full_grad(weight, 2 * gradient)
    same = same and torch.equal(zcomm.zero.full_grad(weight), 2 * gradient)
    opt.step()
    opt.zero_grad()
    return same, digest({n: zcomm.zero.full_param(p) for n, p in model.named_parameters()})


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_whole_tensors_in_every_stage_and_tier(run_ranks: Run, tmp_path: Path, precision: str) -> None:
    for answers in run_ranks(look, 2, str(tmp_path), precision):
        for place, answer in zip(PLACES, answers, strict=True):
            assert answer["before"] is None and answer["after"] is None
            assert answer["step"] == 2.0 and answer["set"][0], place
            assert answer["rounding"] < {"fp32": 1e-30, "bf16": 2**-8, "fp16": 2**-11}[precision]
            for key in ("grads", "exp_avg", "exp_avg_sq", "masters", "set"):
                assert answer[key] == answers[0][key], f"{key} of {place}"
        if precision == "fp32":
            gradients = []
            for rank in range(2):
                model = network()
                opt = torch.optim.AdamW(model.parameters(), lr=0.1)
                (sum(loss_of(model, 0, r) for r in range(2)) / 2).backward()
                opt.step()
                opt.zero_grad()
                loss_of(model, 1, rank).backward()
                gradients.append(model[2].weight.grad)
            torch.testing.assert_close(answers[0]["grad"], (gradients[0] + gradients[1]) / 2, rtol=1e-3, atol=1e-6)


def test_what_does_not_fit_is_named() -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, stage=1)
    weight = model[0].weight
    with pytest.raises(
        ValueError, match=r"0\.weight has no optimizer state 'momentum'; it has exp_avg, exp_avg_sq, step"
    ):
        zcomm.zero.full_optim_state(weight, "momentum")
    with pytest.raises(ValueError, match=r"0\.weight: the value has shape \(3,\), not \(33, 9\)"):
        zcomm.zero.set_full_param(weight, torch.ones(3))
    with pytest.raises(RuntimeError, match=r"0\.weight has no gradient to set"):
        zcomm.zero.set_full_grad(weight, torch.ones(33, 9))
    with pytest.raises(ValueError, match="is not a parameter of an open ZeroOptimizer"):
        zcomm.zero.full_param(torch.ones(2))
    opt.close()
    with pytest.raises(ValueError, match="is not a parameter"):
        zcomm.zero.full_param(weight)
    zcomm.shutdown()


# --- state_dict -----------------------------------------------------------------------------------------------


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[1:]}, {"params": params[:1], "lr": 0.03}]


def round_trip(folder: str, precision: str) -> None:
    comm = zcomm.init(timeout=60)
    model = network()
    given = torch.optim.Adam(grouped(model), lr=0.01)
    one = zcomm.ZeroOptimizer(model, given, stage=3, offload="nvme", nvme_path=folder, precision=precision)
    dtype = one.precision.dtype
    for step in range(2):
        one.backward(loss_of(model, step, comm.rank, dtype))
        one.step()
        one.zero_grad()
    state, weights = one.state_dict(), one.full_state_dict()
    assert sorted(state["state"]) == list(range(6))
    assert ("master" in state["state"][0]) == (precision != "fp32")
    twin = network()
    two = zcomm.ZeroOptimizer(twin, torch.optim.Adam(grouped(twin)), stage=1, precision=precision)
    if precision == "fp32":
        for name, p in twin.named_parameters():
            zcomm.zero.set_full_param(p, weights[name])
        plain = network()
        plain.load_state_dict(weights)
        torch_opt = torch.optim.Adam(grouped(plain))
        torch_opt.load_state_dict(copy.deepcopy(state))  # a copy, because torch steps in place
        (sum(loss_of(plain, 5, r) for r in range(2)) / 2).backward()
        torch_opt.step()
    two.load_state_dict(state)
    assert [group["lr"] for group in two.param_groups] == [0.01, 0.03]
    results = []
    for opt, net in ((one, model), (two, twin)):
        opt.backward(loss_of(net, 5, comm.rank, dtype))
        opt.step()
        results.append({n: zcomm.zero.full_param(p) for n, p in net.named_parameters()})
        opt.close()
    assert digest(results[0]) == digest(results[1])
    if precision == "fp32":
        for name, value in plain.named_parameters():
            torch.testing.assert_close(results[0][name], value.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_dict_goes_to_other_stages_and_to_torch(run_ranks: Run, tmp_path: Path, precision: str) -> None:
    run_ranks(round_trip, 2, str(tmp_path), precision)


def test_state_of_torch_and_of_the_fused_classes_loads() -> None:
    for precision in ("fp32", "bf16"):
        source = network().to(torch.float32 if precision == "fp32" else torch.bfloat16)
        kind: Any = torch.optim.SGD if precision == "fp32" else zcomm.optim.CPUSGD
        theirs = kind(source.parameters(), lr=0.1, momentum=0.9)
        model = network()
        model.load_state_dict(source.state_dict())
        ours = zcomm.ZeroOptimizer(model, "sgd", stage=2, lr=0.1, momentum=0.9, precision=precision)
        for step in range(3):
            if step == 2:
                for (_, p), (_, q) in zip(model.named_parameters(), source.named_parameters(), strict=True):
                    zcomm.zero.set_full_param(p, q)
                ours.load_state_dict(theirs.state_dict())
                ours.zero_grad()
                ours.backward(loss_of(model, step, 0, ours.precision.dtype))
                ours.step()
            loss_of(source, step, 0, ours.precision.dtype).backward()
            theirs.step()
            theirs.zero_grad()
        for p, q in zip(model.parameters(), source.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
        ours.close()
    zcomm.shutdown()


def test_another_optimizers_state_is_refused() -> None:
    model = network()
    lion = zcomm.ZeroOptimizer(model, "lion", stage=1)
    lion.backward(loss_of(model, 0, 0))
    lion.step()
    state = lion.state_dict()
    lion.close()
    adam = zcomm.ZeroOptimizer(network(), stage=1)
    with pytest.raises(ValueError, match=r"0\.weight lacks exp_avg_sq of adamw"):
        adam.load_state_dict(state)
    state["param_groups"].append({"params": []})
    with pytest.raises(ValueError, match=r"groups of \[6, 0\] parameters, this optimizer has \[6\]"):
        adam.load_state_dict(state)
    adam.close()
    zcomm.shutdown()


# --- no_sync --------------------------------------------------------------------------------------------------


def accumulate_locally(folder: str) -> list[str]:
    comm = zcomm.init(timeout=60)
    hashes = []
    for stage, offload in PLACES:
        model = network()
        opt = zcomm.ZeroOptimizer(model, "sgd", stage=stage, offload=offload, nvme_path=folder, lr=0.1)
        reducer, sent = opt._live.reducer, []

        (transport,) = reducer.accumulators.kinds

        def count(*given: Any, plain: Any = transport.start, sent: list[int] = sent) -> None:
            sent.append(given[0].index)
            plain(*given)

        transport.start = count  # type: ignore[method-assign]
        for step in range(3):
            sent.clear()
            with opt.no_sync():
                loss_of(model, 2 * step, comm.rank).backward()
            assert not sent and reducer.reached == 0
            loss_of(model, 2 * step + 1, comm.rank).backward()
            assert len(sent) == len(opt._live.geometry.buckets) and reducer.reached == 1, "both passes went as one"
            opt.step()
            opt.zero_grad()
        hashes.append(digest({n: zcomm.zero.full_param(p) for n, p in model.named_parameters()}))
        ours = {n: zcomm.zero.full_param(p) for n, p in model.named_parameters()}
        opt.close()
    plain = network()
    torch_opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    for number in range(6):
        (sum(loss_of(plain, number, r) for r in range(2)) / 2).backward()
        if number % 2:
            torch_opt.step()
            torch_opt.zero_grad()
    for name, value in plain.named_parameters():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-4, atol=1e-6)
    return hashes


def test_no_sync_sums_locally_and_reduces_once(run_ranks: Run, tmp_path: Path) -> None:
    for hashes in run_ranks(accumulate_locally, 2, str(tmp_path)):
        assert len(set(hashes)) == 1


def test_no_sync_inside_of_no_sync(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, stage=2)
    with opt.no_sync():
        with opt.no_sync():
            loss_of(model, 0, 0).backward()
        loss_of(model, 1, 0).backward()
        assert opt._live.reducer.reached == 0 and model[0].weight.grad is not None, "the outer block goes on"
    with caplog.at_level(logging.WARNING, "zcomm"):
        model[:2](torch.ones(1, model[0].in_features)).sum().backward()
        assert opt._live.reducer.reached == 1
        opt.step()
    assert not caplog.records, "what only a pass in no_sync() has reached is used"
    opt.close()
    zcomm.shutdown()


def test_a_step_without_a_reducing_pass_says_so() -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, stage=2)
    with opt.no_sync():
        loss_of(model, 0, 0).backward()
    with pytest.raises(RuntimeError, match=r"all gradients are from no_sync\(\)"):
        opt.step()
    opt.close()
    zcomm.shutdown()


# --- fp16 -----------------------------------------------------------------------------------------------------


def test_the_loss_scale_follows_deepspeeds_rule(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(
        model, "sgd", stage=2, lr=1e-3, precision="fp16", loss_scale=LossScale(4, window=3, hysteresis=2, minimum=4.0)
    )
    assert model[0].weight.dtype == torch.float16
    scales, skipped = [], []
    bad = {1, 2, 4, 5, 6}
    for step in range(12):
        loss = loss_of(model, step, 0, torch.float16)
        if step in bad:
            loss = loss + model[2].bias.float().sum() * float("inf")
        opt.backward(loss)
        before = model[0].weight.clone()
        opt.step()
        opt.zero_grad()
        assert torch.equal(before, model[0].weight) == (step in bad)
        scales.append(opt.loss_scale)
        skipped.append(opt.skipped_steps)
    # hysteresis swallows the first overflow, minimum holds the last; a good step and three more double
    assert scales == [16, 16, 8, 8, 4, 4, 4, 4, 4, 4, 8, 8]
    assert skipped == [0, 1, 2, 2, 3, 4, 5, 5, 5, 5, 5, 5]
    assert opt.param_groups[0]["step"] == 7 and opt.step_count == 12
    assert opt.nonfinite is not None and (opt.nonfinite.step, opt.nonfinite.parameter) == (7, "2.bias")
    first = caplog.records[0].getMessage()
    assert first == "step 2: the gradient of 2.bias is not finite; loss scale 16, step skipped"
    opt.close()
    zcomm.shutdown()


def test_fp16_trains_what_fp32_trains() -> None:
    ends = {}
    for precision in ("fp32", "fp16"):
        model = network()
        opt = zcomm.ZeroOptimizer(model, stage=2, lr=1e-2, precision=precision, clip_norm=0.5)
        for step in range(30):
            opt.backward(loss_of(model, step % 5, 0, opt.precision.dtype))
            opt.step()
            opt.zero_grad()
        ends[precision] = sum(loss_of(model, step, 0, opt.precision.dtype).item() for step in range(5))
        opt.close()
    assert ends["fp16"] == pytest.approx(ends["fp32"], rel=0.05)
    zcomm.shutdown()


def test_fp16_wants_its_own_backward() -> None:
    model = network()
    opt = zcomm.ZeroOptimizer(model, stage=1, precision="fp16")
    loss_of(model, 0, 0, torch.float16).backward()
    with pytest.raises(RuntimeError, match=r"needs opt\.backward\(loss\)"):
        opt.step()
    opt.close()
    with pytest.raises(ValueError, match=r"loss_scale=8\.0 needs precision='fp16'"):
        zcomm.ZeroOptimizer(model, loss_scale=8.0)
    with pytest.raises(ValueError, match="LossScale: window=0"):
        LossScale(window=0)
    zcomm.shutdown()


def find_bad(folder: str) -> tuple[Any, Any]:
    comm = zcomm.init(timeout=60)
    model = network()
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=3, lr=0.1)
    loss = loss_of(model, 0, comm.rank)
    if comm.rank == 1:  # one rank's nan reaches all ranks
        loss = loss + (model[2].weight[39] * float("nan")).sum() + (model[4].bias * float("nan")).sum()
    loss.backward()
    opt.step()
    found = opt.nonfinite
    opt.close()
    return found.step, found.parameter


def test_the_first_bad_gradient_is_named_in_every_precision(run_ranks: Run, tmp_path: Path) -> None:
    assert run_ranks(find_bad, 2, str(tmp_path)) == [(1, "2.weight")] * 2


# --- schedules ------------------------------------------------------------------------------------------------


def test_one_cycle_moves_rates_and_betas_of_torch() -> None:
    rates, ends = [], []
    for ours in (False, True):
        model = network()
        adam = torch.optim.AdamW(model.parameters(), lr=0.01)
        opt: Any = zcomm.ZeroOptimizer(model, adam, stage=1) if ours else adam
        schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=8)
        seen = []
        for step in range(7):
            loss_of(model, step, 0).backward()
            opt.step()
            opt.zero_grad()
            schedule.step()
            seen.append((opt.param_groups[0]["lr"], opt.param_groups[0]["betas"]))
        rates.append(seen)
        weights = [p.detach().clone() for p in model.parameters()]
        if ours:
            opt.close()
        ends.append(weights)
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-4, atol=1e-6)
    assert rates[0] == rates[1]
    zcomm.shutdown()
