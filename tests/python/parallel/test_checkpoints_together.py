"""A checkpoint of a model in stages, parts and shards loads at other numbers of ranks, in other forms, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zcomm
from decoder_parts import Parts, divided, layers
from torch_world import world
from zcomm.zero.checkpoint.export import export

Run = Callable[..., list[Any]]
Values = dict[str, torch.Tensor]


def made(sizes: dict[str, int], experts: bool) -> tuple[Parts, zcomm.ZeroOptimizer]:
    parts = divided(sizes, experts, torch.float32)
    options = {"lr": 0.01, "mesh": parts.mesh, "stage": 1, "precision": "bf16"}
    return parts, zcomm.ZeroOptimizer(parts.module, "adamw", **options)


def values(opt: zcomm.ZeroOptimizer) -> Values:
    """Return whole weights and state on rank 0, and nothing on other ranks."""
    found: dict[str, list[torch.Tensor]] = {}
    for piece in opt.iter_state(root=0):
        for key, value in piece.values.items():
            found.setdefault(f"{key} of {piece.name}", []).append(value.clone())
    return {name: torch.cat(pieces) for name, pieces in found.items()} if zcomm.rank() == 0 else {}


def saved(folder: str, sizes: dict[str, int], experts: bool) -> Values:
    with world():
        parts, opt = made(sizes, experts)
        for number in range(2):
            parts.passes(number)
            opt.step()
            opt.zero_grad()
        opt.save(folder, client_state={"step": 2})
        found = values(opt)
        opt.close()
        zcomm.shutdown()
    return found


def loaded(folder: str, sizes: dict[str, int], experts: bool) -> Values:
    with world():
        parts, opt = made(sizes, experts)
        with torch.no_grad():
            for param in parts.module.parameters():
                param.add_(1)
        assert opt.load(folder) == {"step": 2}
        found = values(opt)
        parts.passes(3)  # it can train on
        opt.step()
        opt.close()
        zcomm.shutdown()
    return found


IN_FORMS = {"data": 2, "pipe": 2, "tensor": 2}
IN_EXPERTS = {"pipe": 2, "expert": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "others", "experts"),
    [
        (IN_FORMS, [{"data": 1}, {"tensor": 2}, {"pipe": 4}, {"data": 4, "tensor": 2}], False),
        (IN_EXPERTS, [{"data": 1}, {"expert": 4}, {"pipe": 2}], True),
    ],
    ids=["forms", "experts"],
)
def test_a_checkpoint_of_all_forms_loads_in_other_shapes(
    first: dict[str, int], others: list[dict[str, int]], experts: bool, run_ranks: Run, tmp_path: Path
) -> None:
    folder, whole = str(tmp_path / "saved"), layers(experts)
    wanted = run_ranks(saved, math.prod(first.values()), folder, first, experts)[0]
    assert {name.partition(" of ")[2] for name in wanted} == {name for name, _ in whole.named_parameters()}
    for sizes in others:
        found = run_ranks(loaded, math.prod(sizes.values()), folder, sizes, experts)[0]
        assert found.keys() == wanted.keys()
        differ = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
        assert not differ, (sizes, differ)
    export(tmp_path / "saved", tmp_path / "exported")  # a folder of Hugging Face
    tensors = load_file(tmp_path / "exported/model.safetensors")
    whole.load_state_dict({name: value.float() for name, value in tensors.items()})
    weights = {name.partition(" of ")[2]: value for name, value in wanted.items() if name.startswith("weight of")}
    for name, param in whole.named_parameters():
        assert torch.equal(param.detach().flatten().bfloat16(), weights[name].flatten().bfloat16()), name
