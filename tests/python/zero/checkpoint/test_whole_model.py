"""The model as one file (Engine.save_16bit_model): every tier of the weights, one tensor in memory, errors on all."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

import zcomm
from zcomm.zero.checkpoint.whole_model import save_model
from zcomm.zero.files import durable

Run = Callable[..., list[Any]]

PLACES: list[tuple[int, Any, str, bool]] = [
    (0, None, "bf16", True),
    (1, "cpu", "fp16", True),
    (2, None, "bf16", True),
    (2, ("nvme", None, 0.5), "bf16", False),
    (3, None, "fp32", True),
    (3, None, "bf16", False),
    (3, ("cpu", "nvme", 1.0), "bf16", True),
    (3, ("nvme", "cpu", 0.7), "fp32", True),
]


class Net(nn.Module):
    """A model with tied and frozen parameters and buffers, and odd element counts, for two 16-bit numbers per word."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.last = nn.Linear(7, 5)
        self.again = nn.Linear(5, 7, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.last(self.norm(self.first(x)) * self.frozen))


def step(model: nn.Module, opt: Any, number: int) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number)).to(opt.precision.dtype)
    opt.backward(model(x).float().square().mean())
    opt.step()
    opt.zero_grad()


def export_everywhere(folder: str) -> None:
    comm = zcomm.init(timeout=60)
    for number, (stage, offload, precision, shared) in enumerate(PLACES):
        torch.manual_seed(5)
        model = Net()
        where = zcomm.Offload(*offload) if isinstance(offload, tuple) else offload
        opt = zcomm.ZeroOptimizer(
            model,
            stage=stage,
            offload=where,
            nvme_path=f"{folder}/drive",
            precision=precision,
            share_parameters=shared,
            bucket_mb=0.0001,
        )
        for each in range(2):
            step(model, opt, each)
        wanted = opt.full_state_dict()
        fresh = Net().to(opt.precision.dtype)
        fresh.load_state_dict(wanted)
        assert list(wanted) == list(fresh.state_dict()) and fresh.norm.num_batches_tracked == 2
        assert wanted.pop("again.weight").data_ptr() == wanted["first.weight"].data_ptr(), "tied: one tensor"
        waited, beside = Path(folder, f"waited{number}.safetensors"), Path(folder, f"beside{number}.safetensors")
        save_model(opt._live, waited, wait=True).wait()
        drive = threading.Event()
        durable.before_write = lambda what, drive=drive: drive.wait(60)  # type: ignore[misc]
        task = save_model(opt._live, beside, wait=False)
        for each in range(2, 4):
            step(model, opt, each)  # all weights change
        assert not task.done() or comm.rank > 0
        drive.set()
        task.wait()
        durable.before_write = lambda what: None
        for path in (waited, beside):
            if comm.rank == 0:
                found = load_file(path)
                assert found.keys() == wanted.keys(), (stage, offload, precision)
                read = Net().to(opt.precision.dtype)
                assert load_model(read, path) == (set(), []), "safetensors finds the tied name in the metadata"
                assert torch.equal(read.again.weight, wanted["first.weight"])
                for name, tensor in wanted.items():
                    same = found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
                    assert same, (name, stage, offload, precision, path.name)
        opt.close()
    comm.barrier()
    assert not list(Path(folder, "drive").iterdir())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_weights_of_every_place(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(export_everywhere, world_size, str(tmp_path))


MANY, EACH = 24, 1 << 20  # tensors of 4 MiB


def peak_nbytes() -> int:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def grown_by(folder: str, wait: bool) -> int | None:
    comm = zcomm.init(timeout=60)
    model = nn.ParameterList(nn.Parameter(torch.ones(EACH)) for _ in range(MANY))
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=1, lr=0.1, share_parameters=False)
    grown = []
    for name in (
        "warm",
        "measured",
        "measured",
        "measured",
    ):  # pages that the system had reclaimed are counted again, so take the least
        gc.collect()
        comm.barrier()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from this point
        except OSError:
            return None
        before = peak_nbytes()
        save_model(opt._live, Path(folder, f"{name}.safetensors"), wait).wait()
        grown.append(peak_nbytes() - before)
    opt.close()
    return min(grown[1:])


@pytest.mark.slow
@pytest.mark.parametrize("wait", [True, False])
def test_one_tensor_is_in_memory(run_ranks: Run, tmp_path: Path, wait: bool) -> None:
    """A background save also has a copy of this rank's shards: half of the model, of two ranks."""
    shards = 0 if wait else MANY * EACH * 4 // 2
    for grown in run_ranks(grown_by, 2, str(tmp_path), wait):
        if grown is None:
            pytest.skip("the peak cannot be reset here")
        assert grown < shards + 5 * EACH * 4, "of 24 tensors"
    assert (tmp_path / "measured.safetensors").stat().st_size > MANY * EACH * 4


def full_in_the_middle(folder: str, wait: bool) -> str:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))
    opt = zcomm.ZeroOptimizer(model, stage=3)
    path = Path(folder, "out", "model.safetensors")
    save_model(opt._live, path, wait=True)
    writes = 0

    def full(what: str) -> None:
        nonlocal writes
        writes += 1
        if writes == 3:
            raise OSError(errno.ENOSPC, "the drive is full")

    durable.before_write = full
    with pytest.raises(OSError, match="the drive is full") as told:
        save_model(opt._live, path, wait).wait()
    durable.before_write = lambda what: None
    assert told.value.errno == errno.ENOSPC
    Path(folder, "file").touch()
    with pytest.raises(OSError, match="file") as told:
        save_model(opt._live, Path(folder, "file", "below", "model.safetensors"), wait).wait()
    assert told.value.errno == errno.ENOTDIR
    opt.close()
    return str(told.value)


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_drive_fails_all_and_keeps_the_last(run_ranks: Run, tmp_path: Path, wait: bool) -> None:
    _, second = run_ranks(full_in_the_middle, 2, str(tmp_path), wait)
    assert "failed on rank 0" in second
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == 4
