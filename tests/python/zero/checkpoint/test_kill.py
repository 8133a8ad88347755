"""kill -9 at every file system operation of a save: the last checkpoint, or the new one, is complete.

One process per point of ``file_ops``; a world of two, in which one rank is killed and the other one must raise. Then
``zcomm ckpt verify``, a load and the next save in another process. Also the order that a power cut requires: files are
synced before the rename that makes them visible.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import pickle
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from file_ops import Point, count_and_kill
from tiers import long

pytestmark = pytest.mark.slow

Run = Callable[..., list[Any]]
BAD = 97  # exit code of a child that raised


def in_child(work: Callable[[], Any], env: dict[str, str]) -> tuple[int, Callable[[], Any]]:
    """Fork: (process id, function that waits for its result). The result is None if the child was killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = BAD
        try:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            os.close(reader)
            os.environ.update(env)
            torch.set_num_threads(1)
            value = work()
            with open(writer, "wb") as stream:
                pickle.dump(value, stream)
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)

    def result() -> Any:
        with open(reader, "rb") as stream:
            data = stream.read()
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, -signal.SIGKILL), f"a child ended with {code}; see above"
        return pickle.loads(data) if code == 0 else None

    return child, result


def import_once() -> None:
    """Import modules that each child would import for a second: torch.optim imports some of them on first use."""
    for name in ("torch._dynamo", "zcomm.cli.main", "zcomm.zero.optimizer"):
        importlib.import_module(name)


