"""Wrong input: an error names each kind and its remedy, on every rank, before any object is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm

Run = Callable[..., list[Any]]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def refused(message: str, *args: Any, kind: type[Exception] = ValueError, **options: Any) -> None:
    """Check that ZeroOptimizer(*args, **options) raises ``kind``, with all parts of ``message`` (between bars)."""
    with pytest.raises(kind) as caught:
        zcomm.ZeroOptimizer(*args, **options)
    for part in message.split("|"):
        assert part in str(caught.value), str(caught.value)
    assert not zcomm.is_initialized(), "found before the job is joined"


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"stage": "3"}, "stage='3'; use 0 (replicated), 1, 2 or 3"),
    ({"stage": 2.0}, "stage=2.0"),
    ({"stage": True}, "stage=True"),
    ({"stage": None}, "stage=None"),
    ({"clip_norm": "1"}, "clip_norm='1' must be a number"),
    ({"clip_norm": float("nan")}, "clip_norm=nan"),
    ({"grad_accum": 1.5}, "grad_accum=1.5 must be a whole number"),
    ({"grad_accum": "2"}, "grad_accum='2'"),
    ({"bucket_mb": "25"}, "bucket_mb='25'"),
    ({"bucket_mb": float("inf")}, "bucket_mb=inf"),
    ({"prefetch": 1.5}, "prefetch=1.5"),
    ({"overlap": "yes"}, "overlap='yes' must be True or False"),
    ({"share_parameters": 1}, "share_parameters=1 must be True or False"),
    ({"precision": torch.float64}, "precision=torch.float64; use 'fp32', 'bf16' or 'fp16', or torch's dtype"),
    ({"precision": ["fp16"]}, "precision=['fp16']; use"),
    ({"offload": True}, "offload=True; use None, 'cpu', 'nvme' or zcomm.Offload(...)"),
    ({"offload": {"device": "cpu"}}, "offload={'device': 'cpu'}"),
    ({"offload": "nvme", "nvme_path": 3}, "nvme_path=3 must be a directory"),
    ({"offload": "nvme", "nvme_path": []}, "nvme_path=[] must be a directory"),
    ({"offload": "nvme", "nvme_path": [3]}, "nvme_path=[3]"),
    ({"lr": "1e-3"}, "lr='1e-3': adamw needs a number"),
    ({"betas": 0.9}, "betas=0.9: adamw needs 2 numbers"),
    ({"betas": (0.9, "b")}, "betas=(0.9, 'b')"),
    ({"learning_rate": 1.0}, "ZeroOptimizer has no argument 'learning_rate'; did you mean 'lr'?"),
    ({"ofload": "cpu"}, "no argument 'ofload'; did you mean 'offload'? Arguments of adamw: lr, betas, eps"),
    ({"clip_grad_norm": 1.0}, "did you mean 'clip_norm'?"),
    ({"gradient_accumulation_steps": 2}, "did you mean 'grad_accum'?"),
    ({"optimizer": "rmsprop", "ofload": "cpu"}, "did you mean 'offload'? Arguments of rmsprop: lr, alpha"),
    ({"zzz": 1}, "ZeroOptimizer has no argument 'zzz'; Arguments of adamw: lr"),
    ({"optimizer": "adam_w"}, "unknown optimizer 'adam_w'; did you mean 'adamw'? Names: adamw, adam, lion"),
    ({"optimizer": "FusedAdam"}, "unknown optimizer 'FusedAdam'; did you mean 'adam'?"),
    ({"optimizer": "shampoo"}, "unknown optimizer 'shampoo'; Names: adamw"),
    (
        {"precision": zcomm.Precision("bf16"), "buffer_dtype": "fp32"},
        "buffer_dtype='fp32' is given together with",
    ),
    ({"comm": "nccl"}, "comm='nccl' must be a zcomm Communicator"),
    ({"optimizer": 3}, "optimizer=3 must be a name"),
    ({"optimizer": torch.optim.LBFGS}, "LBFGS' is not available: |Use a name or torch.optim class of adamw"),
    (
        {"communication_dtype": "fp8"},
        "communication_dtype='fp8'; use None (that of training), 'fp32', 'bf16' or 'fp16'",
    ),
    ({"skip_nonfinite": "yes"}, "skip_nonfinite='yes' must be True, False or None"),
    ({"skip_nonfinite": False, "precision": "fp16"}, "skip_nonfinite=False: precision='fp16' skips such steps"),
    ({"loss_scale": 3.0, "precision": "bf16"}, "loss_scale=3.0 needs precision='fp16', but precision='bf16'"),
    (
        {"loss_scale": "dynamic", "precision": "fp16"},
        "loss_scale='dynamic' must be a number more than 0",
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=[message for _, message in OPTIONS])
def test_options(options: dict[str, Any], message: str) -> None:
    refused(message, net(), **options)


def params() -> list[nn.Parameter]:
    return list(net().parameters())


def twice() -> list[dict[str, Any]]:
    first = params()
    return [{"params": first[:3]}, {"params": first[2:]}]


MODELS: list[tuple[Callable[[], Any], str]] = [
    (lambda: None, "model is a NoneType; give a module, its parameters, or param groups"),
    (lambda: "gpt", "model is a str"),
    (lambda: nn.Linear, "model is the class Linear"),
    (lambda: torch.zeros(3), "model is a Tensor"),
    (lambda: [1, 2], "element 0 is a int, not a parameter"),
    (lambda: net().named_parameters(), "give parameters, not named_parameters()"),
    (list, "no parameter requires a gradient"),
    (lambda: net().requires_grad_(False), "no parameter requires a gradient"),
    (lambda: [{"lr": 1.0}], 'param group 0 has no "params"; it has lr'),
    (lambda: [{"params": "weights"}], 'param group 0: "params" is a str; give a list of parameters'),
    (lambda: [{"params": params()}, params()[0]], "both param groups and parameters"),
    (twice, "parameter 0 of group 1, of shape (4, 4), is also parameter 2 of group 0|take it out of one place"),
    (
        lambda: [{"params": [p := params()[0], p]}],
        "parameter 1 of group 0, of shape (4, 4), is also",
    ),
    (lambda: [p := params()[0], p], "parameter 1, of shape (4, 4), is also parameter 0"),
]


@pytest.mark.parametrize(("make", "message"), MODELS, ids=[message for _, message in MODELS])
def test_models(make: Callable[[], Any], message: str) -> None:
    refused(message, make(), stage=1)


def test_stage_3_with_bare_parameters() -> None:
    for bare in (params(), net().parameters(), [{"params": params()}]):
        refused("stage=3 needs the model itself (it hooks its modules), not a list of parameters", bare, stage=3)


def test_offload() -> None:
    with pytest.raises(ValueError, match=r"fraction='half' must be a number in \[0, 1\]"):
        zcomm.Offload("cpu", fraction="half")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="optimizer='disk'; use None, 'cpu' or 'nvme'"):
        zcomm.Offload("disk")  # type: ignore[arg-type]
    refused("params='cpu' needs stage=3, but stage=2", net(), offload=zcomm.Offload(params="cpu"), stage=2)


def test_a_parameter_of_two_optimizers() -> None:
    model = net()
    first = zcomm.ZeroOptimizer(model[0], stage=1)
    with pytest.raises(ValueError, match=r"group 0 are another open ZeroOptimizer's: close\(\) that first"):
        zcomm.ZeroOptimizer(model, stage=1)
    other = zcomm.ZeroOptimizer(model[1], stage=2)
    model(torch.ones(1, 4)).sum().backward()
    first.step()
    other.step()
    first.close()
    other.close()
    zcomm.ZeroOptimizer(model, stage=1).close()
    zcomm.shutdown()


def test_an_optimizer_of_another_model() -> None:
    with pytest.raises(ValueError, match=r"4 parameter\(s\) of the param groups are not the model's"):
        zcomm.ZeroOptimizer(net(), torch.optim.SGD(net().parameters(), lr=0.1), stage=1)
    zcomm.shutdown()


def test_what_is_loaded_and_where_it_is_saved(tmp_path: Path) -> None:
    opt = zcomm.ZeroOptimizer(net(), stage=1)
    for wrong, said in (({"a": 1}, "state and param_groups: a"), (None, "it is a NoneType"), ([], "it is a list")):
        with pytest.raises(ValueError, match=said):
            opt.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        opt.load(tmp_path / "none")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis").write_text("mine")
    (tmp_path / "work" / "manifest.json").write_text('{"name": "of a web page"}')
    for place in ("file", "work", "."):
        with pytest.raises(FileExistsError, match="this is not a checkpoint, it will not be replaced; save elsewhere"):
            opt.save(tmp_path / place)
    assert (tmp_path / "file").read_text() == (tmp_path / "work" / "thesis").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        opt.save(tmp_path / "empty")  # an empty folder, then a checkpoint
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "work"]
    opt.close()
    zcomm.shutdown()


# --- ranks that differ ------------------------------------------------------------------------------------------------


def other_model(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return rank 1's model and options; the other ranks pass net() and no options."""
    made: dict[str, Callable[[], nn.Module]] = {
        "width": lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)),  # as many elements after padding
        "fewer": lambda: nn.Sequential(nn.Linear(4, 4)),
        "names": lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))),
    }
    model = made.get(kind, net)()
    if kind == "frozen":
        model[0].weight.requires_grad_(False)
    if kind == "buffer":
        model.register_buffer("seen", torch.zeros(3))
    if kind == "order":
        first, second = (nn.Linear(4, 4) for _ in range(2))
        model = nn.Module()
        model.add_module("1", second)
        model.add_module("0", first)
    options = {"stage": 1, "lr": 0.5, "clip_norm": 1.0, "precision": "bf16", "bucket_mb": 1.0, "optimizer": "sgd"}
    return model, {kind: options[kind]} if kind in options else {}


