"""Graphs of unit-wise stage 3 that no backward pass uses: they keep no memory alive."""

from __future__ import annotations

import contextlib
import gc
import os

import pytest
import torch
from torch import nn

import zcomm


def memory_files() -> set[int]:
    """Return this process's open memory files, by inode, because descriptors' numbers are reused."""
    files = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                files.add(os.stat(f"/proc/self/fd/{name}").st_ino)
    return files


@pytest.mark.parametrize("ends", ["dropped", "failed"])
def test_a_graph_without_backward_goes_with_its_output(world_of_one: None, ends: str) -> None:
    """Tanh saves its own output for backward: if the node held it directly, it would never be freed."""
    before = memory_files()
    for _ in range(3):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, share_parameters=False, units=list(model))
        if ends == "failed":
            model[2].register_forward_pre_hook(lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(2, 8))
        else:
            model(torch.ones(2, 8))
        opt.close()
        del model, opt
        gc.collect()
        assert memory_files() <= before, "memory of slots"
