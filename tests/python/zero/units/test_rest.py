"""Parts of a model that are not sharded: buffers and whole frozen parameters. Their dtypes, checkpoints and errors."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm
from zcomm.zero.checkpoint.export import export
from zcomm.zero.remedy import with_remedy

Run = Callable[..., list[Any]]


class Sized(nn.Module):
    def __init__(self, width: int, table: int, gain: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.gain = nn.Parameter(torch.ones(gain), requires_grad=False)
        self.register_buffer("table", torch.zeros(table))


def load_other_shapes(folder: str) -> list[str]:
    zcomm.init(timeout=60)
    saved = Sized(4, 1, 4)
    opt = zcomm.ZeroOptimizer(saved, "sgd", stage=1)
    opt.save(f"{folder}/c")
    opt.close()
    said = []
    for shapes, strict in (((4, 7, 4), False), ((4, 1, 5), False), ((4, 1, 5), True)):
        model = Sized(*shapes)
        nn.init.zeros_(model.layer.weight)
        opt = zcomm.ZeroOptimizer(model, "sgd", stage=1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match="other shapes") as told:
            opt.load(f"{folder}/c", strict=strict)
        said.append(str(told.value).partition("other shapes: ")[2])
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), f"{name}: nothing has changed"
        opt.close()
    return said


@pytest.mark.parametrize("world_size", [1, 2])
def test_shapes_are_compared_before_anything_changes(run_ranks: Run, tmp_path: Any, world_size: int) -> None:
    for said in run_ranks(load_other_shapes, world_size, str(tmp_path)):
        assert said[0].startswith("table: (1,) there, (7,) here"), "one element is no value for all"
        assert said[1].startswith("gain: (4,) there, (5,) here") and said[2].startswith("gain: (4,) there, (5,) here")


class Many(nn.Module):
    """A buffer of each kind that users register, used as they use it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.plain_norm = nn.BatchNorm1d(8, affine=False)
        self.gain = nn.Parameter(torch.ones(8), requires_grad=False)
        angles = torch.outer(torch.arange(6.0), 10000.0 ** -(torch.arange(4.0) / 4))
        self.register_buffer("table", angles + 1e-4)
        self.register_buffer("rotary", torch.polar(torch.ones(6, 4), angles))
        self.register_buffer("wide", torch.full((2,), 1 / 3, dtype=torch.complex128))
        self.register_buffer("mask", torch.full((6,), torch.finfo(torch.float32).min))
        self.register_buffer("codes", torch.arange(-3, 3, dtype=torch.int16))
        self.register_buffer("ids", torch.arange(6).to(torch.uint16))
        self.register_buffer("exact", torch.tensor(1 / 3, dtype=torch.float64))
        self.register_buffer("small", torch.ones(3).to(torch.float8_e4m3fn))
        self.register_buffer("none", torch.empty(0, dtype=torch.complex64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain_norm(self.norm(self.layer(x))) * self.gain
        turned = torch.view_as_real(torch.view_as_complex(x.float().view(-1, 4, 2)) * self.rotary).flatten(1)
        return self.layer(turned.to(x.dtype))


STAYS = ("table", "rotary", "wide", "mask", "codes", "ids", "exact", "small", "none", "norm.num_batches_tracked")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def dtypes_of(precision: str, buffer_dtype: str | None) -> list[Any]:
    comm = zcomm.init(timeout=60)
    training = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    found = []
    for stage in (1, 3):
        torch.manual_seed(comm.rank)
        model, same = Many(), Many()
        if comm.rank == 1:
            with torch.no_grad():
                for buffer in model.buffers():
                    buffer.zero_()
        opt = zcomm.ZeroOptimizer(model, "sgd", stage=stage, precision=precision, buffer_dtype=buffer_dtype)
        buffers, before = dict(model.named_buffers()), dict(same.named_buffers())
        for name in STAYS:
            floating = before[name].is_floating_point() and name != "small"  # 8 bits are codes
            if buffer_dtype is None or not floating:
                assert buffers[name].dtype is before[name].dtype, name
                assert torch.equal(bits(buffers[name]), bits(before[name])), f"{name}: rank 0's"
            else:
                assert buffers[name].dtype is training[buffer_dtype], name
                assert buffers[name].float().isfinite().all(), f"{name}: what is finite stays so"
        assert model.gain.dtype is training[precision] or stage == 3
        opt.backward(model(torch.randn(6, 8).to(training[precision])).float().square().mean())
        opt.step()
        found.append([model.norm.running_mean.dtype, model.plain_norm.running_mean.dtype])
        opt.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_buffers_keep_their_dtype(run_ranks: Run, precision: str) -> None:
    training = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    for of_rank in run_ranks(dtypes_of, 2, precision, None):
        for norm, plain in of_rank:
            assert norm is training, "torch takes statistics in the dtype of the norm's weights alone"
            assert plain is torch.float32


def test_buffers_are_cast_where_that_is_wanted(run_ranks: Run) -> None:
    assert run_ranks(dtypes_of, 1, "fp16", "fp16") == [[[torch.float16] * 2] * 2]


class Positions(nn.Module):
    """Adds its table without a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.full((4,), 1 / 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.table)


def test_a_table_that_is_added_uncast() -> None:
    config = {"train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "optimizer": {"type": "AdamW"}}
    x = torch.ones(2, 4).bfloat16()
    for section, dtype in (({}, torch.float32), ({"data_types": {"buffer_dtype": "bf16"}}, torch.bfloat16)):
        engine, *_ = zcomm.initialize(model=Positions(), config=config | section)
        assert engine.module.table.dtype is dtype
        if not section:
            with pytest.raises(RuntimeError, match="same dtype"):
                engine(x)
        else:
            assert engine(x).dtype is torch.bfloat16
        engine.destroy()
    with pytest.raises(ValueError, match="buffer_dtype='int8'; use None"):
        zcomm.ZeroOptimizer(Positions(), "sgd", buffer_dtype="int8")
    zcomm.shutdown()


def test_every_kind_of_buffer_is_saved_and_loaded(tmp_path: Any) -> None:
    model, other = Many(), Many()
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2, precision="bf16")
    with pytest.raises(ValueError, match=r"wide is torch\.complex128, .* persistent=False"):
        opt.save(tmp_path / "c")
    assert not list(tmp_path.iterdir()), "said before anything is written"
    opt.close()
    for each in (model, other):
        each._non_persistent_buffers_set.add("wide")
    with torch.no_grad():
        for buffer in other.buffers():
            buffer.zero_()
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2, precision="bf16")
    opt.save(tmp_path / "c")
    opt.close()
    want = {name: value.clone() for name, value in model.state_dict().items()}
    opt = zcomm.ZeroOptimizer(other, "sgd", stage=2, precision="bf16")
    opt.load(tmp_path / "c")
    for name, value in other.state_dict().items():
        assert value.dtype is want[name].dtype and torch.equal(bits(value), bits(want[name])), name
    opt.close()
    out = tmp_path / "out.safetensors"
    export(tmp_path / "c", out, torch.float32)
    exported = load_file(out)
    assert exported["rotary"].dtype is torch.complex64 and torch.equal(exported["rotary"], want["rotary"])
    assert torch.equal(exported["codes"], want["codes"]) and torch.equal(exported["ids"], want["ids"])
    zcomm.shutdown()


def test_memory_is_a_dict_and_shown_as_a_table() -> None:
    opt = zcomm.ZeroOptimizer(torch.nn.Linear(1000, 30), stage=2)
    memory = opt.memory()
    opt.close()
    zcomm.shutdown()
    assert json.loads(json.dumps(memory)) == memory == eval(repr(memory)) and isinstance(memory, dict)
    lines = str(memory).splitlines()
    assert lines[0].split() == ["device", "cpu", "nvme"]
    assert [line.split()[0] for line in lines[1:]] == ["parameters", "gradients", "optimizer", "slots", "total"]
    assert len({len(line) for line in lines}) == 1 and "117.5 KiB" in lines[1], str(memory)


def called_on_one_rank(folder: str, call: str, stage: int) -> str:
    comm = zcomm.init(timeout=20)
    model = torch.nn.Linear(4, 4)
    opt = zcomm.ZeroOptimizer(model, stage=stage)
    model(torch.ones(1, 4)).sum().backward()
    opt.step()
    opt.zero_grad()
    try:
        if comm.rank == 0:
            opt.save(f"{folder}/saved") if call == "save()" else opt.state_dict()
        else:
            model(torch.ones(1, 4)).sum().backward()
            opt.step()
    except zcomm.CollectiveMismatch as error:
        return str(error)
    return ""


def one_batch_more() -> str:
    comm = zcomm.init(timeout=20)
    model = torch.nn.Linear(4, 4)
    opt = zcomm.ZeroOptimizer(model, stage=2)
    try:
        for _ in range(3 + comm.rank):
            model(torch.ones(1, 4)).sum().backward()
            opt.step()
            opt.zero_grad()
    except zcomm.PeerLost as error:
        assert error.rank == 0
        return str(error)
    opt.close()
    return ""


def test_calls_that_not_all_ranks_make_are_explained(run_ranks: Any, tmp_path: Any) -> None:
    for call, stage in (("save()", 2), ("state_dict()", 0)):
        first, second = run_ranks(called_on_one_rank, 2, str(tmp_path), call, stage)
        assert first.endswith(f"({call} is called by all ranks)"), first
        assert "rank 0: all_reduce int" in second, second
    left, longer = run_ranks(one_batch_more, 2)
    assert left == "" and "after 3 optimizer steps: have all ranks equally many batches" in longer, longer


def test_a_deadline_names_the_call() -> None:
    opt = zcomm.ZeroOptimizer(torch.nn.Linear(4, 4), stage=0)
    text = r"waited 3 s for rank 1 \(state_dict\(\) is called by all ranks\)$"
    with pytest.raises(TimeoutError, match=text), with_remedy("state_dict()", opt._train):
        raise TimeoutError("rank 0 waited 3 s for rank 1")
    opt.close()
    zcomm.shutdown()