DIFFERENT = {
    "width": "parameter 0.weight is [8, 4], group 0, not [4, 4], group 0; parameter 0.bias is [8]",
    "fewer": "parameter 1.weight is missing; parameter 1.bias is missing",
    "names": "parameter 1.weight is missing; parameter 1.bias is missing; parameter 1.0.weight is additional",
    "order": "parameter 1.weight comes in place of parameter 0.weight",
    "frozen": "parameter 0.weight is [4, 4], frozen, not [4, 4], group 0",
    "buffer": "buffer seen is additional",
    "stage": "stage is 1, not 2",
    "lr": "lr of group 0 is 0.5, not 0.001",
    "clip_norm": "clip_norm is 1.0, not None",
    "precision": "precision is bf16, not fp32",
    "bucket_mb": "bucket_mb is 1.0, not 25.0",
    "optimizer": "optimizer is sgd, not adamw",
}


def build_differently(kinds: list[str]) -> list[str]:
    comm = zcomm.init(timeout=30)
    said = []
    for kind in kinds:
        model, options = other_model(kind) if comm.rank == 1 else (net(), {})
        try:
            zcomm.ZeroOptimizer(model, **options)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    zcomm.ZeroOptimizer(net(), offload="cpu" if comm.rank == 1 else None).close()  # ranks may choose different tiers
    return said


def test_ranks_with_different_models_or_options(run_ranks: Run) -> None:
    per_rank = run_ranks(build_differently, 3, list(DIFFERENT))
    for said in per_rank:
        for (kind, message), text in zip(DIFFERENT.items(), said, strict=True):
            assert text.startswith("ZeroOptimizer: the ranks gave different models or options"), f"{kind}: {text}"
            assert f"Against rank 0, rank 1: {message}" in text and "rank 2" not in text, f"{kind}: {text}"
