"""Updates in backward: options that they need, updates next to backward, and shards that are read ahead."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zcomm.zero.assemble
from late_swap import LateSwap
from update_grid import Training
from zcomm.zero.cache.swap import Swap
from zcomm.zero.schedule.backward import InBackward


def test_options_are_checked(tmp_path: Path) -> None:
    offload = zcomm.Offload("nvme", "nvme", gradients="nvme", update="backward")
    for offload_, options, text in (
        (offload, {"clip_norm": 1.0}, "clip_norm=1.0"),
        (offload, {"grad_accum": 2}, "grad_accum=2"),
        (offload, {"precision": "fp16"}, "fp16"),
        (offload, {"precision": "bf16", "skip_nonfinite": True}, "skip_nonfinite"),
        (replace(offload, gradients=None), {}, "gradients='nvme'"),
        (replace(offload, params=None), {"share_parameters": True, "stage": 2}, "by units"),
    ):
        with pytest.raises(ValueError, match=text):
            zcomm.ZeroOptimizer(nn.Linear(4, 4), nvme_path=tmp_path, offload=offload_, **{"stage": 3, **options})
    zcomm.shutdown()


def test_backward_goes_on_during_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zcomm.zero.gradients.sum_ring.RING", 100)  # it bounds the updates that wait
    train = Training("nvme, backward", tmp_path, "tied")
    train.run(2)
    go, waited = threading.Event(), []
    update = InBackward._update_now

    def late(self: InBackward, *arguments: Any) -> None:
        waited.append(go.wait(20))
        update(self, *arguments)

    monkeypatch.setattr(InBackward, "_update_now", late)
    train.half()
    go.set()
    train.step()
    assert len(waited) == len(train.opt._parts.geometry.buckets) and all(waited), "backward waited for an update"
    train.opt.close()
    zcomm.shutdown()


def test_shards_are_used_once_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of updates in step(), with reads and writes that happen when they are waited for."""
    bits = []
    for mode, swap in (("nvme, step", Swap), ("nvme, backward", LateSwap)):
        monkeypatch.setattr(zcomm.zero.assemble, "Swap", swap)
        train = Training(mode, tmp_path, "tied", clip_norm=None)
        train.run(6)
        bits.append(train.bits())
        train.opt.close()
    assert bits[0] == bits[1]
    zcomm.shutdown()


@pytest.mark.parametrize("changed", [False, True])
def test_a_shard_that_is_expected(tmp_path: Path, changed: bool) -> None:
    """A write between ``expect`` and ``load`` counts, as do other uses of the window."""
    opt = Training("nvme, step", tmp_path, "tied").opt
    source, buckets = opt._parts.store.source, opt._parts.geometry.buckets
    wanted = source.load(buckets[1]).clone()
    for other in (2, 4):  # 4 has the window of 1
        source.expect(buckets[1], buckets[other])
        if changed:
            wanted = wanted + 1.0
            source.keep(buckets[1], wanted)
        source.load(buckets[other])
        assert torch.equal(source.load(buckets[1]), wanted)
    opt.close()
    zcomm.shutdown()
