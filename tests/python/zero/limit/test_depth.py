"""Memory by depth: a layer adds its input and objects to the peak, as in any program. Large buffers do not grow."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from places import BENCH
from zcomm import _core
from zcomm.zero import Offload
from zcomm.zero.gradients.sum_ring import SumRing
from zcomm.zero.layout.tiles import cut
from zcomm.zero.optim_state.nvme import Spans, SpanSubset

sys.path.insert(0, str(BENCH))
from limited.training import Training, run

KIB = 1024
LAYERS, WIDTH, CONTEXT = 12, 256, 256
INPUT_NBYTES = 2 * WIDTH * CONTEXT  # bf16: recomputation keeps a layer's input
PLAIN_NBYTES, OWN_NBYTES = 300 * KIB, 300 * KIB  # of a layer's graph and modules; zcomm's part: 60 % more than today


def peak_of_steps(folder: Path, layers: int, plain: bool) -> int:
    training = Training(layers, WIDTH, CONTEXT, str(folder), steps=2, limit="1GiB", plain=plain)
    return max(nbytes for phase, nbytes in run(training, 200.0)[0].peaks.items() if phase.startswith("step"))


@pytest.mark.long
@pytest.mark.timeout_s(300)
def test_a_layer_adds_little_more_to_the_peak_than_in_plain_torch(tmp_path: Path) -> None:
    """All tensors are on the drive, within a limit. A heap with holes between the layers' kept inputs fails, too."""
    ours, plain = (
        (peak_of_steps(tmp_path, 4 * LAYERS, plain) - peak_of_steps(tmp_path, LAYERS, plain)) / (3 * LAYERS)
        for plain in (False, True)
    )
    print(f"a layer adds {ours / KIB:.0f} KiB, in plain torch {plain / KIB:.0f} KiB")
    assert plain <= INPUT_NBYTES + PLAIN_NBYTES
    assert ours <= plain + OWN_NBYTES


def resident_shared() -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("RssShmem:"))


def test_addresses_of_many_units_are_not_memory() -> None:
    """2 billion parameters have 4 GiB of addresses. Unmapped pages, which read NaN, take 1 MiB."""
    before = resident_shared()
    addresses = _core.AddressRange(4 << 30, reads_nan=True)
    addresses.unmap(1 << 30, 64 << 20)
    assert 512 * KIB < resident_shared() - before < 4096 * KIB


def test_gradients_that_were_added_are_free_while_the_next_waits_for_its_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive may be slow, but only one bucket's gradients wait for it."""
    waiting: list[int] = []
    take = SumRing.take

    def taken(ring: SumRing, bucket: int, load: bool) -> None:
        transport: Any = opt._parts.reducer.accumulators.transports[bucket]
        waiting.append(sum(work is not None for work in transport._works))
        take(ring, bucket, load)

    monkeypatch.setattr(SumRing, "take", taken)
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    offload = Offload("nvme", "nvme", gradients="nvme")
    opt = zcomm.ZeroOptimizer(model, stage=3, offload=offload, nvme_path=tmp_path, bucket_mb=0.25)
    for _ in range(3):
        opt.backward(model(torch.ones(1, 256)).square().sum())
        opt.step()
        opt.zero_grad()
    opt.close()
    zcomm.shutdown()
    assert len(waiting) == 24 and set(waiting) == {0}


@pytest.mark.parametrize("seed", range(4))
def test_spans_are_those_of_a_list(seed: int) -> None:
    draw = random.Random(seed)
    counts = [draw.choice([0, 1, 64, 65536, 65537, 262144, 1_000_000]) for _ in range(draw.randrange(12))]
    listed = [(b, part.start, part.stop - part.start) for b, count in enumerate(counts) for part in cut(count, 2)]
    spans = Spans(counts, 2 * 65536)
    assert list(spans) == listed == [spans[number] for number in range(len(spans))]
    assert list(reversed(spans)) == listed[::-1]
    assert [span for bucket in range(-1, len(counts) + 1) for span in spans.of(bucket)] == listed
    for number, (bucket, begin, count) in enumerate(listed):
        assert spans.at(bucket, begin) == spans.at(bucket, begin + count - 1) == number
    chosen = [draw.random() < 0.5 for _ in listed]
    some = SpanSubset(spans, chosen)
    kept = [span for span, is_in in zip(listed, chosen, strict=True) if is_in]
    assert list(some) == kept
    assert [some.number(span) for span in listed] == [kept.index(span) if span in kept else -1 for span in listed]