def world(work: Callable[[int], Any], folder: Path, world_size: int) -> list[Any]:
    """Run ``work(rank)`` in that many processes: their results, None for a killed one."""
    store = folder / "store"
    store.unlink(missing_ok=True)
    common = {
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "ZCOMM_INIT_METHOD": f"file://{store}",
        "ZCOMM_JOB_ID": f"test {store}",
    }
    children = [
        in_child(lambda rank=rank: work(rank), {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(world_size)
    ]
    return [result() for _, result in children]


def net(value: float) -> nn.Module:
    """Make weights and state that identify their save."""
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(value)
    return model


def make(folder: Path, value: float, stage: int, offload: str | None, precision: str) -> tuple[nn.Module, Any]:
    zcomm.init(timeout=30)
    model = net(value)
    opt = zcomm.ZeroOptimizer(
        model, "sgd", lr=0.25, momentum=0.9, stage=stage, offload=offload, nvme_path=folder, precision=precision
    )
    model(torch.ones(1, 7, dtype=opt.precision.dtype)).sum().backward()
    opt.step()
    opt.zero_grad()
    return model, opt


def content(model: nn.Module, opt: Any) -> bytes:
    """Return the bits of weights and state."""
    whole = {name: zcomm.zero.full_param(param).clone() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        whole[f"momentum/{name}"] = zcomm.zero.full_optim_state(param, "momentum_buffer").clone()
    return pickle.dumps({name: tensor.tolist() for name, tensor in sorted(whole.items())})


Place = tuple[int, str | None, str]  # stage, offload, precision


def save_first(folder: Path, place: Place, value: float) -> bytes:
    model, opt = make(folder, value, *place)
    opt.save(folder / "c", client_state=value)
    kept = content(model, opt)
    opt.close()
    zcomm.shutdown()
    return kept


def save_and_die(folder: Path, place: Place, kill_at: int, exchange: bool, background: bool) -> list[Point] | str:
    """Return the operations of the process, or the error caused by the other rank's death."""
    _, opt = make(folder, 2.0, *place)
    points = count_and_kill(kill_at, exchange)
    try:
        opt.save(folder / "c", client_state=2.0, wait=not background).wait()
    except ConnectionError as error:
        assert type(error) is zcomm.PeerLost
        return "PeerLost"
    found = list(points)
    opt.close()
    zcomm.shutdown()
    return found


def verify(folder: Path) -> int:
    from zcomm.cli.main import main

    with contextlib.redirect_stdout(io.StringIO()):
        return main(["ckpt", "verify", str(folder)])


def look(folders: list[Path], swap: Path, wanted: dict[str, bytes]) -> list[str]:
    """Name the save in each folder, after verifying and loading it; check that another save works and cleans up."""
    model, opt = make(swap, 3.0, 1, None, "fp32")
    found = []
    for folder in folders:
        assert verify(folder / "c") == 0, folder
        state = opt.load(folder / "c")
        (which,) = [name for name, kept in wanted.items() if kept == content(model, opt)]
        assert state == {"old": 1.0, "new": 2.0}[which], "weights, state and client state are of one save"
        found.append(which)
        opt.save(folder / "c", client_state=4.0)
        left = [path.name for path in folder.iterdir() if path.name not in ("c", "store")]
        left = [name for name in left if "zcomm-swap" not in name]
        assert left == [], f"{folder}: the dead save left {left}"
        assert opt.load(folder / "c") == 4.0
    opt.close()
    zcomm.shutdown()
    return found


def kill_everywhere(
    base: str, place: Place, world_size: int, victim: int, exchange: bool, background: bool, step: int
) -> tuple[list[Point], list[str], int]:
    """Run in a rank's process without a job: (points, the save found after each kill, noticed deaths)."""
    import_once()
    root = Path(base)
    (root / "first").mkdir()
    (old,) = set(world(lambda rank: save_first(root / "first", place, 1.0), root / "first", world_size))
    (root / "last").mkdir()
    (new,) = set(world(lambda rank: save_first(root / "last", place, 2.0), root / "last", world_size))

    def one(kill_at: int) -> tuple[Path, list[Any]]:
        folder = root / f"at-{kill_at}"
        folder.mkdir()
        shutil.copytree(root / "first" / "c", folder / "c")
        os.chmod(folder / "c", 0o700)
        return folder, world(
            lambda rank: save_and_die(folder, place, kill_at if rank == victim else 0, exchange, background),
            folder,
            world_size,
        )

    _, results = one(0)
    points: list[Point] = results[victim]
    folders, noticed = [root / "at-0"], 0
    for kill_at in range(1, len(points) + 1, step):
        folder, results = one(kill_at)
        assert results[victim] is None, f"{points[kill_at - 1]}: it was not killed"
        noticed += sum(result == "PeerLost" for result in results)
        folders.append(folder)
    (swap := root / "look").mkdir()
    (found,) = world(lambda rank: look(folders, swap, {"old": old, "new": new}), swap, 1)
    return points, found, noticed


@pytest.mark.leaves_swap  # of killed processes; the next start in the same directory removes them
@pytest.mark.timeout_s(300)
@pytest.mark.parametrize(
    ("place", "world_size", "victim", "exchange", "background"),
    [
        long((1, None, "fp32"), 1, 0, True, False),
        long((2, "cpu", "bf16"), 1, 0, False, False),  # a file system that cannot exchange names
        ((3, "nvme", "bf16"), 2, 0, True, True),
        long((3, "nvme", "bf16"), 2, 1, True, False),
    ],
)
def test_kill_9_at_every_operation_of_a_save(
    run_ranks: Run, tmp_path: Path, place: Place, world_size: int, victim: int, exchange: bool, background: bool
) -> None:
    ((points, found, noticed),) = run_ranks(
        kill_everywhere, 1, str(tmp_path), place, world_size, victim, exchange, background, 1, timeout_s=280
    )
    assert found[0] == "new", "the save that was not killed counts"
    by_kind = {kind for kind, _ in points}
    assert {"open", "write", "write more", "fsync"} <= by_kind
    shown = [number for number, (kind, name) in enumerate(points) if kind in ("exchange", "rename") and ".c" in name]
    if victim == 0:
        # The rename of the new folder divides the points: before it the old save is found, afterwards the new one.
        (last,) = shown
        assert found[1 : last + 2] == ["old"] * (last + 1)
        assert found[last + 2 :] == ["new"] * (len(points) - last - 1) and len(points) > last + 4
        in_order(points, last)
    else:
        assert shown == [] and set(found[1:]) == {"old"}, "without one rank's files there is no new checkpoint"
    assert len(points) >= (30 if victim == 0 else 12)
    if world_size > 1:
        assert noticed > len(points) // 2, "the others do not wait for the dead"


def in_order(points: list[Point], shown: int) -> None:
    """Check that files and names in the new folder are synced before the rename, and the rename itself afterwards."""
    before, after = points[:shown], points[shown + 1 :]
    kept = (".json", ".safetensors")  # only the save itself needs copies of a swap file
    written = {name for kind, name in before if kind == "write" and name.endswith(kept)}
    assert {"manifest.json"} < written
    for name in written:
        last_write = max(n for n, (kind, of) in enumerate(before) if of == name and kind == "write more")
        synced = [n for n, point in enumerate(before) if point == ("fsync", name)]
        assert synced and synced[-1] > last_write, f"{name} is not synced before it is shown"
    folder = next(name for kind, name in points if kind == "mkdir" and ".saving-" in name)
    last = max(n for n, (kind, name) in enumerate(before) if name in written)
    assert ("fsync", folder) in before[last:], "the names in the folder are not synced before it is shown"
    assert any(kind == "fsync" for kind, name in after), "the rename is not synced"
    first_removal = next((n for n, (kind, _) in enumerate(after) if kind in ("unlink", "rmdir")), len(after))
    assert any(kind == "fsync" for kind, _ in after[:first_removal]), "the old one goes before the new one is safe"


# --- the engine's tags ------------------------------------------------------------------------------------------------


def engine(value: float) -> Any:
    config = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"lr": 0.5}}}
    made = zcomm.initialize(model=net(value), config=config)[0]
    for _ in range(int(value)):
        made.backward(made(torch.ones(1, 7)).sum())
        made.step()
    return made


