"""Snapshots of swap files: complete or absent, verified when they are restored, replaced atomically."""

from __future__ import annotations

import asyncio
import copy
import errno
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from programs import Program
from swap_files import nameless
from zcomm.memory import snapshot
from zcomm.offload import finished
from zcomm.zero.cache.swap import GradualCopy, Swap

SIZES = (1, 1000, 4096, 65536, 65536 + 12, 300001)


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {f"k{n}": torch.randint(0, 256, (n,), dtype=torch.uint8, generator=generator) for n in SIZES}


def fill(swap: zcomm.SwapFile, seed: int) -> None:
    data = tensors(seed)
    data["w"] = torch.arange(33, dtype=torch.float32).view(3, 11) + seed
    for key, tensor in data.items():
        swap.write(key, tensor)
    swap.wait()


def check(swap: zcomm.SwapFile, seed: int) -> None:
    data = tensors(seed)
    data["w"] = torch.arange(33, dtype=torch.float32).view(3, 11) + seed
    for key, tensor in data.items():
        out = torch.zeros_like(tensor)
        swap.read(key, out).wait()
        assert torch.equal(out, tensor), key


@pytest.mark.parametrize("engine", ["threads", "auto"])
@pytest.mark.parametrize("drives", [1, 3])
@pytest.mark.parametrize("direct", [True, False])
def test_comes_back_elsewhere(tmp_path: Path, engine: str, drives: int, direct: bool) -> None:
    """Restore with another block size, another number of drives, and into a file that already has the keys."""
    folders = [tmp_path / f"drive{i}" for i in range(drives)]
    with zcomm.SwapFile(folders, engine=engine, block_nbytes=64 << 10, direct=direct) as swap:
        swap.write("gone", torch.zeros(70000)).wait()
        fill(swap, 1)
        swap.release("gone")  # leaves a hole
        swap.reserve("empty", 10, torch.float32)  # has no data
        said = swap.snapshot(tmp_path / "snap")
        assert said["keys"] == len(SIZES) + 1 and said["nbytes"] == sum(SIZES) + 33 * 4
        assert set(said["methods"]) <= {"reflink", "copy_file_range", "read_write"} and len(said["methods"]) == drives
        fill(swap, 2)  # after the snapshot
    for options in ({"block_nbytes": 4096}, {"block_nbytes": 1 << 20, "direct": not direct}, {"checksum": False}):
        with zcomm.SwapFile(tmp_path / "other", engine=engine, **options) as other:
            other.write("w", torch.zeros(7)).wait()
            forms = other.restore(tmp_path / "snap")
            assert forms["w"] == ((3, 11), torch.float32) and len(forms) == len(SIZES) + 1
            check(other, 1)
            with pytest.raises(ValueError, match="unknown key"):
                other.read("empty", torch.zeros(10))


def test_replaced_as_a_whole_and_nothing_left(tmp_path: Path) -> None:
    with zcomm.SwapFile(tmp_path / "swap", block_nbytes=64 << 10) as swap:
        for seed in range(3):
            fill(swap, seed)
            swap.snapshot(tmp_path / "snap")
            assert len(list((tmp_path / "snap").iterdir())) == 2
        (tmp_path / "snap" / f"data-{'0' * 16}-0").write_bytes(b"of a killed snapshot")
        swap.snapshot(tmp_path / "snap")
        assert len(list((tmp_path / "snap").iterdir())) == 2
        swap.restore(tmp_path / "snap")
        check(swap, 2)
    assert (tmp_path / "snap").stat().st_mode & 0o777 == 0o700
    assert all(each.stat().st_mode & 0o777 == 0o600 for each in (tmp_path / "snap").iterdir())


def test_without_keys(tmp_path: Path) -> None:
    with zcomm.SwapFile(tmp_path / "swap") as swap:
        assert swap.snapshot(tmp_path / "snap")["keys"] == 0
        assert swap.restore(tmp_path / "snap") == {}
        with pytest.raises(FileNotFoundError):
            swap.restore(tmp_path / "nothing")
        (tmp_path / "bare").mkdir()
        with pytest.raises(FileNotFoundError):
            swap.restore(tmp_path / "bare")


