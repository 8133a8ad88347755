"""Weights of mapped files (safetensors, torch.load(mmap=True)): their bits, memory, and changes of the files."""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zcomm
from tiers import slow
from zcomm.zero import GatheredParameters, full_param
from zcomm.zero.materialize import mapped_file

Run = Callable[..., list[Any]]
WIDTH, LAYERS = 512, 6


class Net(nn.Module):
    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def write(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    torch.manual_seed(9)
    values = {name: value.to(dtype) for name, value in Net().state_dict().items()}
    save_file(values, path)
    return values


def assign(model: nn.Module, path: Path) -> None:
    """Assign the tensors of the file to the model, as transformers' from_pretrained does."""
    model.load_state_dict(load_file(path), assign=True)


def copy(model: nn.Module, path: Path, rank: int = 0) -> None:
    """Copy the tensors into the model's, as transformers' from_pretrained does in stage 3."""
    values = load_file(path)
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if own:
            with GatheredParameters(list(own.values()), modifier_rank=0):
                if rank == 0:
                    module._load_from_state_dict(values, f"{name}.", {}, True, [], [], [])


def convert(model: nn.Module, path: Path) -> None:
    for name, value in load_file(path).items():
        place, _, last = name.rpartition(".")
        setattr(model.get_submodule(place), last, nn.Parameter(value.to(torch.bfloat16)))


def optimizer(model: nn.Module, folder: str | Path, **options: Any) -> zcomm.ZeroOptimizer:
    offload = zcomm.zero.Offload("nvme", "nvme", gradients="nvme", update="forward")
    return zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, offload=offload, nvme_path=folder, **options)


def load_in_every_way(folder: str) -> list[str]:
    comm = zcomm.init(timeout=60)
    path, wrong = Path(folder) / "model.safetensors", []
    values = load_file(path)
    for precision in ("fp32", "bf16"):
        for way in ("assign", "assign inside", "copy", "convert inside"):
            torch.manual_seed(100 + comm.rank)
            with zcomm.zero.Init(enabled=way != "assign"):
                model = Net()
                if way == "assign inside":
                    assign(model, path)
                elif way == "convert inside":
                    convert(model, path)
            if way == "assign":
                assign(model, path)
            elif way == "copy":
                copy(model, path, comm.rank)
                if not all(param.is_meta for param in model.parameters() if param.dim() > 1):
                    wrong.append(f"{way}: a weight of the file has memory")
            opt = optimizer(model, folder, precision=precision, share_parameters=False)
            for name, param in model.named_parameters():
                wanted = values[name].bfloat16() if way == "convert inside" else values[name]
                if not torch.equal(full_param(param), wanted.float()):
                    wrong.append(f"{precision}, {way}: {name} differs")
            opt.close()
    zcomm.shutdown()
    return wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_the_weights_are_those_of_the_file(run_ranks: Run, tmp_path: Path, world_size: int, dtype: torch.dtype) -> None:
    write(tmp_path / "model.safetensors", dtype)
    for wrong in run_ranks(load_in_every_way, world_size, str(tmp_path)):
        assert not wrong, "\n".join(wrong)


def peak() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition("VmHWM:")[2].split()[0]) * 1024


