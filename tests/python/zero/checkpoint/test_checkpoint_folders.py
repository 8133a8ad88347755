"""Paths of checkpoints: links, mount points, odd names, two jobs at once; other files are not touched."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zcomm
from file_ops import count_and_kill
from thread_world import thread_world
from zcomm.comm import Communicator
from zcomm.zero.checkpoint import read_manifest
from zcomm.zero.checkpoint.whole_model import save_model
from zcomm.zero.files import durable, staging
from zcomm.zero.files.claim import Claim
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.staging import NewFile, NewFolder

Run = Callable[..., list[Any]]


@pytest.fixture
def opt() -> Any:
    made = zcomm.ZeroOptimizer(nn.Linear(5, 3), "sgd", stage=1, lr=0.1)
    yield made
    made.close()
    zcomm.shutdown()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_linked_folder_stays_a_link(opt: Any, tmp_path: Path) -> None:
    """The files of a save are on the drive that the link leads to."""
    (tmp_path / "big").mkdir()
    for target in ("there", "not yet there"):
        link = tmp_path / f"to {target}"
        link.symlink_to(tmp_path / "big" / target)
        for number in range(3):
            opt.save(link, client_state=number)
            assert link.is_symlink() and read_manifest(tmp_path / "big" / target).client_state == number
            assert opt.load(link) == number
    assert names(tmp_path) == ["big", "to not yet there", "to there"]
    assert names(tmp_path / "big") == ["not yet there", "there"]
    (tmp_path / "to.safetensors").symlink_to(tmp_path / "big" / "w.safetensors")
    save_model(opt._live, tmp_path / "to.safetensors", True)
    assert (tmp_path / "to.safetensors").is_symlink()
    assert "weight" in load_file(tmp_path / "big" / "w.safetensors")


def test_a_linked_folder_is_found_after_a_kill_between_two_renames(opt: Any, tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "c").symlink_to(tmp_path / "big" / "c")
    opt.save(tmp_path / "c", client_state=1)
    (tmp_path / "big" / "c").rename(tmp_path / "big" / ".c.previous")
    assert opt.load(tmp_path / "c") == 1
    opt.save(tmp_path / "c", client_state=2)
    assert opt.load(tmp_path / "c") == 2 and names(tmp_path / "big") == ["c"]


def test_names_are_no_patterns(opt: Any, tmp_path: Path) -> None:
    """A pending save of another folder is not mistaken for this folder's leftovers."""
    live = [".ck1.saving-77", ".ck[1].saving-b.saving-77", ".ck[1].saving-77x", ".ck[1].saving-"]
    for name in live:
        (tmp_path / name).mkdir()
    (tmp_path / ".ck[1].saving-77").mkdir()
    opt.save(tmp_path / "ck[1]")
    assert names(tmp_path) == sorted([*live, "ck[1]"]), "its own is gone"


@pytest.mark.parametrize("name", ["with space", "ünïcode", "a*b?", "-rf", "x" * 200, "new\nline", "%s{}"])
def test_any_name_is_a_name(opt: Any, tmp_path: Path, name: str) -> None:
    for number in range(2):
        opt.save(tmp_path / name, client_state=number)
        assert opt.load(tmp_path / name) == number
    assert names(tmp_path) == [name]


def test_a_mount_point_is_refused_first(opt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "volume")
    with pytest.raises(
        OSError, match="it is a mount point, which cannot be replaced; save into a folder in it"
    ) as told:
        opt.save(tmp_path / "volume")
    assert told.value.errno == errno.EBUSY
    assert names(tmp_path) == ["volume"] and names(tmp_path / "volume") == []
    opt.save(tmp_path / "volume" / "c")
    assert staging._is_mount(Path("/proc")) and not staging._is_mount(tmp_path)


def test_a_bind_mount_is_known_by_the_kernels_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a b"
    place.mkdir()
    table = tmp_path / "mountinfo"
    table.write_text(f"36 35 98:0 / {str(place).replace(' ', chr(92) + '040')} rw - ext4 /dev/sda rw\n")
    real = open
    monkeypatch.setattr(
        "builtins.open", lambda path, *rest: real(table if path == "/proc/self/mountinfo" else path, *rest)
    )
    assert staging._is_mount(place) and not staging._is_mount(tmp_path)


