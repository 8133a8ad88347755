"""Pinned tensors and the swap file from Python, as a user calls them."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from programs import Program  # noqa: E402
from swap_files import nameless  # noqa: E402
from zcomm import _core  # noqa: E402
from zcomm.offload import SwapFile, pinned_empty  # noqa: E402

Start = Callable[..., Program]

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


def engines() -> list[str]:
    return ["threads", "io_uring"]


@pytest.fixture(params=engines())
def swap(request: pytest.FixtureRequest, tmp_path: Path):
    try:
        file = SwapFile(tmp_path, engine=request.param, block_nbytes=1 << 16, depth=4)
    except NotImplementedError:
        pytest.skip("io_uring is refused here")
    assert file.stats()["engine"] == request.param
    yield file
    file.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), 7, (3, 5), (0,), (2, 0, 3), (1025, 1024)])
def test_pinned_empty_shapes(shape, dtype: torch.dtype) -> None:
    tensor = pinned_empty(shape, dtype)
    assert tensor.shape == torch.empty(shape).shape if shape != () else tensor.shape == ()
    assert tensor.dtype == dtype
    assert tensor.is_contiguous()
    assert not tensor.to(torch.float64).any()
    tensor.fill_(1)
    assert tensor.to(torch.float64).sum().item() == tensor.numel()


def test_pinned_memory_lives_as_long_as_its_last_view() -> None:
    view = pinned_empty((1000, 1000))[10:20]
    gc.collect()
    view.fill_(3)
    assert view.sum().item() == 3 * view.numel()


def test_arena_counts_and_refuses() -> None:
    arena = _core.PinnedArena(budget_nbytes=1 << 20)
    lease = arena.allocate(1 << 19)
    assert lease.nbytes == 1 << 19
    assert lease.address % 4096 == 0
    assert arena.stats()["used_nbytes"] == 1 << 19
    with pytest.raises(OSError, match="budget 1048576 bytes") as refused:
        arena.allocate((1 << 19) + 1)
    assert refused.value.errno == errno.ENOMEM
    tensor = torch.frombuffer(lease, dtype=torch.uint8)
    del lease
    gc.collect()
    tensor.fill_(7)
    assert arena.stats()["used_nbytes"] == 1 << 19
    del tensor
    gc.collect()
    assert arena.stats()["used_nbytes"] == 0
    assert arena.stats()["peak_nbytes"] == 1 << 19
    with memoryview(arena.allocate(0)) as empty:
        assert empty.nbytes == 0


def test_pinned_empty_errors() -> None:
    with pytest.raises(ValueError, match="-1"):
        pinned_empty((3, -1))
    with pytest.raises(OSError, match="bytes asked"):
        pinned_empty(1 << 58)


@pytest.mark.parametrize("dtype", DTYPES)
def test_round_trip(swap: SwapFile, dtype: torch.dtype) -> None:
    for shape in [(), (0,), (1,), (13, 17), (300, 1001)]:
        tensor = torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)
        key = f"w/{shape}"
        swap.write(key, tensor).wait()
        out = torch.empty_like(tensor)
        swap.read(key, out).wait()
        assert torch.equal(out, tensor)


def test_many_in_flight_and_works_dropped(swap: SwapFile) -> None:
    values = {f"k{i}": torch.randn(i * 997) for i in range(60)}
    for key, value in values.items():
        swap.write(key, value.clone())  # the swap file keeps the clone until it is written
    outs = {key: pinned_empty(value.shape) for key, value in values.items()}
    works = [swap.read(key, outs[key]) for key in reversed(values)]
    swap.wait()
    assert all(work.done() for work in works)
    for key, value in values.items():
        assert torch.equal(outs[key], value)
    assert not swap._pending


def test_a_parameter_and_an_offset_view(swap: SwapFile) -> None:
    flat = torch.randn(100_000)
    parameter = torch.nn.Parameter(torch.randn(300, 7))
    swap.write("view", flat[3:70_001])
    swap.write("parameter", parameter)
    out = torch.zeros_like(flat)
    swap.read("view", out[3:70_001]).wait()
    assert torch.equal(out[3:70_001], flat[3:70_001])
    assert not out[:3].any()
    assert not out[70_001:].any()
    back = torch.nn.Parameter(torch.empty(300, 7))
    swap.read("parameter", back).wait()
    assert torch.equal(back, parameter)


def test_several_threads(swap: SwapFile) -> None:
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            for i in range(20):
                value = torch.full((5000 + i,), float(index * 100 + i))
                out = torch.empty_like(value)
                swap.write(f"{index}/{i}", value)
                swap.read(f"{index}/{i}", out).wait()
                assert torch.equal(out, value)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_wrong_tensors_are_named(swap: SwapFile) -> None:
    good = torch.randn(4, 6)
    freed = torch.randn(4, 6)
    freed.untyped_storage().resize_(8)
    for call in (swap.write, swap.read):
        with pytest.raises(ValueError, match=r"'t'.*less memory than elements"):
            call("t", freed)
    with pytest.raises(ValueError, match=r"'t'.*not contiguous"):
        swap.write("t", good.t())
    swap.write("c", torch.ones(3, dtype=torch.complex64)).wait()
    for key, lazy in (("v", torch._neg_view(good)), ("c", torch.ones(3, dtype=torch.complex64).conj())):
        for call in (swap.write, swap.read):
            with pytest.raises(ValueError, match=rf"'{key}'.*negated view.*resolve_conj\(\)\.resolve_neg\(\)"):
                call(key, lazy)
    with pytest.raises(ValueError, match="zeros without memory"):
        swap.write("z", torch._efficientzerotensor(3))
    with pytest.raises(ValueError, match="meta"):
        swap.write("m", torch.empty(3, device="meta"))
    with pytest.raises(TypeError, match="ndarray"):
        swap.write("n", good.numpy())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown key 'absent'"):
        swap.read("absent", good)
    swap.write("k", good).wait()
    with pytest.raises(ValueError, match=r"\(4, 6\) torch.float32.*\(6, 4\) torch.float32"):
        swap.read("k", torch.empty(6, 4))
    with pytest.raises(ValueError, match=r"torch.int32"):
        swap.read("k", torch.empty(4, 6, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"\(5,\)"):
        swap.write("k", torch.empty(5))
    swap.reserve("k", 5, torch.float64)
    with pytest.raises(ValueError, match="never written"):
        swap.read("k", torch.empty(5, dtype=torch.float64))
    swap.release("k")
    with pytest.raises(ValueError, match="unknown key 'k'"):
        swap.release("k")
    swap.write("k", torch.empty(9)).wait()


def test_stats_and_manifest(swap: SwapFile) -> None:
    value = torch.randn(250_000)
    for _ in range(2):
        swap.write("k", value).wait()
    swap.read("k", value).wait()
    stats = swap.stats()
    assert stats["written_nbytes"] == 2_000_000
    assert stats["read_nbytes"] == 1_000_000
    assert stats["read_gbps"] == pytest.approx(1e6 / stats["read_s"] / 1e9)
    assert stats["write_gbps"] > 0
    assert stats["reserved_nbytes"] == 1_003_520
    assert stats["error_count"] == 0
    own = Path(str(stats["path"])).parent
    assert [each.name for each in own.iterdir()] == ["lock"], "the data file has no name"
    owner = json.loads((own / "lock").read_text())
    assert owner["pid"] == os.getpid()
    assert owner["uid"] == os.getuid()


def test_damage_on_disk_is_an_oserror_with_the_path(tmp_path: Path) -> None:
    with SwapFile(tmp_path, direct=False) as swap:
        value = torch.randn(10_000)
        swap.write("layer.0", value).wait()
        path = str(swap.stats()["path"])
        with open(nameless(path), "r+b") as raw:
            raw.seek(4321)
            byte = raw.read(1)
            raw.seek(4321)
            raw.write(bytes([byte[0] ^ 1]))
        with pytest.raises(OSError, match=r"layer\.0.*offset 0") as damage:
            swap.read("layer.0", torch.empty(10_000)).wait()
        assert damage.value.errno == errno.EIO
        assert damage.value.filename == path
        swap.read("layer.0", torch.empty(10_000))  # dropped, so wait() raises its error
        with pytest.raises(OSError, match=r"layer\.0"):
            swap.wait()
        swap.wait()


def test_places_that_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        SwapFile(tmp_path / "missing" / "leaf")
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError):
        SwapFile(tmp_path / "file")
    with pytest.raises(OSError, match="bytes free") as full:
        SwapFile(tmp_path, nbytes=1 << 50)
    assert full.value.errno == errno.ENOSPC
    with pytest.raises(ValueError, match="engine 'magic'"):
        SwapFile(tmp_path, engine="magic")
    with pytest.raises(ValueError, match="-1"):
        SwapFile(tmp_path, nbytes=-1)
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_close_is_final_and_idempotent(tmp_path: Path) -> None:
    with SwapFile(tmp_path / "new") as swap:
        swap.write("k", torch.randn(100))
    swap.close()
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(ValueError, match="closed"):
        swap.write("k", torch.randn(100))
    forgotten = SwapFile(tmp_path / "new")
    forgotten.write("k", torch.randn(100_000))
    del forgotten
    gc.collect()
    assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.parametrize("engine", engines())
def test_several_drives(tmp_path: Path, engine: str) -> None:
    directories = [tmp_path / name for name in "abc"]
    try:
        swap = SwapFile(directories, engine=engine, block_nbytes=1 << 16, depth=2)
    except NotImplementedError:
        pytest.skip("io_uring is refused here")
    with swap:
        values = {f"k{i}": torch.randn(i * 30_001) for i in range(6)}
        for key, value in values.items():
            swap.write(key, value)
        outs = {key: torch.empty_like(value) for key, value in values.items()}
        works = [swap.read(key, out) for key, out in outs.items()]
        swap.wait()
        assert all(work.done() for work in works)
        for key, value in values.items():
            assert torch.equal(outs[key], value)
        stats = swap.stats()
        assert stats["path"] == stats["paths"][0]
        for number, (path, directory) in enumerate(zip(map(Path, stats["paths"]), directories, strict=True)):
            assert path.parent.parent == directory
            assert nameless(path).stat().st_size > 400_000
            owner = json.loads((path.parent / "lock").read_text())
            assert (owner["drive"], owner["drives"]) == (number, 3)
        swap.write("k", torch.randn(100_000)).wait()
        for path in map(nameless, stats["paths"]):
            os.truncate(path, 0)
        with pytest.raises(OSError, match="'k' at offset") as damage:
            swap.read("k", torch.empty(100_000)).wait()
        assert damage.value.filename in stats["paths"]
    assert all(not list(directory.iterdir()) for directory in directories)


def test_several_drives_that_cannot_serve(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(NotADirectoryError, match="/file"):
        SwapFile([tmp_path / "a", tmp_path / "file"])
    with pytest.raises(ValueError, match="directories 0 and 1 are the same"):
        SwapFile([tmp_path / "a", tmp_path / "a"])
    with pytest.raises(ValueError, match="empty"):
        SwapFile([])
    assert not list((tmp_path / "a").iterdir())


def test_latencies_in_the_statistics(swap: SwapFile) -> None:
    assert swap.stats()["read_p99_s"] == 0
    value = torch.randn(250_000)
    swap.write("k", value).wait()
    swap.read("k", value).wait()
    stats = swap.stats()
    for kind in ("read", "write"):
        assert stats[f"{kind}_count"] >= 1_000_000 // (1 << 16)
        assert 0 < stats[f"{kind}_p50_s"] <= stats[f"{kind}_p90_s"] <= stats[f"{kind}_p99_s"] <= stats[f"{kind}_max_s"]


def test_a_fallback_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    shm = Path("/dev/shm")
    if not os.access(shm, os.W_OK):
        pytest.skip("no tmpfs at /dev/shm")
    directory = Path(tempfile.mkdtemp(prefix="zcomm-test-", dir=shm))
    try:
        for _ in range(2):
            with SwapFile(directory) as swap:
                assert not swap.stats()["direct"]
                assert any("O_DIRECT" in note for note in swap.stats()["notes"])
        said = [record for record in caplog.records if str(directory) in record.getMessage()]
        assert len(said) == 1
        assert said[0].levelname == "WARNING"
        with SwapFile(directory, direct=False) as swap:
            assert not any("O_DIRECT" in note for note in swap.stats()["notes"])
    finally:
        directory.rmdir()


OWNER = """
import sys, torch
from zcomm.offload import SwapFile
swap = SwapFile(sys.argv[1])
keep = swap.write("k", torch.randn(1_000_000))
print("ready", flush=True)
sys.stdin.read(1)
"""


def test_exit_without_close_leaves_nothing(start_program: Start, tmp_path: Path) -> None:
    owner = start_program(OWNER, tmp_path)
    assert owner.stdout.readline() == "ready\n", owner.stderr
    assert len(list(tmp_path.iterdir())) == 1
    owner.communicate("x")
    assert owner.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_cleaned_up_by_the_next(start_program: Start, tmp_path: Path) -> None:
    owners = [start_program(OWNER, tmp_path) for _ in range(2)]
    for owner in owners:
        assert owner.stdout.readline() == "ready\n", owner.stderr
    dead, living = owners
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert [each.name for each in tmp_path.glob("*/*")] == ["lock", "lock"], "no data stay behind"
    with SwapFile(tmp_path):
        names = [each.name for each in tmp_path.iterdir()]
        assert len(names) == 2
        assert not any(name.startswith(f"zcomm-swap-{dead.pid}-") for name in names)
    living.communicate("x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.leaves_swap
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_no_data_and_no_space(start_program: Start, tmp_path: Path, number: int) -> None:
    """The same while a swap file is copied: only a lock file is left, which the next start removes."""
    owner = start_program(OWNER.replace("print(", "copy = swap._core.copy_beside(); print("), tmp_path)
    assert owner.stdout.readline() == "ready\n", owner.stderr
    owner.send_signal(number)
    owner.wait()
    assert owner.returncode == -number
    (lock,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert lock.name == "lock" and lock.stat().st_size < 1024
    SwapFile(tmp_path).close()
    assert list(tmp_path.iterdir()) == []


def test_wrong_kinds_are_named(tmp_path: Path) -> None:
    for wrong in ("1GB", 1.5, True):
        with pytest.raises(TypeError, match=f"SwapFile: nbytes must be an int, got {wrong!r}"):
            SwapFile(tmp_path, nbytes=wrong)  # type: ignore[arg-type]
    with SwapFile(tmp_path) as swap:
        for call in (
            lambda: swap.write(3, torch.ones(1)),  # type: ignore[arg-type]
            lambda: swap.read(3, torch.ones(1)),  # type: ignore[arg-type]
            lambda: swap.reserve(3, 1, torch.float32),  # type: ignore[arg-type]
            lambda: swap.release(3),  # type: ignore[arg-type]
        ):
            with pytest.raises(TypeError, match=r"SwapFile\.\w+: key must be a str, got int \(3\)"):
                call()


def test_only_the_first_rank_of_a_host_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from zcomm.memory.swap_file import _log_once

    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with caplog.at_level("DEBUG", logger="zcomm"):
            _log_once(f"a note of rank {rank}")
    assert [record.levelname for record in caplog.records] == ["WARNING", "DEBUG"]