@pytest.fixture(params=["io_uring", "threads"])
def snap(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a snapshot; all swap files of the test use one engine."""
    monkeypatch.setenv("ZCOMM_IO", request.param)
    try:
        opened = zcomm.SwapFile(tmp_path / "swap", block_nbytes=64 << 10)
    except NotImplementedError:
        pytest.skip("io_uring is refused here")
    with opened as swap:
        fill(swap, 1)
        swap.snapshot(tmp_path / "snap")
    return tmp_path / "snap"


def data_of(snap: Path) -> Path:
    return next(each for each in snap.iterdir() if each.name.startswith("data-"))


def test_a_flipped_byte_is_found_wherever_it_is(snap: Path, tmp_path: Path) -> None:
    """Flip a byte in each tile of each key; the error names key, path and the tile's offset."""
    keys = json.loads((snap / "manifest.json").read_text())["body"]["keys"]
    path = data_of(snap)
    with zcomm.SwapFile(tmp_path / "other") as swap:
        for key in keys:
            for place in {0, key["nbytes"] // 2, key["nbytes"] - 1}:
                offset = key["offsets"][0] + place
                with path.open("r+b") as file:
                    file.seek(offset)
                    byte = file.read(1)[0]
                    file.seek(offset)
                    file.write(bytes([byte ^ 1]))
                with pytest.raises(OSError, match=rf"key '{key['key']}' at offset \d+ .*crc32c") as caught:
                    swap.restore(snap)
                assert caught.value.errno == errno.EIO and caught.value.filename == str(path)
                with path.open("r+b") as file:
                    file.seek(offset)
                    file.write(bytes([byte]))
        swap.restore(snap)
        check(swap, 1)


def test_truncated_missing_and_foreign(snap: Path, tmp_path: Path) -> None:
    with zcomm.SwapFile(tmp_path / "other") as swap:
        path, manifest = data_of(snap), snap / "manifest.json"
        text = manifest.read_text()
        for damaged in (text[:-20], text.replace('"nbytes": 1000', '"nbytes": 1001'), ""):
            manifest.write_text(damaged)
            with pytest.raises(OSError) as caught:
                swap.restore(snap)
            assert caught.value.errno == errno.EIO and caught.value.filename == str(manifest)
        manifest.write_text(text.replace("zcomm-swap-snapshot 1", "zcomm-swap-snapshot 9"))
        with pytest.raises(ValueError, match="format 'zcomm-swap-snapshot 9'"):
            swap.restore(snap)
        manifest.write_text(text)
        os.truncate(path, 4096)
        with pytest.raises(OSError, match=r"key '.*' at offset \d+: unexpected end of file") as caught:
            swap.restore(snap)
        assert caught.value.filename == str(path)
        path.unlink()
        with pytest.raises(FileNotFoundError):
            swap.restore(snap)


def forge(manifest: Path, body: Any) -> None:
    """Write a manifest with a correct checksum."""
    crc32c = snapshot._crc_of(json.dumps(body, sort_keys=True))
    manifest.write_text(json.dumps({"format": snapshot.FORMAT, "crc32c": crc32c, "body": body}, sort_keys=True))


FORGED: list[tuple[list[Any], Any, str]] = [
    (["alignment"], 0, "alignment is '0'; expected a whole number of at least 1"),
    (["tile_nbytes"], 5, "tile_nbytes is '5'"),
    (["tile_nbytes"], "x", "tile_nbytes is 'x'"),
    (["keys"], {}, "keys is '{}'; expected a list"),
    (["keys", 0], 5, r"keys\[0\] is '5'"),
    (["keys", 0, "key"], None, r"keys\[0\] is "),
    (["keys", 0, "dtype"], "load", r"keys\[0\].dtype is 'load'; expected a dtype of torch"),
    (["keys", 0, "shape"], [-1], r"keys\[0\].shape is '-1'"),
    (["keys", 0, "shape"], [1 << 61], r"keys\[0\].nbytes is "),
    (["keys", 0, "nbytes"], None, r"keys\[0\].nbytes is 'None'"),
    (["keys", 0, "offsets"], [], r"keys\[0\].offsets is '\[\]'; expected 1 numbers"),
    (["keys", 0, "offsets"], [-4096], r"keys\[0\].offsets is '-4096'"),
    (["keys", 0, "crc32c"], [1] * 99, r"keys\[0\].crc32c is "),
    (["keys", 0, "first"], 1.5, r"keys\[0\].first is '1.5'"),
    (["files"], None, "files is 'None'; expected a list of names"),
    (["files"], [], "files is '\\[\\]'; expected the files of the keys' data"),
    (["files"], ["../secret"], "'../secret' is not a data file's name"),
    (["files"], [5], "5 is not a data file's name"),
]


def test_fields_of_a_strangers_manifest(snap: Path, tmp_path: Path) -> None:
    manifest = snap / "manifest.json"
    body = json.loads(manifest.read_text())["body"]
    with zcomm.SwapFile(tmp_path / "other") as swap:
        swap.write("mine", torch.ones(5)).wait()
        for way, value, said in FORGED:
            forged = copy.deepcopy(body)
            inside: Any = forged
            for key in way[:-1]:
                inside = inside[key]
            inside[way[-1]] = value
            forge(manifest, forged)
            with pytest.raises((OSError, ValueError), match=said):
                swap.restore(snap)
        forged = copy.deepcopy(body)
        forged["keys"][0] |= {"shape": [1 << 50], "dtype": "uint8", "nbytes": 1 << 50, "crc32c": []}
        forge(manifest, forged)
        with pytest.raises(OSError, match="unexpected end of file"):
            swap.restore(snap)
        forge(manifest, [1])
        with pytest.raises(ValueError, match="files is 'None'"):
            swap.restore(snap)
        manifest.write_text("[" * 200_000)
        with pytest.raises(OSError, match="not a manifest"):
            swap.restore(snap)
        manifest.unlink()
        os.mkfifo(manifest)
        with pytest.raises(OSError, match="not a regular file"):
            swap.restore(snap)
        with pytest.raises(FileExistsError, match="it is not a swap file's snapshot"):
            swap.snapshot(snap)
        manifest.unlink()
        forge(manifest, body)
        path = data_of(snap)
        path.rename(tmp_path / "data")
        os.mkfifo(path)
        with pytest.raises(OSError, match="not a regular file"):
            swap.restore(snap)
        path.unlink()
        (tmp_path / "data").rename(path)
        swap.restore(snap)
        mine = torch.zeros(5)
        swap.read("mine", mine).wait()
        assert torch.equal(mine, torch.ones(5)), "what was there has stayed"
        swap.release("mine")
        check(swap, 1)


def test_two_at_once_and_errors_leave_the_last_one(snap: Path, tmp_path: Path) -> None:
    import fcntl

    with zcomm.SwapFile(tmp_path / "other") as swap:
        fill(swap, 5)
        folder = os.open(snap, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX)
        for call in (swap.snapshot, swap.restore):
            with pytest.raises(OSError) as caught:
                call(snap)
            assert caught.value.errno == errno.EBUSY
        os.close(folder)
        os.truncate(nameless(swap.stats()["path"]), 4096)  # the copy meets the end of the file
        before = sorted(snap.iterdir())
        with pytest.raises(OSError, match="unexpected end of file"):
            swap.snapshot(snap)
        assert sorted(snap.iterdir()) == before
    with zcomm.SwapFile(tmp_path / "third") as swap:
        swap.restore(snap)
        check(swap, 1)


def test_a_foreign_manifest_is_never_replaced(tmp_path: Path) -> None:
    """The manifest of another program or of a checkpoint, or text other than JSON: the folder stays unchanged."""
    with zcomm.SwapFile(tmp_path / "swap") as swap:
        fill(swap, 1)
        for number, text in enumerate(('{"format": "zcomm checkpoint 1"}', "", "no JSON", "[]", '{"format": 3}')):
            folder = tmp_path / str(number)
            folder.mkdir()
            (folder / "manifest.json").write_text(text)
            (folder / f"data-{'0' * 16}-0").write_bytes(b"of another?")
            with pytest.raises(FileExistsError, match="it is not a swap file's snapshot") as caught:
                swap.snapshot(folder)
            assert caught.value.filename == str(folder / "manifest.json")
            assert (folder / "manifest.json").read_text() == text
            assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("how", ["newer", "damaged"])
def test_a_snapshot_that_cannot_be_read_stays_until_the_new_one_is_there(
    snap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    manifest, data = snap / "manifest.json", data_of(snap)
    text = manifest.read_text()
    old = text.replace("snapshot 1", "snapshot 2") if how == "newer" else text.replace('"nbytes": 1000', '"nbytes": 7')
    assert old != text
    manifest.write_text(old)
    with zcomm.SwapFile(tmp_path / "other") as swap:
        fill(swap, 2)
        before = sorted(snap.iterdir())
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "_write_manifest", raising(OSError(errno.ENOSPC, "full")))
            with pytest.raises(OSError, match="full"):
                swap.snapshot(snap)
        assert sorted(snap.iterdir()) == before and manifest.read_text() == old and data.stat().st_size > 0
        swap.snapshot(snap)
        assert len(list(snap.iterdir())) == 2 and not data.exists()
        swap.restore(snap)
        check(swap, 2)


def raising(error: BaseException) -> Callable[..., None]:
    def call(*args: object) -> None:
        raise error

    return call


def test_an_interrupt_when_the_new_manifest_is_in_place(
    snap: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = os.replace

    def late(*args: Any) -> None:
        replace(*args)
        raise KeyboardInterrupt

    with zcomm.SwapFile(tmp_path / "other") as swap:
        fill(swap, 2)
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", late)
            with pytest.raises(KeyboardInterrupt):
                swap.snapshot(snap)
        fill(swap, 3)
        swap.restore(snap)  # the new one, complete
        check(swap, 2)
        swap.snapshot(snap)
        assert len(list(snap.iterdir())) == 2


def test_a_copy_has_no_name_and_keeps_what_was(tmp_path: Path) -> None:
    """The next background save makes its own copy, even if this one is not closed."""
    with zcomm.SwapFile([tmp_path / "one", tmp_path / "two"], block_nbytes=64 << 10) as swap:
        fill(swap, 1)
        first = snapshot.Copy(swap._core)
        assert [path.name for path in tmp_path.glob("*/*/*")] == ["lock", "lock"]
        fill(swap, 2)
        second = snapshot.Copy(swap._core)
        for copy, seed in ((first, 1), (second, 2)):
            for key, tensor in tensors(seed).items():
                assert torch.equal(copy.load(key), tensor), key
            copy.close()


def test_a_copy_without_its_directory_says_what_to_do(tmp_path: Path) -> None:
    with zcomm.SwapFile(tmp_path / "swap") as swap:
        fill(swap, 1)
        shutil.rmtree(tmp_path / "swap")
        with pytest.raises(FileNotFoundError, match=r"removed.*save\(wait=True\)"):
            snapshot.Copy(swap._core)


_VICTIM = """
import sys, torch, zcomm
swap = zcomm.SwapFile(sys.argv[1], block_nbytes=64 << 10)
for turn in range(1, 100000):
    for key in range(8):
        swap.write(str(key), torch.full((50000,), turn))
    swap.snapshot(sys.argv[2])
    print(turn, flush=True)
"""


def test_a_kill_at_any_point_leaves_a_whole_snapshot(start_program: Callable[..., Program], tmp_path: Path) -> None:
    """The snapshot has all keys of one turn: the last reported one or the one after."""
    generator = random.Random(1)
    for trial in range(6):
        victim = start_program(_VICTIM, tmp_path / "swap", tmp_path / "snap")
        assert victim.stdout.readline() == "1\n", victim.stderr
        time.sleep(generator.random() * 0.05)
        victim.send_signal(signal.SIGKILL)
        turns = [1, *map(int, victim.stdout.read().split())]
        victim.wait()
        with zcomm.SwapFile(tmp_path / "swap") as swap:
            assert len(swap.restore(tmp_path / "snap")) == 8
            out = torch.zeros(50000, dtype=torch.int64)
            for key in range(8):
                swap.read(str(key), out).wait()
                found = int(out[0])
                assert found in (turns[-1], turns[-1] + 1) and bool((out == found).all()), trial
                turns[-1] = max(turns[-1], found)


class HeldWork:
    """An operation that ends once ``go`` is set."""

    def __init__(self, work: zcomm.Work) -> None:
        self._work, self.go = work, threading.Event()

    def done(self) -> bool:
        return self.go.is_set() and self._work.done()

    def wait(self, timeout: float | None = None) -> None:
        assert self.go.wait(20 if timeout is None else timeout), "the event loop stood still"
        self._work.wait()


def test_await(tmp_path: Path) -> None:
    """The event loop runs on while operations and a snapshot are pending; errors arrive."""

    async def job() -> None:
        with zcomm.SwapFile(tmp_path / "swap") as swap:
            data, out = torch.arange(1 << 20), torch.zeros(1 << 20, dtype=torch.int64)
            held = HeldWork(swap.write("a", data))

            async def let_go() -> None:
                for _ in range(100):
                    await asyncio.sleep(0)
                held.go.set()

            letting = asyncio.create_task(let_go())
            await finished(held)  # the event loop ends it
            await letting
            await asyncio.to_thread(swap.snapshot, tmp_path / "snap")
            await finished(swap.read("a", out))
            assert torch.equal(out, data)
            os.truncate(nameless(swap.stats()["path"]), 4096)
            with pytest.raises(OSError, match="unexpected end of file"):
                await finished(swap.read("a", out))
            with pytest.raises(TimeoutError, match=r"0\.01 s"):
                await finished(HeldWork(swap.write("a", data)), timeout=0.01)

    asyncio.run(job())


def test_a_cancelled_await_leaves_the_error_to_the_swap_file(tmp_path: Path) -> None:
    swap = zcomm.SwapFile(tmp_path / "swap")
    out = torch.zeros(1 << 16, dtype=torch.int64)
    swap.write("a", torch.arange(1 << 16)).wait()
    os.truncate(nameless(swap.stats()["path"]), 4096)

    async def job() -> None:
        held = HeldWork(swap.read("a", out))
        awaiting = asyncio.create_task(finished(held))
        await asyncio.sleep(0.01)
        awaiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await awaiting
        held.go.set()

    asyncio.run(job())  # at its end no thread of the loop is left
    with pytest.raises(OSError, match="unexpected end of file"):
        swap.wait()
    swap.close()


def test_a_gradual_copy_that_writes_nothing_ends_in_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(1000)
    swap = Swap([str(tmp_path / "swap")])
    swap.write("k", data.data_ptr(), data.nbytes).wait()
    copy = GradualCopy(swap, {"k": data.nbytes}, [Path(path) for path in swap.stats()["paths"]])
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *_: 0)
        copy.finish()
    with pytest.raises(OSError, match=r"no byte of key 'k' was written at 0") as caught:
        copy.load("k")
    assert caught.value.errno == errno.EIO
    copy.close()
    swap.close()


def test_a_copy_that_is_closed_while_a_write_begins(tmp_path: Path) -> None:
    class Racing(Swap):
        """Close the copy in the saving thread as soon as the writing thread has looked for a copy."""

        @property
        def copying(self) -> GradualCopy | None:
            found, self.__dict__["now"] = self.__dict__.get("now"), None
            if found is not None:
                found.close()
            return found

        @copying.setter
        def copying(self, copy: GradualCopy | None) -> None:
            self.__dict__["now"] = copy

    data, out = torch.arange(1000), torch.empty(1000, dtype=torch.int64)
    swap = Racing([str(tmp_path / "swap")])
    swap.write("k", data.data_ptr(), data.nbytes).wait()
    swap.copying = GradualCopy(swap, {"k": data.nbytes}, [Path(path) for path in swap.stats()["paths"]])
    data += 1
    swap.write("k", data.data_ptr(), data.nbytes).wait()
    swap.read("k", out.data_ptr(), out.nbytes).wait()
    swap.close()
    assert torch.equal(out, data)
