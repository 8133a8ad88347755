"""A drive's block size and depth: measured, kept by drive with mode 0600, used by SwapFile, never an obstacle."""

from __future__ import annotations

import json
import os
import pwd
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import zcomm
from zcomm.machine import swap_tuning, tuning
from zcomm.machine.swap_tuning import SwapTuning


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty cache, and a separate drive for the test's directory."""
    file = tmp_path / "cache" / "swap.json"
    monkeypatch.setenv("ZCOMM_SWAP_TUNING", str(file))
    monkeypatch.setattr(swap_tuning, "drive", lambda directory: "drive of " + str(directory))
    return file


def test_kept_by_drive_and_taken_where_nothing_is_given(tmp_path: Path, cache: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    swap_tuning.save(one, SwapTuning(1 << 16, 7), {"write_gbps": 1.0})
    swap_tuning.save(two, SwapTuning(1 << 17, 9), {})
    assert cache.stat().st_mode & 0o777 == 0o600 and len(list(cache.parent.iterdir())) == 1
    for folder, block, depth in ((one, 1 << 16, 7), (two, 1 << 17, 9)):
        with zcomm.SwapFile(folder) as swap:
            stats = swap.stats()
            assert (stats["block_nbytes"], stats["depth"]) == (block, depth)
            assert stats["tuning"].startswith("measured 2")
            data, out = torch.arange(100001), torch.zeros(100001, dtype=torch.int64)
            swap.write("a", data)
            swap.read("a", out).wait()
            assert torch.equal(data, out)
            assert swap.stats()["write_count"] == -(-(data.nbytes // 4096 * 4096) // block) + 1
    with zcomm.SwapFile(one, depth=3) as swap:  # only one argument is given, so the other is built in
        assert (swap.stats()["block_nbytes"], swap.stats()["depth"]) == (1 << 20, 3)
    with zcomm.SwapFile(tmp_path / "three") as swap:
        assert swap.stats()["tuning"] == "built in"


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"drives": []}', '{"drives": {"KEY": {}}}', '{"drives": {"KEY": 3}}']
    + [
        json.dumps({"drives": {"KEY": {"block_nbytes": block, "depth": depth, "time": "x"}}})
        for block, depth in ((1000, 4), (0, 4), (4096, 0), (4096, 1 << 20), ("4096", 4), (4096, None), (1 << 40, 4))
    ],
)
def test_a_damaged_cache_is_no_obstacle(tmp_path: Path, cache: Path, text: str) -> None:
    cache.parent.mkdir()
    cache.write_text(text.replace("KEY", f"drive of {tmp_path}"))
    found = swap_tuning.load(tmp_path)
    assert (found.block_nbytes, found.depth) == (1 << 20, 32) and found.origin.startswith("built in (")
    swap_tuning.save(tmp_path, SwapTuning(4096, 1), {})
    assert swap_tuning.load(tmp_path).block_nbytes == 4096


def test_calibration(tmp_path: Path, cache: Path) -> None:
    """One candidate is kept, with its speeds; the directory is unchanged."""
    from zcomm.cli.calibrate_swap import _CANDIDATES, calibrate

    before = set(tmp_path.iterdir())
    found = calibrate(tmp_path, nbytes=1 << 20)
    assert (found.block_nbytes, found.depth) in [(each.block_nbytes, each.depth) for each in _CANDIDATES]
    assert set(tmp_path.iterdir()) - before == {cache.parent}
    (row,) = json.loads(cache.read_text())["drives"].values()
    assert row["write_gbps"] > 0 and row["read_gbps"] > 0
    kept = swap_tuning.load(tmp_path)
    assert (kept.block_nbytes, kept.depth) == (found.block_nbytes, found.depth)
    with pytest.raises(OSError):
        calibrate(tmp_path / "nowhere")


def test_the_drive_has_a_name_that_does_not_depend_on_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Use a fake /sys with the test directory's file system on a disk's first partition."""
    disk, devices = tmp_path / "sys" / "sda", tmp_path / "sys" / "block"
    for folder in (disk / "sda1", disk / "queue", disk / "device", devices, tmp_path / "a"):
        folder.mkdir(parents=True)
    number = tmp_path.stat().st_dev
    (devices / f"{os.major(number)}:{os.minor(number)}").symlink_to(disk / "sda1")
    for file, text in (("size", "2048\n"), ("device/model", "Fast  Disk \n"), ("device/serial", "A1\n")):
        (disk / file).write_text(text)
    monkeypatch.setattr(swap_tuning, "_DEVICES", devices)
    name = "2048 sectors, model Fast Disk, id A1"
    assert [swap_tuning.drive(tmp_path / each) for each in (".", "a", "not there")] == [name] * 3
    (disk / "device" / "serial").write_text("B2\n")
    assert swap_tuning.drive(tmp_path) == name.replace("A1", "B2"), "another disk of that model"
    assert swap_tuning.drive("/proc") is None


def test_without_a_home_there_are_built_in_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_user(number: int) -> None:
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "ZCOMM_SWAP_TUNING", "ZCOMM_TUNING"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_user)
    with pytest.raises(RuntimeError):
        swap_tuning.path()
    found = swap_tuning.load(tmp_path)
    assert (found.block_nbytes, found.depth) == (1 << 20, 32) and found.origin.startswith("built in (no cache: ")
    with zcomm.SwapFile(tmp_path) as swap:
        assert swap.stats()["tuning"] == found.origin
    table = tuning.load()
    assert table.rows == {} and table.origin.startswith("built in (no cache: ")


def test_endurance(tmp_path: Path) -> None:
    with zcomm.SwapFile(tmp_path, endurance_tbw=600) as swap:
        assert swap.stats()["endurance_days"] is None
        swap.write("a", torch.zeros(1 << 20)).wait()
        swap._since -= 1e6  # 4 MiB in 1e6 seconds
        assert swap.stats()["endurance_days"] == pytest.approx(600e12 / ((4 << 20) / 1e6) / 86400, rel=1e-3)
    with zcomm.SwapFile(tmp_path) as swap:
        swap.write("a", torch.zeros(10)).wait()
        assert swap.stats()["endurance_days"] is None
    with pytest.raises(ValueError, match="endurance_tbw 0 is not positive"):
        zcomm.SwapFile(tmp_path, endurance_tbw=0)


def test_threads_that_keep_a_table_at_once_leave_a_whole_one(tmp_path: Path) -> None:
    start, file = threading.Barrier(4), tmp_path / "table.json"

    def keep(number: int) -> None:
        for turn in range(25):
            start.wait()
            tuning.keep(file, {"number": number, "turn": turn, "rows": list(range(2000))})

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(keep, number) for number in range(4)]:
            done.result()
    assert json.loads(file.read_text())["turn"] == 24
    assert [each.name for each in tmp_path.iterdir()] == ["table.json"]