def test_what_is_no_checkpoint_stays(opt: Any, tmp_path: Path) -> None:
    """A folder with another checkpoint in it is also kept, such as a directory of tags that is itself a checkpoint."""
    opt.save(tmp_path / "runs")
    opt.save(tmp_path / "runs" / "step1")
    with pytest.raises(FileExistsError, match="it holds the folder step1, which would be lost with it"):
        opt.save(tmp_path / "runs")
    assert "step1" in names(tmp_path / "runs")
    (tmp_path / "weights.safetensors").mkdir()
    with pytest.raises(IsADirectoryError):
        save_model(opt._live, tmp_path / "weights.safetensors", True)
    assert names(tmp_path) == ["runs", "weights.safetensors"]


def test_new_folders_are_on_the_drive_with_their_parents(tmp_path: Path) -> None:
    def save() -> list[tuple[str, str]]:
        points = count_and_kill(0)
        made = zcomm.ZeroOptimizer(nn.Linear(5, 3), "sgd", stage=1, lr=0.1)
        made.save(tmp_path / "runs" / "deep" / "c")
        made.close()
        zcomm.shutdown()
        return list(points)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir"):
            patch.setattr(os, name, getattr(os, name))
        patch.setattr(durable, "_exchange", durable._exchange)
        points = save()
    for child, parent in (("runs", tmp_path.name), ("deep", "runs")):
        made = points.index(("mkdir", child))
        assert points[made + 1] == ("fsync", parent), "the name of a new folder is on the drive"
    shown = next(number for number, (kind, name) in enumerate(points) if kind == "rename" and ".c.saving" in name)
    assert ("fsync", "deep") in points[shown:]


# --- concurrent saves ------------------------------------------------------------------------------------------------


def test_one_save_at_a_time(opt: Any, tmp_path: Path) -> None:
    """Two jobs, or two optimizers in one job, do not save to one folder at the same time."""
    with NewFolder(tmp_path / "c") as mine:
        (mine.path / "half").write_text("written")
        with pytest.raises(OSError, match="another save is writing there; give each job a folder of its own") as told:
            opt.save(tmp_path / "c")
        assert told.value.errno == errno.EBUSY and told.value.filename == str(tmp_path / "c")
        assert (mine.path / "half").read_text() == "written"
        opt.save(tmp_path / "d")
    opt.save(tmp_path / "c")
    with NewFile(tmp_path / "w.safetensors") as file:
        file.path.write_text("half")
        with pytest.raises(OSError, match="another save is writing there"):
            save_model(opt._live, tmp_path / "w.safetensors", True)
        assert file.path.read_text() == "half"
    assert names(tmp_path) == ["c", "d"]


def test_a_folder_that_is_read_stays_until_it_was(opt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for exchange in (True, False):
        if not exchange:
            monkeypatch.setattr(durable, "_exchange", lambda one, other: False)
        opt.save(tmp_path / "c", client_state=1)
        with Folder(tmp_path / "c") as old:
            opt.save(tmp_path / "c", client_state=2)
            opt.save(tmp_path / "c", client_state=3)
            assert [name for name in manifest_files(old) if old.nbytes(name) <= 0] == []
        opt.save(tmp_path / "c", client_state=4)
        assert opt.load(tmp_path / "c") == 4 and names(tmp_path) == ["c"]


def manifest_files(folder: Folder) -> list[str]:
    return list(json.loads(folder.read("manifest.json").partition(b"\n")[2])["files"])


def test_a_dead_jobs_lock_is_free(opt: Any, tmp_path: Path) -> None:
    (tmp_path / ".c.lock").touch()
    (tmp_path / ".c.saving-77").mkdir()
    opt.save(tmp_path / "c")
    assert names(tmp_path) == ["c"]


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    """A data loader's worker was forked during a background save."""
    claim = Claim(tmp_path / "c")
    assert claim._file is not None
    inherited = os.dup(claim._file.fileno())
    claim.release()
    Claim(tmp_path / "c").release()
    os.close(inherited)


def test_claims_take_turns(tmp_path: Path) -> None:
    """Only one claim holds the path, whichever claim removes the lock file."""
    inside, most = 0, []

    def work() -> None:
        nonlocal inside
        for _ in range(30):
            claim = Claim(tmp_path / "latest", wait=True)
            inside += 1
            most.append(inside)
            os.sched_yield()
            inside -= 1
            claim.release()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1} and names(tmp_path) == []


