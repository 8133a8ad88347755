"""PinnedArena in Python: errors name the budget, and memory is released with its tensor."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable

import pytest
import torch

from programs import Program
from zcomm.offload import PinnedArena


def test_exact_counted_and_returned() -> None:
    arena = PinnedArena(64 << 10)
    first = arena.empty((3, 1000), torch.bfloat16)
    second = arena.empty(40000, torch.uint8)
    assert first.shape == (3, 1000) and first.dtype == torch.bfloat16 and not first.any()
    assert first.data_ptr() % 4096 == 0
    assert arena.stats()["used_nbytes"] == 8192 + 40960
    with pytest.raises(OSError, match=r"16385 bytes asked .* 49152 bytes used, budget 65536 .*MEMLOCK") as caught:
        arena.empty(16385, torch.uint8)
    assert caught.value.errno == errno.ENOMEM
    view = second[5:]
    del second
    gc.collect()
    assert arena.stats()["used_nbytes"] == 8192 + 40960  # a view keeps the memory
    del view, first
    gc.collect()
    assert arena.stats()["used_nbytes"] == 0 and arena.stats()["peak_nbytes"] == 8192 + 40960
    left = arena.empty(4096, torch.uint8)
    del arena
    left.fill_(1)
    assert PinnedArena(0).empty(0).numel() == 0
    with pytest.raises(ValueError, match="-1 is negative"):
        PinnedArena(-1)
    with pytest.raises(ValueError, match="negative size"):
        PinnedArena().empty((2, -1))


def test_the_processs_budget(start_program: Callable[..., Program]) -> None:
    program = (
        "import zcomm, torch\n"
        "from zcomm.offload import PinnedArena\n"
        "held = zcomm.pinned_empty(1 << 20, torch.uint8)\n"
        "try:\n"
        "    PinnedArena().empty(1, torch.uint8)\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    told, _ = start_program(program, env={**os.environ, "ZCOMM_PINNED_BUDGET": "1M"}).communicate()
    assert "all arenas 1048576 bytes, ZCOMM_PINNED_BUDGET 1048576 bytes" in told
