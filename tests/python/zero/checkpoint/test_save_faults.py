"""Saving from a drive that fails on one rank: an OSError on every rank, and the job continues."""

from __future__ import annotations

import errno
import gc
import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import zcomm
from interrupts import interrupted_at
from tiers import slow
from update_grid import Fault, FaultySwap, Training, small_spans
from zcomm.memory.snapshot import Copy
from zcomm.zero.cache.swap import GradualCopy
from zcomm.zero.checkpoint import SaveTask, read_manifest
from zcomm.zero.checkpoint.whole_model import save_model
from zcomm.zero.files import durable
from zcomm.zero.params import shards
from zcomm.zero.tensors import chunks


def fails_once(function: Callable[..., Any]) -> Callable[..., Any]:
    left = [OSError(errno.EIO, "read of a copy: once")]

    def call(*args: Any) -> Any:
        if left:
            raise left.pop()
        return function(*args)

    return call


def saving_where_rank_1_cannot_read(folder: str) -> None:
    comm, base = zcomm.init(), Path(folder)
    with small_spans() as patch:
        patch.setattr(shards, "WINDOWS", 2)  # fewer than shards: weights are read from the drive
        train = Training("stage 3, auto", base / "drive")
        train.run(2)
        opt = train.opt
        opt.save(base / "good")

        def fails(save: Callable[[], SaveTask]) -> None:
            if comm.rank == 1:
                FaultySwap.arm(Fault("read"))
            before = sorted(base.iterdir())
            comm.barrier()
            with pytest.raises(OSError, match="read of" if comm.rank == 1 else "rank 1: .*read of") as told:
                save().wait()
            assert told.value.errno == errno.EIO
            comm.barrier()
            after = sorted(base.iterdir())
            comm.barrier()
            assert after == before

        fails(lambda: opt.save(base / "bad"))
        fails(lambda: save_model(opt._live, base / "weights.safetensors", True))
        if comm.rank == 1:
            for copy in (Copy, GradualCopy):  # the file system decides which of them is used
                patch.setattr(copy, "load", fails_once(copy.load))
        with pytest.raises(OSError, match="once" if comm.rank == 1 else "rank 1: .*once"):
            opt.save(base / "bad", wait=False).wait()

        FaultySwap.arm(None)
        train.run(3)
        opt.save(base / "next")
        kept = opt.full_state_dict()
        train.run(4)
        opt.load(base / "next")
        now = opt.full_state_dict()
        assert all(torch.equal(now[name], value) for name, value in kept.items())
        opt.close()
    zcomm.shutdown()


def test_all_ranks_are_told(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    run_ranks(saving_where_rank_1_cannot_read, 2, str(tmp_path))


def test_patience_with_a_save() -> None:
    """A built-in TimeoutError tells that the save continues; an error of the save itself is raised unchanged."""
    future: Future[None] = Future()
    task = SaveTask(future)
    with pytest.raises(TimeoutError, match=r"not done after 0\.01 s; it goes on"):
        task.wait(0.01)
    assert not task.done()
    future.set_exception(TimeoutError("rank 1 is late"))
    with pytest.raises(TimeoutError, match="rank 1 is late"):
        task.wait(0.01)
    task.end()  # its error was already raised


# --- any error ------------------------------------------------------------------------------------------------------


class Odd(BaseException):
    """Neither an OSError nor an Exception."""


KINDS: list[type[BaseException]] = [TypeError, KeyboardInterrupt, MemoryError, Odd]


def open_files(below: Path, folders: bool = True) -> list[str]:
    """List files (and folders) of checkpoints ``below`` a folder that this process keeps open."""

    def found() -> list[str]:
        links = (Path("/proc/self/fd") / number for number in os.listdir("/proc/self/fd"))
        paths = (Path(os.readlink(link)) for link in links if os.path.lexists(link) and (folders or not link.is_dir()))
        return [str(path) for path in paths if below in path.parents and path.name != "store"]

    if found():
        gc.collect()
    return found()


def save_that_fails_at_each_write(folder: str, wait: bool) -> dict[str, int]:
    comm, base = zcomm.init(), Path(folder)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3))
    opt = zcomm.ZeroOptimizer(model, "adamw", stage=2, precision="bf16", offload="cpu")
    opt.save(base / "c", client_state="first")
    counts: dict[str, int] = {}
    for victim in range(comm.world_size):
        number = 0
        while True:
            number += 1
            calls, kind = [0], KINDS[number % len(KINDS)]

            def at_write(what: str, calls: list[int] = calls, victim: int = victim, number: int = number) -> None:
                calls[0] += 1
                if comm.rank == victim and calls[0] == number:
                    raise KINDS[number % len(KINDS)](f"at write {number}")

            durable.before_write = at_write
            try:
                opt.save(base / "c", client_state={"second": torch.ones(3)}, wait=wait).wait()
                ended = "well"
            except BaseException as error:
                ended = type(error).__name__
                if comm.rank == victim:
                    assert type(error) is kind and f"at write {number}" in str(error), repr(error)
                else:
                    assert type(error) is (ValueError if kind is TypeError else OSError), repr(error)
                    expected = errno.EIO if issubclass(kind, Exception) else errno.ECANCELED
                    assert kind is TypeError or cast(OSError, error).errno == expected, repr(error)
                    assert f"failed on rank {victim}: {kind.__name__}" in str(error)
            finally:
                durable.before_write = lambda what: None
            assert open_files(base) == [], f"after {ended} at write {number} of rank {victim}"
            comm.barrier()
            left = sorted(path.name for path in base.iterdir() if path.name not in ("c", "store"))
            if ended == "well":
                break
            state = read_manifest(base / "c").client_state
            assert state == "first" or number > 5, "the last checkpoint stays until the new one is whole"
            assert [name for name in left if ".saving" not in name] == [], left
            comm.barrier()
            counts[f"{victim}"] = number
            opt.save(base / "c", client_state="first")
            assert sorted(path.name for path in base.iterdir() if path.name != "store") == ["c"]
            comm.barrier()
        assert opt.load(base / "c")["second"].tolist() == [1, 1, 1]
        opt.save(base / "c", client_state="first")
    opt.close()
    zcomm.shutdown()
    return counts


