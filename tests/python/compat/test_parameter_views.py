"""``ds_id``, ``ds_status`` and so on: only of parameters that stage 3 or zero.Init manages."""

from __future__ import annotations

import copy
import importlib
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero import GatheredParameters

Run = Callable[..., list[Any]]
CHANGES: list[Callable[[torch.Tensor], object]] = [
    lambda part: part.zero_(),
    lambda part: part.data.zero_(),
    lambda part: part.detach().data.view(-1).mul_(2.0),
    lambda part: part[:0].add_(1.0),
    lambda part: part.data.copy_(torch.zeros_like(part)),
    lambda part: part.__setitem__(slice(None), 0.0),
    lambda part: setattr(part, "data", torch.zeros_like(part)),
    lambda part: torch.add(part, part, out=part),
    lambda part: torch._foreach_mul_([part], 2.0),
    lambda part: operator.iadd(part, 1.0),
]
NAMES = "ds_id ds_shape ds_numel ds_status ds_tensor ds_persist ds_param_type ds_summary all_gather partition".split()


def views() -> Any:
    return importlib.import_module("zcomm.compat.deepspeed.runtime.zero.partition_parameters")


def net() -> nn.Sequential:
    torch.manual_seed(4)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 7))
    model[1].bias.requires_grad_(False)
    return model


def maybe_gathered(param: nn.Parameter) -> torch.Tensor:
    """Copy a weight as programs for LoRA do."""
    if hasattr(param, "ds_id"):
        assert param.ds_status == views().ZeroParamStatus.NOT_AVAILABLE
        with GatheredParameters([param]):
            assert param.ds_status == views().ZeroParamStatus.AVAILABLE
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def not_available(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """List the parameters to gather, as programs that average weights do."""
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == views().ZeroParamStatus.NOT_AVAILABLE]


def in_every_place(folder: str) -> None:
    views()
    comm = zcomm.init(timeout=60)
    for stage, shared, offload, precision in [
        (2, True, None, "fp32"),
        (3, True, None, "fp32"),
        (3, False, None, "bf16"),
        (3, True, "nvme", "fp32"),
    ]:
        case = (stage, shared, offload)
        model, plain = net(), net()
        plain.to(torch.bfloat16 if precision == "bf16" else torch.float32)
        opt = zcomm.ZeroOptimizer(
            model, "sgd", lr=0.1, stage=stage, share_parameters=shared, offload=offload, nvme_path=folder,
            precision=precision,
        )  # fmt: skip
        params, wanted = list(model.parameters()), list(plain.parameters())
        for param, want in zip(params, wanted, strict=True):
            assert [hasattr(param, name) for name in NAMES] == [stage == 3] * len(NAMES), case
            assert not any(hasattr(want, name) for name in NAMES)
            assert torch.equal(maybe_gathered(param), want), case
        if stage == 3:
            seen: list[Any] = []
            hook = model[1].register_forward_pre_hook(lambda one, args, to=seen: to.append(one.weight.ds_status))
            out = model(torch.ones(2, 40, dtype=opt.precision.dtype))
            hook.remove()
            assert seen[0].name == ("NOT_AVAILABLE" if shared and offload is None else "AVAILABLE"), case
            del out
            assert len({p.ds_id for p in params}) == len(params)
            assert [p.ds_id for p in params] == [p.ds_id for p in params], "it stays"
            assert not_available(params) == params
            for param, want in zip(params, wanted, strict=True):
                assert (param.ds_shape, param.ds_numel, param.ds_persist) == (want.shape, want.numel(), False)
                assert (param.ds_tensor.dtype, param.ds_tensor.dim()) == (want.dtype, 1)
                shards = comm.all_gather(torch.tensor([param.ds_tensor.numel()]))
                assert int(shards.sum()) == want.numel(), "each element is on one rank"
                values = torch.tensor([param.ds_tensor.double().sum()])
                comm.all_reduce(values)
                assert torch.allclose(values, want.detach().double().sum()), case
                for change in CHANGES:
                    with pytest.raises(RuntimeError, match=r"ds_tensor is a copy .*GatheredParameters"):
                        change(param.ds_tensor)
                if want.dtype == torch.float32:
                    with pytest.raises(ValueError, match="read-only"):
                        param.ds_tensor.float().numpy()[:] = 0.0
                elsewhere = torch.zeros(param.ds_tensor.numel()).copy_(param.ds_tensor).mul_(2.0)
                assert torch.equal(elsewhere, 2.0 * param.ds_tensor.float())
            assert params[0].ds_secondary_tensor is None and params[0].ds_zero_param_process_group is None
            params[0].all_gather_coalesced(params).wait(handle_dependency=True)
            assert not not_available(params)
            params[0].partition(params)
            weight, before = model[0].weight, plain[0].weight
            for changed, keep in ((3.0, False), (before.detach() + 1, True)):
                weight.all_gather([weight])
                assert weight.ds_status.name == "AVAILABLE" and torch.equal(weight, before)
                weight.data.copy_(torch.as_tensor(changed))
                weight.partition([weight], has_been_updated=keep)
                assert weight.ds_status.name == "NOT_AVAILABLE"
            assert torch.equal(maybe_gathered(weight), before + 1)
        opt.close()
        assert not any(hasattr(param, "ds_id") for param in params), "an optimizer that is closed has none"
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
def test_in_every_place(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(in_every_place, world_size, str(tmp_path))


def secondary() -> None:
    """Compare the parts that the ranks of a group keep with the whole weights of all groups."""
    views()
    comm, mesh = zcomm.init(timeout=60), zcomm.ProcessMesh(replicate=2, shard=2)
    model, plain = net(), net()
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, mesh=mesh, stage=3, hpz=True)
    found = {"own": 0, "kept": 0}
    for param, want in zip(model.parameters(), plain.parameters(), strict=True):
        kept, flat, found["own"] = (
            param.ds_secondary_tensor,
            want.detach().view(-1),
            found["own"] + param.ds_tensor.numel(),
        )
        found["kept"] += kept.numel()
        at = 0 if mesh.ranks("shard")[0] == comm.rank else flat.numel() - kept.numel()
        assert torch.equal(torch.Tensor(kept), flat[at : at + kept.numel()])
        with pytest.raises(RuntimeError, match="is a copy"):
            kept.zero_()
    counts = torch.tensor(list(found.values()))
    comm.all_reduce(counts)
    numel = sum(param.numel() for param in plain.parameters())
    assert counts.tolist() == [numel, 2 * numel]
    opt.close()


