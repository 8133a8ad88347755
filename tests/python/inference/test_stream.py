"""zcomm.inference.stream: the values of the resident model, the bytes of the drive, and the errors."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from small_stream import WIDTH, Net, check_equal, tokens
from zcomm.inference import stream, streamed
from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.memory import limit
from zcomm.zero.params.shards import SPAN_NBYTES, SwapSource
from zcomm.zero.registry import open_optimizers

Run = Callable[..., list[Any]]
ORDERS = [None, [3, 0, 5, 0, 1, 2, 4, 3]]


@pytest.mark.parametrize("weights", ["nvme", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("order", ORDERS)
def test_values_of_the_resident_model(tmp_path: Path, weights: str, dtype: torch.dtype, order: Any) -> None:
    want, net = Net(dtype, order=order), stream(Net(dtype, order=order), weights, folder=tmp_path)
    check_equal(net, want)
    with torch.no_grad():
        outside = net.blocks[2].linear.weight.t() @ torch.ones(WIDTH, dtype=dtype)
        assert torch.equal(outside, want.blocks[2].linear.weight.t() @ torch.ones(WIDTH, dtype=dtype))
        x = torch.ones(1, WIDTH, dtype=dtype)
        assert torch.equal(net.blocks[4](x), want.blocks[4](x))
    assert all(torch.equal(value, want.state_dict()[name]) for name, value in net.state_dict().items())
    assert not net.training and not any(param.requires_grad for param in net.parameters())
    check_equal(copy.deepcopy(net), want)
    streamed(net).close()
    check_equal(net, want)  # an ordinary model again


def test_a_forward_reads_all_units_but_one(tmp_path: Path) -> None:
    blocks = 9
    net = stream(Net(blocks=blocks), folder=tmp_path)
    found = streamed(net)
    unit = found.streamed_nbytes // blocks
    assert unit == found.memory()["nvme"]["parameters"] // blocks - found._store.units[0].nbytes // blocks
    check_equal(net, Net(blocks=blocks), passes=2)
    before = found.stats()
    check_equal(net, Net(blocks=blocks), passes=5)
    after = found.stats()
    assert after["passes"] - before["passes"] == 5
    assert after["read_nbytes"] - before["read_nbytes"] == 5 * found.pass_nbytes == 5 * (blocks - 1) * unit


@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_head_by_rows_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantize: Any) -> None:
    monkeypatch.setattr(limit, "_resident_nbytes", lambda: 0)
    monkeypatch.setattr(limit, "_FIRST_PASS_NBYTES", 0)
    torch.manual_seed(0)
    blocks = nn.ModuleList(nn.Linear(384, 384, dtype=torch.bfloat16) for _ in range(6))
    net, x = nn.Sequential(*blocks, nn.Linear(384, 24000, dtype=torch.bfloat16)), torch.ones(1, 384).bfloat16()
    net = stream(net, "nvme", quantize, memory="48MiB", folder=tmp_path)
    found = streamed(net)
    assert found._store.memory.rows.weights
    for _ in range(2):
        net(x)
    before = found.stats()["read_nbytes"]
    for _ in range(3):
        net(x)
    ahead = 3 * found.streamed_nbytes // 80 if quantize else 0  # images that are being read ahead
    assert abs(found.stats()["read_nbytes"] - before - 3 * found.pass_nbytes) <= ahead


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("block", [3 << 20, 1 << 20, 3 << 11])
def test_keys_end_where_blocks_of_rows_end(block: int, own: int) -> None:
    bucket = FlatBucket(0, 0, 0, 0, 4 * block, 2, own, (0,), block)
    spans = [span for _, span in SwapSource.spans(bucket, torch.bfloat16)]
    assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])]
    assert spans[-1].stop == bucket.shard_count
    assert all(span.start // block == (span.stop - 1) // block for span in spans)
    assert all(2 * (span.stop - span.start) <= SPAN_NBYTES for span in spans)


def test_edits_and_loads_change_what_is_read(tmp_path: Path) -> None:
    want, net = Net(), stream(Net(), folder=tmp_path)
    with torch.no_grad():
        for model in (want, net):
            model.blocks[1].linear.weight.mul_(2)
    check_equal(net, want)
    with torch.no_grad():
        want.blocks[3].linear.bias.add_(1)
    net.load_state_dict(want.state_dict())
    check_equal(net, want)


def test_two_models_by_turns_and_a_model_that_is_dropped(tmp_path: Path) -> None:
    wants = [Net(order=order) for order in ORDERS]
    nets: Any = [stream(Net(order=order), folder=tmp_path) for order in ORDERS]
    for _ in range(2):
        for net, want in zip(nets, wants, strict=True):
            check_equal(net, want, passes=1)
    assert len(open_optimizers()) == 2
    del net, nets
    gc.collect()
    assert not open_optimizers()  # its drive's space is free


def test_refusals_name_the_argument(tmp_path: Path) -> None:
    for words, call in (
        ("weights='disk'", lambda: stream(Net(), "disk")),
        ("kv='disk'", lambda: stream(Net(), kv="disk", folder=tmp_path)),
        ("needs folder=", lambda: stream(Net())),
        ("generation_config", lambda: stream(Net(), "cpu", kv="cpu")),
        ("no floating-point", lambda: stream(nn.Sequential(), "cpu")),
        ("float64: a.weight", lambda: stream(nn.ModuleDict({"a": nn.Linear(2, 2).double()}), "cpu")),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    mixed = Net(torch.bfloat16)
    mixed.blocks[2].float()
    with pytest.raises(ValueError, match=r"one dtype.*bfloat16: embed\.weight.*float32: blocks\.2"):
        stream(mixed, folder=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        stream(tmp_path / "none")
    net = stream(Net(), folder=tmp_path)
    with pytest.raises(ValueError, match="streamed already"):
        stream(net, folder=tmp_path)
    with pytest.raises(ValueError, match="did not come from zcomm"):
        streamed(Net())
    with pytest.raises(RuntimeError, match="does not require grad"):
        net(tokens(0)).sum().backward()
    net.float().bfloat16()
    with pytest.raises(RuntimeError, match="convert the model before"):
        net(tokens(0))


def on_ranks(folder: str, weights: str) -> None:
    comm = zcomm.init()
    net = stream(Net(torch.bfloat16), weights, folder=folder)
    want = Net(torch.bfloat16)
    with torch.no_grad():
        for number in range(3):
            mine = tokens(number + comm.rank, 2 + comm.rank)  # other tokens, as many forwards
            assert torch.equal(net(mine), want(mine))
    every = sum(param.nbytes for block in want.blocks for param in block.parameters())
    assert streamed(net).streamed_nbytes in ((0,) if weights == "cpu" else range(every // 2, every * 2))
    streamed(net).close()


@pytest.mark.parametrize("weights", ["nvme", "cpu"])
def test_ranks_share_one_copy(run_ranks: Run, tmp_path: Path, weights: str) -> None:
    run_ranks(on_ranks, 2, str(tmp_path), weights)


def test_weights_in_a_mapped_file_take_no_memory_of_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limit, "_resident_nbytes", lambda: 1 << 30)
    net = nn.Linear(512, 512, bias=False)
    assert limit.inside_nbytes(net) == (1 << 30) - net.weight.nbytes
    torch.save(net.weight.detach(), tmp_path / "weights.pt")
    net.weight = nn.Parameter(torch.load(tmp_path / "weights.pt", mmap=True))
    assert limit.inside_nbytes(net) == 1 << 30
