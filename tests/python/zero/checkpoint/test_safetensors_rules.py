"""Foreign safetensors files: content that the format forbids is refused; other files are read as the library does."""

from __future__ import annotations

import errno
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

import zcomm
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.tensor_file import bytes_of, read_entries, read_part
from zcomm.zero.tensors.load import Source


def write(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(begin: Any, end: Any, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


BROKEN: dict[str, tuple[Any, int]] = {
    "overlap": ({"weight": entry(0, 8, [2]), "bias": entry(4, 12, [2])}, 12),
    "gap": ({"weight": entry(0, 8, [2]), "bias": entry(12, 20, [2])}, 20),
    "begins late": ({"weight": entry(4, 12, [2])}, 12),
    "bytes left over": ({"weight": entry(0, 8, [2])}, 12),
    "shape is larger": ({"weight": entry(0, 8, [3])}, 8),
    "shape is smaller": ({"weight": entry(0, 8, [1])}, 8),
    "ends before it begins": ({"weight": entry(8, 0, [2])}, 8),
    "negative offset": ({"weight": entry(-8, 0, [2])}, 8),
    "negative size": ({"weight": entry(0, 8, [-2])}, 8),
    "overflow": ({"weight": entry(0, 8, [1 << 62, 1 << 62])}, 8),
    "bool that is one byte": ({"weight": entry(0, 1, [4], "BOOL")}, 1),
    "complex counted as real": ({"weight": entry(0, 8, [2], "C64")}, 8),
    "unknown dtype": ({"weight": entry(0, 8, [2], "F33")}, 8),
    "sizes that are not whole numbers": ({"weight": entry(0, 8.0, [2])}, 8),
    "true as a size": ({"weight": entry(0, 4, [True])}, 4),
    "no offsets": ({"weight": {"dtype": "F32", "shape": [2]}}, 8),
    "a list": ([entry(0, 8, [2])], 8),
    "metadata that is not text": ({"__metadata__": {"a": 1}, "weight": entry(0, 8, [2])}, 8),
    "not JSON": (b"{'weight'", 8),
    "twice the same name": (b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},'
                            b'"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', 8),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_the_format_forbids_is_refused(case: str, tmp_path: Path) -> None:
    header, nbytes = BROKEN[case]
    path = write(tmp_path / "model.safetensors", header, bytes(range(1, nbytes + 1)))
    with pytest.raises(ValueError, match=r"model\.safetensors is not a valid safetensors file"):
        read_entries(path)


@pytest.mark.parametrize("length", [0, 1, 7, 100_000_001, 1 << 63, (1 << 64) - 1])
def test_the_headers_length_is_checked(length: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        read_entries(path)
    os.truncate(path, 5)
    with pytest.raises(ValueError, match="not a valid safetensors file"):
        read_entries(path)


def test_no_neighbours_bytes_become_weights(tmp_path: Path) -> None:
    """A file with wrong offsets is refused, and no weight changes."""
    model = nn.Linear(2, 2, bias=False)
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2, lr=0.1)
    before = model.weight.detach().clone()
    path = write(tmp_path / "model.safetensors", {"weight": entry(0, 8, [2, 2]), "other": entry(8, 24, [4])}, bytes(24))
    for target in (opt, model):
        with pytest.raises(ValueError, match="is not a valid safetensors file"):
            zcomm.zero.load_weights(target, path, strict=False)
        assert torch.equal(model.weight, before)
    opt.close()
    zcomm.shutdown()


def test_every_dtype_of_the_library_is_read(tmp_path: Path) -> None:
    kinds = "float8_e4m3fn float8_e5m2 float8_e8m0fnu float8_e4m3fnuz float8_e5m2fnuz bool complex64".split()
    kinds += "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 uint16 uint32 uint64".split()
    tensors = {}
    for kind in kinds:
        dtype = getattr(torch, kind, None)
        if dtype is not None:
            raw = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % 2
            tensors[kind] = raw.view(dtype).view(2, 3)
            try:
                save_file({kind: tensors[kind]}, tmp_path / "one.safetensors")
            except (KeyError, ValueError, SafetensorError):  # another version of the library
                del tensors[kind]
    assert len(tensors) >= 15
    path = tmp_path / "all.safetensors"
    save_file(tensors, path)
    entries = read_entries(path)
    with Folder(tmp_path) as folder:
        for name, tensor in tensors.items():
            read = read_part(folder, entries[name]).view(entries[name].shape)
            assert read.dtype == tensor.dtype
            assert torch.equal(read.view(torch.uint8), tensor.view(torch.uint8)), name


# --- fuzzed ---------------------------------------------------------------------------------------------------------

SIZES = {"F32": 4, "F16": 2, "BOOL": 1, "C64": 8, "I64": 8, "U8": 1, "F8_E4M3": 1, "BF16": 2}


def valid(dice: random.Random) -> tuple[dict[str, Any], int]:
    header: dict[str, Any] = {}
    at = 0
    for number in range(dice.randint(0, 4)):
        dtype = dice.choice(list(SIZES))
        shape = [dice.randint(0, 3) for _ in range(dice.randint(0, 3))]
        nbytes = SIZES[dtype]
        for size in shape:
            nbytes *= size
        header[f"t{number}"] = entry(at, at + nbytes, shape, dtype)
        at += nbytes
    if dice.random() < 0.3:
        header["__metadata__"] = {"format": "pt"}
    items = list(header.items())
    dice.shuffle(items)
    return dict(items), at


def mutated(dice: random.Random, header: dict[str, Any], nbytes: int) -> tuple[Any, int]:
    names = [name for name in header if name != "__metadata__"]
    odd = [0, 1, -1, 4, 8, 1 << 31, 1 << 63, 1 << 64, 1.0, True, None, "4", [], {}]
    kind = dice.randrange(9)
    if kind == 0:
        return header, max(0, nbytes + dice.choice([-4, -1, 1, 4]))
    if kind == 1 and header:
        text = bytearray(json.dumps(header).encode())
        text[dice.randrange(len(text))] = dice.choice(b'{}[]",:0123456789- \x00\xffabE.')
        return bytes(text), nbytes
    if kind == 2:
        return (json.dumps(header) + dice.choice([" ", "  \n", "x", "{}", "\x00"])).encode(), nbytes
    if not names:
        return header, nbytes
    one = header[dice.choice(names)]
    if kind == 3:
        one["data_offsets"][dice.randrange(2)] += dice.choice([-8, -4, -1, 1, 4, 8])
    elif kind == 4:
        one["data_offsets"][dice.randrange(2)] = dice.choice(odd)
    elif kind == 5 and one["shape"]:
        one["shape"][dice.randrange(len(one["shape"]))] = dice.choice(odd)
    elif kind == 6:
        one["shape"] = dice.choice([[], [0], [1], one["shape"] + [1], one["shape"] + [1 << 60, 1 << 60, 0], 3, None])
    elif kind == 7:
        one["dtype"] = dice.choice([*SIZES, "F4", "F6_E2M3", "f32", 4, None, "C128"])
    else:
        other = header[dice.choice(names)]
        one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    return header, nbytes


def by_the_library(path: Path) -> dict[str, torch.Tensor] | None:
    """Read the file by the safetensors library; None if it refuses."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is not a dict)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, OverflowError):
        return None


@pytest.mark.parametrize("seed", range(4))
def test_a_file_is_read_if_and_only_if_the_library_reads_it(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    path, accepted, refused = tmp_path / "x.safetensors", 0, 0
    for number in range(600):
        header, nbytes = valid(dice)
        header, nbytes = mutated(dice, header, nbytes) if number % 4 else (header, nbytes)
        data = bytes(number % 2 for number in range(nbytes))
        write(path, header, data)
        theirs = by_the_library(path)
        try:
            ours = read_entries(path)
        except (OSError, ValueError) as error:
            stricter = "there twice" in str(error) or "known are" in str(error)  # F4, F6: less than a byte
            assert theirs is None or stricter, f"seed {seed}, number {number}: {header}: {error}"
            refused += 1
            continue
        assert theirs is not None, f"seed {seed}, number {number}: {header} was accepted"
        accepted += 1
        assert ours.keys() == theirs.keys()
        with Folder(tmp_path) as folder:
            for name, tensor in theirs.items():
                assert ours[name].shape == tensor.shape and ours[name].torch_dtype == tensor.dtype
                assert bytes_of(read_part(folder, ours[name])) == bytes_of(tensor)
    assert min(accepted, refused) > 100, (accepted, refused)


# --- which file ------------------------------------------------------------------------------------------------------


def test_an_index_names_files_of_its_folder(tmp_path: Path) -> None:
    """Otherwise bytes of other files could become weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "secret.safetensors")
    for name in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "..", "", 4, None, ["a"]):
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        with pytest.raises(ValueError, match=r'index\.json: weight_map\["weight"\] is .*expected the plain name'):
            zcomm.zero.load_weights(nn.Linear(2, 2, bias=False), folder)
    for text in ("{", "[]", '{"weight_map": 3}', "[" * 100_000, "\xff"):
        index.write_text(text, encoding="latin-1")
        with pytest.raises(ValueError, match=r"index\.json is not a valid index"):
            zcomm.zero.load_weights(nn.Linear(2, 2, bias=False), folder)