@pytest.mark.parametrize("wait", [slow(True), False])
def test_a_rank_that_fails_in_any_way_at_any_write(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, wait: bool
) -> None:
    first, second = run_ranks(save_that_fails_at_each_write, 2, str(tmp_path), wait)
    assert first == second and first["0"] >= 12 and first["1"] >= 6


@pytest.mark.slow
def test_an_interrupt_at_any_moment_keeps_no_claim_and_no_file_open(tmp_path: Path) -> None:
    """Interrupt one rank at every third line of code that has files open: the next save of the folder succeeds."""
    model, place = nn.Linear(4, 2), tmp_path / "c"
    files = tuple(f"files/{name}.py" for name in ("staging", "claim", "folder", "tensor_file", "durable"))
    files += ("checkpoint/save.py", "checkpoint/shard_files.py", "zero/agree.py")
    moment, ended = 0, False
    while not ended:
        zcomm.init()
        opt = zcomm.ZeroOptimizer(model, "adamw", stage=1)
        try:
            while not ended:
                moment += 3
                ended = not interrupted_at(moment, lambda opt=opt: opt.save(place).wait(), files)  # type: ignore[misc]
                assert open_files(tmp_path, folders=False) == [], f"after an interrupt at line {moment}"
                opt.save(place)
                assert [path.name for path in tmp_path.iterdir()] == ["c"], f"after an interrupt at line {moment}"
        except RuntimeError:  # the interrupt has ended the communicator, so the next save raises
            pass
        finally:
            opt.close()
            zcomm.shutdown()
    assert moment > 500
    assert torch.is_grad_enabled()