def test_no_locks_there(opt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("zcomm.zero.files.claim._logged_errnos", set())
    opt.save(tmp_path / "c")
    opt.save(tmp_path / "c")
    assert len([record for record in caplog.records if "has no locks" in record.getMessage()]) == 1


def jobs_at_once(folder: str, rounds: int) -> list[str]:
    """Run each rank as its own job, of two ranks that are threads."""
    place = Path(folder)
    me = os.getpid()
    (place / f"world-{me}").mkdir()

    def body(joined: Any) -> list[str]:
        comm = Communicator(joined)
        torch.manual_seed(me)
        made = zcomm.ZeroOptimizer(nn.Linear(50, 30), "adamw", stage=1, comm=comm)
        said = []
        for number in range(rounds):
            try:
                made.save(place / "c", client_state=[me, number])
                said.append("saved")
            except OSError as error:
                assert error.errno == errno.EBUSY, error
                said.append("busy")
            try:
                assert len(made.load(place / "c")) == 2
            except OSError as error:  # a save of the other job replaced it between the two ranks' opens
                assert error.errno == errno.ESTALE, error
        made.close()
        comm.close()
        return said

    first, second = thread_world(2, place / f"world-{me}", body)
    assert first == second, "all ranks of a job are told the same"
    return first


def test_two_jobs_that_save_to_one_folder(run_ranks: Run, tmp_path: Path) -> None:
    """Neither job deletes the other's files: a save succeeds, or is refused before it writes."""
    made = zcomm.ZeroOptimizer(nn.Linear(50, 30), "adamw", stage=1)
    made.save(tmp_path / "c", client_state=[0, 0])
    made.close()
    zcomm.shutdown()
    said = run_ranks(jobs_at_once, 2, str(tmp_path), 6)
    assert {word for each in said for word in each} <= {"saved", "busy"} and any("saved" in each for each in said), said
    made = zcomm.ZeroOptimizer(nn.Linear(50, 30), "adamw", stage=1)
    made.load(tmp_path / "c")
    made.save(tmp_path / "c")  # removes a folder that was open when it was replaced
    made.close()
    zcomm.shutdown()
    assert [name for name in names(tmp_path) if name.startswith(".")] == []


def saves_nowhere(folder: str) -> list[tuple[str, int | None]]:
    zcomm.init()
    opt = zcomm.ZeroOptimizer(nn.Linear(5, 3), "sgd", stage=1, lr=0.1)
    found = []
    for place in (f"{folder}/file/c", "/sys/zcomm/c", "/proc/zcomm", f"{folder}/{'x' * 250}", f"{folder}/nul\0"):
        for wait in (True, False):
            for whole in (True, False):
                try:
                    task = opt.save(place, wait=wait) if whole else save_model(opt._live, Path(place), wait)
                    task.wait()
                    found.append((place, 0))
                except (OSError, ValueError) as error:
                    assert zcomm.rank() == 0 or "failed on rank 0" in str(error) or isinstance(error, ValueError), error
                    found.append((place, getattr(error, "errno", None)))
    opt.save(f"{folder}/c")
    opt.close()
    zcomm.shutdown()
    return found


def test_a_place_that_cannot_be_written(run_ranks: Run, tmp_path: Path) -> None:
    """Each rank raises the error, and can continue."""
    (tmp_path / "file").touch()
    first, second = run_ranks(saves_nowhere, 2, str(tmp_path))
    assert first == second and 0 not in {code for _, code in first}, first
    assert {code for place, code in first if "\0" not in place} >= {errno.ENOTDIR, errno.ENAMETOOLONG}
    assert [name for name in names(tmp_path) if name not in ("c", "file", "store")] == []


def test_files_of_others_in_a_checkpoint_stay(opt: Any, tmp_path: Path) -> None:
    opt.save(tmp_path / "c")
    opt.save(tmp_path / "c")
    (tmp_path / "c" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"it holds notes\.txt, which no save has written"):
        opt.save(tmp_path / "c")
    assert (tmp_path / "c" / "notes.txt").read_text() == "mine"
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "manifest.json").write_text("about zcomm checkpoints: zcomm checkpoint")
    with pytest.raises(FileExistsError, match="its manifest cannot be read"):
        opt.save(tmp_path / "d")