def test_links_of_a_hubs_cache_are_followed(tmp_path: Path) -> None:
    save_file({"weight": torch.full((2, 2), 3.0)}, tmp_path / "blob")
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    model = nn.Linear(2, 2, bias=False)
    zcomm.zero.load_weights(model, tmp_path / "snapshot")
    assert torch.equal(model.weight, torch.full((2, 2), 3.0))


def test_a_tensor_that_is_in_two_files_is_refused(tmp_path: Path) -> None:
    for number in (1, 2):
        save_file({"weight": torch.full((2, 2), float(number))}, tmp_path / f"{number}.safetensors")
    model = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=r"weight is in 1\.safetensors and in 2\.safetensors"):
        zcomm.zero.load_weights(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "2.safetensors"}}')
    zcomm.zero.load_weights(model, tmp_path)
    assert torch.equal(model.weight, torch.full((2, 2), 2.0))
    save_file({"a": torch.ones(2, 2), "b": torch.zeros(2, 2)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="a and b both become weight"):
        zcomm.zero.load_weights(model, tmp_path / "x.safetensors", rename=lambda name: "weight")


def test_a_file_that_changes_before_its_weights_are_read(tmp_path: Path) -> None:
    """The file's header differs from the one that was read."""
    path = tmp_path / "model.safetensors"
    save_file({"weight": torch.ones(2, 2)}, path)
    with torch.device("meta"):
        model = nn.Linear(2, 2, bias=False)
    zcomm.zero.load_weights(model, path)
    path.unlink()
    save_file({"bias": torch.zeros(2, 2), "weight": torch.full((2, 2), 5.0)}, path)
    with pytest.raises(OSError, match="the file has changed since load_weights read its header") as told:
        zcomm.ZeroOptimizer(model, "sgd", lr=0.1)
    assert told.value.errno == errno.ESTALE
    zcomm.shutdown()


def rename_fails_on_one(folder: str) -> list[str]:
    comm = zcomm.init()
    model = nn.Linear(2, 2, bias=False)
    opt = zcomm.ZeroOptimizer(model, "sgd", stage=2, lr=0.1)
    said = []

    def rename(name: str) -> str:
        return {}[name] if comm.rank == 1 else name  # type: ignore[no-any-return]

    for target in (folder, folder + "/none"):
        try:
            zcomm.zero.load_weights(opt, target, rename=rename if target == folder else None)
        except (OSError, KeyError) as error:
            said.append(f"{type(error).__name__}: {error}")
    original = Source.read

    def fails(self: Source, *args: Any) -> torch.Tensor:
        if comm.rank == 0:  # it has all elements of such a small weight
            raise MemoryError("no memory")
        return original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Source, "read", fails)
        with pytest.raises(MemoryError if comm.rank == 0 else OSError, match="no memory"):
            zcomm.zero.load_weights(opt, folder)
    with pytest.raises(RuntimeError, match="load a checkpoint"):
        opt.save(folder + "/never")
    opt.close()
    zcomm.shutdown()
    return said


def test_a_rank_that_cannot_load_weights_makes_all_raise(run_ranks: Any, tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    first, second = run_ranks(rename_fails_on_one, 2, str(tmp_path))
    assert "failed on rank 1: KeyError: 'weight'" in first[0] and second[0] == "KeyError: 'weight'"
    assert first[1].startswith("FileNotFoundError") and second[1].startswith("FileNotFoundError")


def test_numbers_are_not_cut_to_another_kind(tmp_path: Path) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    before = model.weight.detach().clone()
    good = {"weight": torch.ones(2, 2), "count": torch.ones(2, dtype=torch.int32)}
    for name, value in (("weight", torch.ones(2, 2, dtype=torch.complex64)), ("count", torch.full((2,), 1.7))):
        save_file(good | {name: value}, tmp_path / "x.safetensors")
        with pytest.raises(ValueError, match=f"values would be lost: {name}: [CF]"):
            zcomm.zero.load_weights(model, tmp_path / "x.safetensors")
        assert torch.equal(model.weight, before)
    save_file(good, tmp_path / "x.safetensors")
    zcomm.zero.load_weights(model, tmp_path / "x.safetensors")
    assert torch.equal(model.weight, torch.ones(2, 2)) and model.count.tolist() == [1, 1]