class Schedule:
    """A user's schedule."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.state = fails, {"now": 1}

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise KeyError("state")
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.fails:
            raise AttributeError("no such thing")
        self.state = dict(state)


def what_one_rank_cannot_save_or_load(folder: str) -> list[str]:
    comm, base, said = zcomm.init(), Path(folder), []
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    opt = zcomm.ZeroOptimizer(model, "adamw", stage=2, lr=0.1)

    def attempt(action: Callable[[], Any]) -> None:
        kept = opt.full_state_dict()["weight"], opt.param_groups[0]["lr"], opt.step_count, torch.get_rng_state()
        try:
            action()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
        now = opt.full_state_dict()["weight"], opt.param_groups[0]["lr"], opt.step_count, torch.get_rng_state()
        assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(kept, now, strict=True))
        comm.barrier()
        assert not [path for path in base.iterdir() if path.name not in ("c", "store")]
        comm.barrier()

    mine = comm.rank == 1
    for wait in (True, False):
        attempt(lambda wait=wait: opt.save(base / "d", client_state=object() if mine else 1, wait=wait))
        attempt(lambda wait=wait: opt.save(base / "d", scheduler=Schedule(mine), wait=wait))
    schedule = Schedule(False)
    schedule.state = {"now": 7}
    opt.param_groups[0]["lr"] = 0.5
    opt.save(base / "c", scheduler=schedule)
    opt.param_groups[0]["lr"] = 0.25
    with torch.no_grad():
        model(torch.ones(1, 40))
    other = Schedule(False)
    other.state = {"now": 3}

    class Half(Schedule):
        """Fails after it has changed."""

        def load_state_dict(self, state: dict[str, Any]) -> None:
            before, self.state = self.state, dict(state)
            if mine and before != state and not said[-1].startswith("undone"):
                said.append("undone")
                raise AttributeError("no such thing")

    half = Half(False)
    half.state = {"now": 3}
    attempt(lambda: opt.load(base / "c", scheduler=half))
    assert half.state == {"now": 3}, "no rank has the schedule of the checkpoint that could not be loaded"
    assert opt.load(base / "c", scheduler=other) is None
    assert other.state == {"now": 7} and opt.param_groups[0]["lr"] == 0.5
    opt.close()
    zcomm.shutdown()
    return [each for each in said if each != "undone"]


def test_what_one_rank_alone_cannot_save_or_load(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    first, second = run_ranks(what_one_rank_cannot_save_or_load, 2, str(tmp_path))
    place = tmp_path / "d"
    for state, scheduler in ((0, 1), (2, 3)):
        assert first[state].startswith(f"ValueError: saving {place} failed on rank 1: client_state is object")
        assert second[state].startswith("ValueError: client_state is object")
        assert first[scheduler] == f"OSError: [Errno 5] saving {place} failed on rank 1: KeyError: 'state'"
        assert second[scheduler] == "KeyError: 'state'"
    assert first[4] == f"OSError: [Errno 5] loading {tmp_path / 'c'} failed on rank 1: AttributeError: no such thing"
    assert second[4] == "AttributeError: no such thing"


def exports_that_fail(folder: str) -> None:
    comm, base = zcomm.init(), Path(folder)
    opt = zcomm.ZeroOptimizer(nn.Linear(40, 40), "adamw", stage=3)
    for wait in (True, False):
        for number in range(1, 5):
            calls = [0]

            def at_write(what: str, calls: list[int] = calls, number: int = number) -> None:
                calls[0] += 1
                if calls[0] == number:
                    raise MemoryError(f"at write {number}")

            if comm.rank == 0:
                durable.before_write = at_write
            with pytest.raises(MemoryError if comm.rank == 0 else OSError, match=f"at write {number}"):
                save_model(opt._live, base / "w.safetensors", wait).wait()
            durable.before_write = lambda what: None
            comm.barrier()
            assert [path.name for path in base.iterdir() if path.name != "store"] == []
            comm.barrier()
    opt.close()
    zcomm.shutdown()


def test_an_export_that_fails_on_rank_0(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    run_ranks(exports_that_fail, 2, str(tmp_path))


def interrupted_between_collectives(folder: str, number: int, wait: bool) -> str:
    """Interrupt rank 1 before the gather of a parameter, so that the others wait for it in vain."""
    comm, base = zcomm.init(), Path(folder)
    torch.manual_seed(0)
    opt = zcomm.ZeroOptimizer(nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 3)), "adamw", stage=3)
    opt.save(base / "c", client_state="first")
    original, calls = chunks.stream, [0]

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if comm.rank == 1 and calls[0] == number:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunks, "stream", fails)
        with pytest.raises(BaseException) as told:
            opt.save(base / "c", wait=wait).wait()
    left = sorted(path.name for path in base.iterdir() if path.name != "store")
    return f"{told.type.__name__}: {told.value} {left if comm.rank == 0 else ''}"


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_rank_that_is_interrupted_between_collectives(
    run_ranks: Callable[..., list[Any]], tmp_path: Path, number: int, wait: bool
) -> None:
    first, second = run_ranks(interrupted_between_collectives, 2, str(tmp_path), number, wait)
    assert second.startswith("KeyboardInterrupt")
    assert first.startswith(("CollectiveMismatch", "OSError")) and first.endswith("['c']"), first
    assert read_manifest(tmp_path / "c").client_state == "first"


def rank_0_leaves_in_a_save(folder: str) -> str:
    """Rank 0 leaves, and removes the folder that rank 1 is about to write into."""
    comm, base = zcomm.init(), Path(folder)
    opt = zcomm.ZeroOptimizer(nn.Linear(4, 3), "adamw")
    original = durable.write_file

    def leaves(*args: Any) -> Any:
        if comm.rank == 0:
            zcomm.shutdown()
            raise SystemExit
        while any(base.glob(".c.saving-*")):
            time.sleep(0.01)
        return original(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(durable, "write_file", leaves)
        with pytest.raises(BaseException) as told:
            opt.save(base / "c")
    return f"{told.type.__name__} from {type(told.value.__cause__).__name__}"


def test_a_rank_that_leaves_in_a_save_is_what_the_others_are_told(
    run_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, second = run_ranks(rank_0_leaves_in_a_save, 2, str(tmp_path))
    assert first.startswith("SystemExit")
    assert second == "PeerLost from FileNotFoundError"