def test_copies_of_hpz(run_ranks: Run) -> None:
    run_ranks(secondary, 4)


def test_of_zero_init() -> None:
    views()
    with zcomm.zero.Init():
        model = net()
    weight, bias = model[0].weight, model[0].bias
    assert weight.ds_status.name == "NOT_AVAILABLE" and weight.ds_tensor is None
    assert (weight.ds_shape, weight.ds_numel) == ((40, 40), 1600)
    assert not hasattr(bias, "ds_id"), "it is whole"
    number = weight.ds_id
    assert copy.copy(weight.ds_summary()) == {
        "id": number, "status": "NOT_AVAILABLE", "numel": 1600, "shape": (40, 40), "requires_grad": True,
    }  # fmt: skip
    with zcomm.zero.GatheredParameters(model):
        assert weight.ds_status.name == "AVAILABLE" and weight.ds_id == number and not hasattr(bias, "ds_id")
    assert weight.ds_status.name == "NOT_AVAILABLE"
    with zcomm.zero.GatheredParameters(weight, modifier_rank=0):
        assert weight.ds_status.name == "AVAILABLE"
    assert weight.ds_status.name == "NOT_AVAILABLE" and weight.ds_id == number, "it was not looked at"
    with zcomm.zero.GatheredParameters(weight, modifier_rank=0), torch.no_grad():
        weight.mul_(2)
    assert weight.ds_status.name == "AVAILABLE" and weight.ds_id == number, "a rank that is alone keeps it in memory"
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3)
    assert weight.ds_id == number and bias.ds_id != number
    opt.close()
    zcomm.shutdown()


def test_a_name_that_the_program_sets_is_its_own() -> None:
    module = views()
    param: Any = nn.Parameter(torch.zeros(2))
    with pytest.raises(AttributeError, match="'ds_id': stage 3 does not shard it"):
        _ = param.ds_id
    param.ds_id = 5
    assert param.ds_id == 5
    module.register_external_parameter(nn.Linear(1, 1), param)
    with pytest.raises(RuntimeError, match="takes a module and a parameter, not Parameter and Linear"):
        module.register_external_parameter(param, nn.Linear(1, 1))
