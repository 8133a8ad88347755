"""Ranks that pass different folders to a save or a load: one error on all of them, with both folders."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm

Run = Callable[..., list[Any]]
CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}


def give_different_places(folder: str) -> None:
    comm, base = zcomm.init(timeout=60), Path(folder)
    mine, other = base / f"rank{comm.rank}", base / "both"
    engine = zcomm.initialize(model=nn.Linear(6, 5), config={**CONFIG, "zero_optimization": {"stage": 1}})[0]
    opt = engine.optimizer
    wanted = {name: value.clone() for name, value in opt.full_state_dict().items()}

    def refused(call: Callable[[], Any], last: str = "") -> None:
        with pytest.raises(ValueError, match="the ranks gave different places") as caught:
            call()
        for rank in (0, 1):
            assert f"rank {rank} gave {base / f'rank{rank}'}{last}" in str(caught.value)

    for wait in (True, False):
        refused(lambda wait=wait: opt.save(mine, wait=wait))
        refused(lambda wait=wait: opt.save(mine / "c", wait=wait), "/c")
        refused(lambda wait=wait: engine.save_checkpoint(mine, "c", wait=wait), "/c")
        refused(lambda wait=wait: engine.save_16bit_model(mine, wait=wait), "/model.safetensors")
    comm.barrier()
    assert [path for path in base.rglob("*") if path.is_file()] == [], "nothing was saved"
    engine.save_checkpoint(other, "c")
    engine.save_16bit_model(other)
    with torch.no_grad():
        for param in engine.module.parameters():
            param.add_(1)
    engine.save_checkpoint(other, "d")
    if comm.rank == 0:
        for name, made in (("rank0", "c"), ("rank1", "d")):  # both are checkpoints
            (base / name).mkdir(exist_ok=True)
            shutil.copytree(other / made, base / name / "c")
        shutil.copytree(other / "c", base / "copy")
    comm.barrier()
    refused(lambda: opt.load(mine / "c"), "/c")
    refused(lambda: engine.load_checkpoint(mine, "c"), "/c")
    refused(lambda: engine.load_checkpoint(mine))  # neither has a file `latest`
    refused(lambda: zcomm.zero.load_weights(opt, mine / "c"), "/c")
    comm.barrier()
    if comm.rank == 1:
        shutil.rmtree(base / "rank0")
    comm.barrier()
    refused(lambda: opt.load(mine / "c"), "/c")  # only rank 0 has an error
    opt.load(base / "copy" if comm.rank else other / "c")  # two copies of one checkpoint
    assert all(torch.equal(value, wanted[name]) for name, value in opt.full_state_dict().items())
    engine.destroy()


def test_ranks_that_give_different_places(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(give_different_places, 2, str(tmp_path))