def build(folder: str, load: Callable[[nn.Module, Path], None] | None, inside: bool, copied: bool) -> int:
    """Return the growth of the peak from the model's construction to its ZeroOptimizer's."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # otherwise the next model reuses memory that the previous one has freed
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured from this point
    before = peak()
    with zcomm.zero.Init():
        model = Net(1024, 24)
        if load is not None and inside:
            load(model, Path(folder) / "large")
    if load is not None and not inside:
        load(model, Path(folder) / "large")
    if copied:
        assert all(param.is_meta for param in model.parameters() if param.dim() > 1)
    opt = optimizer(model, folder)
    grown = peak() - before
    opt.close()
    return grown


def measure(folder: str) -> dict[str, int]:
    zcomm.init(timeout=60)
    build(folder, None, False, False)  # for one-time allocations
    found = {"drawn": build(folder, None, False, False)}
    found["assign"] = build(folder, assign, False, False)
    found["copy"] = build(folder, lambda model, path: copy(model, path, zcomm.init().rank), False, True)
    found["convert"] = build(folder, convert, True, True)
    zcomm.shutdown()
    return found


@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_the_peak_is_that_of_drawn_weights(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    torch.manual_seed(1)
    save_file(Net(1024, 24).state_dict(), tmp_path / "large")
    nbytes = (tmp_path / "large").stat().st_size
    assert nbytes > 96 << 20
    for found in run_ranks(measure, world_size, str(tmp_path)):
        for way, grown in found.items():
            assert grown < found["drawn"] + nbytes // 3, {way: f"{n / 2**20:.0f} MiB" for way, n in found.items()}


def test_elements_are_read_from_the_file(tmp_path: Path) -> None:
    values = write(tmp_path / "a")
    tensor = load_file(tmp_path / "a")["blocks.1.weight"]
    place, read = mapped_file.file_range(tensor), mapped_file.reader_of(tensor)
    assert place is not None and read is not None
    want = values["blocks.1.weight"].reshape(-1)
    assert torch.equal(place.read(1000, 5000), want[1000:5000]) and torch.equal(read(7, 9), want[7:9])
    assert mapped_file.file_range(tensor[100:300]) is not None, "a part that is contiguous"
    other = tensor.t(), tensor[:, :8], tensor.clone(), torch.empty(1 << 20), tensor[:1]
    assert [mapped_file.file_range(each) for each in other] == [None] * len(other)


def test_what_the_program_wrote_is_taken_from_memory(tmp_path: Path, world_of_one: None) -> None:
    """Writes through .data and numpy change no version counter."""
    write(tmp_path / "a")
    model = Net()
    assign(model, tmp_path / "a")
    model.blocks[0].weight.data.mul_(2)
    model.blocks[1].weight.detach().numpy()[100, 7] = 5
    model.blocks[2].weight.data[0] = 3
    wanted = [param.detach().clone() for param in model.parameters()]
    assert mapped_file.file_range(model.blocks[1].weight) is None
    assert mapped_file.file_range(model.blocks[3].weight) is not None
    opt = optimizer(model, tmp_path)
    assert all(torch.equal(full_param(param), want) for param, want in zip(model.parameters(), wanted, strict=True))
    opt.close()


def test_what_was_written_is_copied_from_memory(tmp_path: Path, world_of_one: None) -> None:
    write(tmp_path / "a")
    values = load_file(tmp_path / "a")
    values["blocks.0.weight"].data.mul_(2)
    with zcomm.zero.Init():
        model = Net()
    with GatheredParameters(model, modifier_rank=0):
        model.load_state_dict(values)
        values["blocks.1.weight"].mul_(7)  # after the copy
        assert torch.equal(model.blocks[2].weight, values["blocks.2.weight"]), "it is real where it is looked at"
        with torch.no_grad():
            model.blocks[3].weight.mul_(3)
    wanted = write(tmp_path / "b")
    opt = optimizer(model, tmp_path)
    factors = {"blocks.0.weight": 2, "blocks.3.weight": 3}
    for name, param in model.named_parameters():
        assert torch.equal(full_param(param), wanted[name] * factors.get(name, 1)), name
    opt.close()


def test_a_block_that_raises_keeps_nothing(tmp_path: Path, world_of_one: None) -> None:
    write(tmp_path / "a")
    torch.manual_seed(4)
    plain = Net()
    torch.manual_seed(4)
    with zcomm.zero.Init(min_count=1):
        model = Net()
    with pytest.raises(KeyError), GatheredParameters(model, modifier_rank=0):
        model.load_state_dict(load_file(tmp_path / "a"))
        raise KeyError
    with GatheredParameters(model):  # without a modifier they are dropped, too
        model.load_state_dict(load_file(tmp_path / "a"))
    opt = optimizer(model, tmp_path)
    assert all(torch.equal(full_param(a), b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    opt.close()


def test_a_file_that_changes_is_an_error(tmp_path: Path, world_of_one: None) -> None:
    path = tmp_path / "a"
    for change in ("written", "removed", "replaced"):
        values = write(path)
        with zcomm.zero.Init():
            model = Net()
        copy(model, path)
        if change == "written":
            with path.open("r+b") as file:
                file.seek(-8, os.SEEK_END)
                file.write(b"12345678")
            os.utime(path, ns=(1, time.time_ns() + 10**9))
            with pytest.raises(OSError, match=r"the file has changed since the model was loaded.*/a"):
                optimizer(model, tmp_path)
            gc.collect()  # the failed optimizer is in reference cycles, with its swap file
            continue
        if change == "removed":
            path.unlink()
        else:
            save_file({"other": torch.zeros(3)}, tmp_path / "b")
            (tmp_path / "b").replace(path)
        opt = optimizer(model, tmp_path)  # the file is still open
        assert all(torch.equal(full_param(param), values[name]) for name, param in model.named_parameters())
        opt.close()


def test_torch_files_and_private_maps_only(tmp_path: Path, world_of_one: None) -> None:
    values = write(tmp_path / "a")
    torch.save(values, tmp_path / "a.pt")
    mapped = torch.load(tmp_path / "a.pt", mmap=True)
    place = mapped_file.file_range(mapped["blocks.4.weight"])
    assert place is not None and torch.equal(place.read(0, WIDTH * WIDTH), values["blocks.4.weight"].view(-1))
    shared = torch.from_file(str(tmp_path / "c"), shared=True, size=1 << 16)
    assert mapped_file.file_range(shared) is None, "the program may still write to it"


@pytest.mark.parametrize("way", ["file", "drawn"])
def test_a_dtype_of_later_rounds(world_of_one: None, tmp_path: Path, way: str) -> None:
    values = write(tmp_path / "a")  # draws the same values as Net()
    torch.manual_seed(9)
    with zcomm.zero.Init():
        model = Net()
    if way == "file":
        copy(model, tmp_path / "a")
    model.bfloat16()
    opt = optimizer(model, tmp_path)
    for name, param in model.named_parameters():
        assert torch.equal(full_param(param), values[name].bfloat16().float()), name
    opt.close()
