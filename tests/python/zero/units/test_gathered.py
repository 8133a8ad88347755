"""GatheredParameters in every stage and tier, and before ZeroOptimizer."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.zero import GatheredParameters
from zcomm.zero.tensors import forgotten
from zero_jobs import Case, batch, digest, loss_of, small_gpt

Run = Callable[..., list[Any]]

CASES = [
    (stage, offload, share)
    for stage, offload, share in (
        (0, None, True), (0, "nvme", True), (1, None, True), (2, "cpu", False), (2, "nvme", True), (3, None, True),
        (3, None, False), (3, "cpu", False), (3, "nvme", True), (3, "nvme", False),
    )
]  # fmt: skip


def masters(model: nn.Module) -> str:
    return digest({n: zcomm.zero.full_param(p) for n, p in model.named_parameters() if p.requires_grad})


def one_step(opt: Any, model: nn.Module, number: int, rank: int) -> None:
    loss_of(model, *batch(rank, number)).backward()
    opt.step()
    opt.zero_grad()


def open_and_change(folder: str, precision: str) -> list[Any]:
    comm = zcomm.init(timeout=60)
    results = []
    for stage, offload, share in CASES:
        case = Case(stage, offload, 0.02, precision=precision, share_parameters=share)
        model = small_gpt()
        names = dict(model.named_parameters())
        names["norm.weight"].requires_grad_(False)
        opt = zcomm.ZeroOptimizer(model, lr=0.01, nvme_path=folder, **case.arguments())
        one_step(opt, model, 0, comm.rank)
        before, whole = masters(model), opt.full_state_dict()
        weight, bias = names["blocks.1.attention.qkv.weight"], names["blocks.2.norm1.weight"]
        with GatheredParameters(model.parameters()), torch.no_grad():  # reads only: changes are dropped
            seen = all(torch.equal(names[n], value) for n, value in whole.items())
            weight.zero_()
            bias.data = torch.ones(7)
        assert seen and masters(model) == before, (case, seen)
        with (
            GatheredParameters([weight, bias, names["norm.weight"]], modifier_rank=comm.world_size - 1),
            torch.no_grad(),
        ):
            if comm.rank == comm.world_size - 1:
                weight[3:5] = 0.125 + weight[5:7]
                names["norm.weight"].fill_(2.0)
            else:
                weight.fill_(9.0)  # by the wrong rank, so it is dropped
                bias.data.fill_(9.0)
            if comm.rank == comm.world_size - 1:
                bias.data = torch.full_like(bias, 0.5)
        after = opt.full_state_dict()
        expected = whole["blocks.1.attention.qkv.weight"].clone()
        expected[3:5] = 0.125 + expected[5:7]
        assert torch.equal(after["blocks.1.attention.qkv.weight"], expected), case
        assert torch.equal(zcomm.zero.full_param(weight)[3:5], expected[3:5].float()), case
        assert float(after["blocks.2.norm1.weight"].float().mean()) == 0.5, case
        assert float(names["norm.weight"].float().mean()) == 2.0, case
        changed = masters(model)
        one_step(opt, model, 1, comm.rank)
        results.append((before, changed, masters(model)))
        opt.close()
    return results


@pytest.mark.parametrize(("world_size", "precision"), [(1, "fp32"), slow(2, "bf16"), slow(3, "fp32")])
def test_every_stage_and_tier(run_ranks: Run, tmp_path: Path, world_size: int, precision: str) -> None:
    per_rank = run_ranks(open_and_change, world_size, str(tmp_path), precision)
    for results in per_rank:
        assert all(result == per_rank[0][0] for result in results)
        assert len(set(results[0])) == 3


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_elements_left_alone_keep_their_exact_masters(precision: str) -> None:
    model = nn.Sequential(nn.Linear(40, 40))
    exact = model[0].weight.detach().clone()
    opt = zcomm.ZeroOptimizer(model, stage=2, precision=precision)
    with GatheredParameters(model, modifier_rank=0), torch.no_grad():
        model[0].weight[1] = 3.0
    exact[1] = 3.0
    assert torch.equal(zcomm.zero.full_param(model[0].weight), exact)
    opt.close()
    zcomm.shutdown()


def generate(folder: str, offload: str | None) -> list[int]:
    """Run different numbers of forward passes per rank, with parameters gathered, in the private layout."""
    comm = zcomm.init(timeout=60)
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(model, stage=3, offload=offload, nvme_path=folder, share_parameters=False)
    one_step(opt, model, 0, comm.rank)
    tokens = torch.randint(0, 64, (1, 3), generator=torch.Generator().manual_seed(1))
    with GatheredParameters(model.parameters()), torch.no_grad():
        for _ in range(2 + 3 * comm.rank):
            tokens = torch.cat([tokens, model(tokens[:, -16:])[:, -1].argmax(-1, keepdim=True)], 1)
    one_step(opt, model, 1, comm.rank)
    opt.close()
    return tokens[0].tolist()


@pytest.mark.parametrize("offload", [None, "nvme"])
def test_open_models_generate_without_lockstep(run_ranks: Run, tmp_path: Path, offload: str | None) -> None:
    short, long = run_ranks(generate, 2, str(tmp_path), offload)
    assert len(short) == 5 and len(long) == 8 and long[:5] == short


EDITS: list[Callable[[nn.Parameter], object]] = [
    lambda p: p.detach().fill_(2.0),
    lambda p: p.data.mul_(2.0),
    lambda p: setattr(p, "data", torch.zeros(40, 40)),
    lambda p: nn.init.zeros_(p),
    lambda p: p.data[39].zero_(),
]


def forgotten_changes(folder: str) -> None:
    zcomm.init(timeout=60)
    log = io.StringIO()
    logging.getLogger("zcomm").addHandler(logging.StreamHandler(log))

    def is_reported(model: nn.Module, edit: Callable[[nn.Parameter], object], modifier: int | None = None) -> bool:
        """Return True if the edit is logged, or report that several are."""
        log.truncate(log.seek(0))
        forgotten._reported.clear()
        for _ in range(2):
            with GatheredParameters(model, modifier_rank=modifier):
                edit(model[1].weight)
        assert log.getvalue().count("modifier_rank=0). This is logged once") < 2
        return "modifier_rank=0). This is logged once" in log.getvalue()

    def open_inside(weight: nn.Parameter) -> None:
        with GatheredParameters(weight):
            weight.detach().fill_(3.0)
        with GatheredParameters(weight, modifier_rank=0):
            pass

    def train(opt: zcomm.ZeroOptimizer, model: nn.Module, _: nn.Parameter) -> None:
        opt.backward(model(torch.ones(1, 40)).sum())
        opt.step()
        opt.zero_grad()

    for case in CASES:
        stage, offload, share = case
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        opt = zcomm.ZeroOptimizer(
            model, "sgd", lr=0.1, stage=stage, offload=offload, share_parameters=share, nvme_path=folder
        )
        before = opt.full_state_dict()
        found = [is_reported(model, edit) for edit in EDITS]
        assert not is_reported(model, lambda p: p.sum()) and not is_reported(model, open_inside, 0), case
        assert not is_reported(model, partial(train, opt, model)), case
        assert all(found), (case, found)
        with GatheredParameters(model, modifier_rank=0):
            model[1].weight.data.copy_(before["1.weight"])
        opt.close()
    for edit in EDITS[:2]:
        with zcomm.zero.Init():
            model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        assert is_reported(model, edit) and not is_reported(model, lambda p: p.sum())
        assert "changes of a parameter of shape (40, 40)" not in log.getvalue()


def test_changes_that_are_forgotten_are_logged_once(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(forgotten_changes, 2, str(tmp_path))


def before_the_optimizer(folder: str) -> tuple[str, str]:
    comm = zcomm.init(timeout=60)
    with zcomm.zero.Init(min_count=64):
        model = small_gpt()
    names = dict(model.named_parameters())
    first, second = names["blocks.0.up.weight"], names["blocks.1.attention.qkv.weight"]
    torch_adam = torch.optim.AdamW(model.parameters(), lr=0.1)
    with GatheredParameters([first]):
        assert first.device.type == "cpu" and float(first.float().std()) > 0.01
        nn.init.zeros_(first)
    assert first.is_meta and first.device.type == "cpu"
    with GatheredParameters([second], modifier_rank=1):
        nn.init.constant_(second, 0.25 + comm.rank)
    opt = zcomm.ZeroOptimizer(model, torch_adam, stage=3, offload="nvme", nvme_path=folder)
    plain = small_gpt()
    nn.init.constant_(dict(plain.named_parameters())["blocks.1.attention.qkv.weight"], 1.25)
    got, want = digest(opt.full_state_dict()), digest({n: p.detach() for n, p in plain.named_parameters()})
    opt.close()
    return got, want


def test_parameters_of_init_before_the_optimizer(run_ranks: Run, tmp_path: Path) -> None:
    for got, want in run_ranks(before_the_optimizer, 2, str(tmp_path)):
        assert got == want


def nested(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    for case in (Case(1), Case(3, None, share_parameters=False), Case(3, "nvme")):
        model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
        opt = zcomm.ZeroOptimizer(model, nvme_path=folder, **case.arguments())
        with GatheredParameters(model), torch.no_grad():
            with GatheredParameters(model[0].weight, modifier_rank=1):
                model[0].weight.fill_(float(comm.rank))
            assert model[0].weight.shape == (40, 40) and bool((model[0].weight == 1.0).all()), case
            model[0].weight.fill_(7.0)  # dropped
        assert bool((opt.full_state_dict()["0.weight"] == 1.0).all()), case
        opt.close()


def test_contexts_may_be_nested(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(nested, 2, str(tmp_path))


def test_what_is_wrong_is_said() -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    opt = zcomm.ZeroOptimizer(model, stage=3)
    before = opt.full_state_dict()["0.weight"]
    with (
        pytest.raises(ValueError, match="modifier_rank=3 is not a valid rank; expected one in"),
        GatheredParameters(model, 3),
    ):
        pass
    changed_shape = pytest.raises(ValueError, match=r"0\.weight has shape \(2, 8\) now, not \(8, 8\)")
    with changed_shape, GatheredParameters(model.parameters(), modifier_rank=0):
        model[0].weight.data = torch.zeros(2, 8)
    with pytest.raises(KeyError), GatheredParameters(model, modifier_rank=0):
        nn.init.zeros_(model[0].weight)
        raise KeyError("mine")
    assert torch.equal(opt.full_state_dict()["0.weight"], before), "a block that raises changes nothing"
    with GatheredParameters(model, modifier_rank=5, enabled=False):
        pass
    opt.close()
    plain = nn.Linear(4, 4, bias=False)
    with GatheredParameters([plain.weight, plain.bias], modifier_rank=0), GatheredParameters(plain.bias):
        nn.init.zeros_(plain.weight)
    assert not plain.weight.any()
    zcomm.shutdown()