def save_tag(folder: Path, value: float, kill_at: int = 0, counts: bool = False) -> list[Point]:
    made = engine(value)
    points = count_and_kill(kill_at) if counts else []
    made.save_checkpoint(folder, client_state={"value": value})
    found = list(points)
    made.destroy()
    zcomm.shutdown()
    return found


def tags(base: str) -> tuple[list[Point], list[Any]]:
    import_once()
    root = Path(base)
    (root / "first").mkdir()
    world(lambda rank: save_tag(root / "first", 1.0), root / "first", 1)
    (root / "first" / "store").unlink(missing_ok=True)

    def one(kill_at: int) -> Any:
        folder = root / f"at-{kill_at}"
        shutil.copytree(root / "first", folder)
        return world(lambda rank: save_tag(folder, 2.0, kill_at, True), folder, 1)[0]

    points: list[Point] = one(0)
    for kill_at in range(1, len(points) + 1):
        assert one(kill_at) is None

    def look_at_all() -> list[Any]:
        made, found = engine(3.0), []
        for kill_at in range(len(points) + 1):
            folder = root / f"at-{kill_at}"
            assert verify(folder) == 0
            path, state = made.load_checkpoint(folder)
            found.append((Path(path).name, made.global_steps, state["value"], (folder / "latest").read_text()))
        made.destroy()
        zcomm.shutdown()
        return found

    (found,) = world(lambda rank: look_at_all(), root, 1)
    return points, found


def test_latest_names_a_whole_checkpoint_whenever_the_engine_is_killed(run_ranks: Run, tmp_path: Path) -> None:
    ((points, found),) = run_ranks(tags, 1, str(tmp_path))
    old, new = ("global_step1", 1, 1.0, "global_step1"), ("global_step2", 2, 2.0, "global_step2")
    assert found[0] == new
    shown = points.index(("replace", ".latest.saving"))
    assert found[1 : shown + 2] == [old] * (shown + 1)
    assert found[shown + 2 :] == [new] * (len(points) - shown - 1)
