"""Swapped weights and state are whole pages: O_DIRECT copies nothing through bounce buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from tiers import slow
from zcomm.zero.layout.placement import over_all
from zcomm.zero.layout.sections import PAGE_NBYTES, Sections
from zcomm.zero.options import Offload
from zero_jobs import batch, digest, loss_of, small_gpt

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("align", [64, 2048])
def test_shards_on_a_drive_are_whole_pages_and_others_are_not_padded(
    world_size: int, itemsize: int, align: int
) -> None:
    model = small_gpt()
    offload = Offload("nvme", lambda name, param: "nvme" if param.ndim == 2 else "device")
    placements = over_all(model.parameters(), world_size, 0)
    sections = Sections(model, list(model.parameters()), [], placements, 3, offload, True)
    geometry = sections.geometry(1 << 14, itemsize, align)
    for bucket in geometry.every:
        on_drive = sections.list[bucket.section].weights == "nvme"
        used = sum(-(-geometry.places[index].count // align) * align for index in bucket.params)
        step = max(PAGE_NBYTES // itemsize, align) if on_drive else align
        assert bucket.shard_count % step == 0
        assert bucket.count - used < world_size * step
        for index in bucket.params:
            assert geometry.places[index].offset % align == 0


def swapped(folder: str, optimizer: str, options: dict[str, Any], checkpoint: str) -> tuple[str, dict[str, Any]]:
    """Train, save and load; return the bits and the swap file's counters."""
    comm = zcomm.init(timeout=60)
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(
        model, optimizer, lr=1e-3, nvme_path=folder if options.get("offload") else None, bucket_mb=0.02, **options
    )

    def step(number: int) -> None:
        loss_of(model, *batch(comm.rank, number)).backward()
        opt.step()
        opt.zero_grad()

    for number in range(3):
        step(number)
    opt.save(checkpoint)
    step(3)
    opt.load(checkpoint)
    step(4)
    bits = digest(opt.full_state_dict())
    swap = opt._live.swap
    stats = {} if swap is None else dict(swap.stats())
    opt.close()
    return bits, stats


CASES = [
    ("adamw", {"stage": 3, "precision": "bf16"}),
    ("adamw", {"stage": 3, "precision": "fp32", "share_parameters": False}),
    ("adamw", {"stage": 3, "precision": "bf16", "state_dtype": "8bit"}),
    ("adamw", {"stage": 2, "precision": "bf16"}),
]


@pytest.mark.parametrize(("optimizer", "options"), CASES)
@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_nothing_is_bounced_and_no_bit_changes(
    run_ranks: Run, tmp_path: Path, world_size: int, optimizer: str, options: dict[str, Any]
) -> None:
    if not _is_direct(tmp_path):
        pytest.skip("no O_DIRECT here: nothing can be bounced")
    on_drive = {**options, "offload": "nvme"}
    found = run_ranks(swapped, world_size, str(tmp_path), optimizer, on_drive, str(tmp_path / "on_drive"))
    in_ram = run_ranks(swapped, world_size, str(tmp_path), optimizer, options, str(tmp_path / "in_ram"))
    assert len({bits for bits, _ in (*found, *in_ram)}) == 1
    for _, stats in found:
        assert stats["written_nbytes"] > 0
        assert stats["read_nbytes"] > 0 or options["stage"] < 3, "weights are always read"
        assert stats["bounced_nbytes"] == 0 and stats["bounce_nbytes"] == 0


def _is_direct(folder: Path) -> bool:
    with zcomm.SwapFile(folder) as swap:
        data = torch.zeros(1000)
        swap.write("key", data).wait()
        stats = swap.stats()
        assert (stats["bounced_nbytes"] > 0) == stats["direct"]
        return bool(stats["direct"])
