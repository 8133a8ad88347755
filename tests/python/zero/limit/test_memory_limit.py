"""``memory=``: settings chosen for a limit, the peak below it, unchanged bits, and errors."""

from __future__ import annotations

import logging
import mmap
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from tiers import slow
from zcomm.demo.model import GPT, ModelConfig
from zcomm.zero import MemoryLimit, Offload, Precision, Units
from zcomm.zero.layout.tiles import TileForm
from zcomm.zero.memory import limit as memory_limit
from zcomm.zero.memory.limit import Guard, as_limit, candidates, choose, holders, peak_nbytes
from zcomm.zero.memory.plan import Settings, plan_memory
from zcomm.zero.memory.usage import empty_memory

MIB = 2**20
Run = Callable[..., list[Any]]


def model(layers: int = 4, width: int = 256) -> nn.Module:
    torch.manual_seed(0)
    return GPT(ModelConfig(layers=layers, heads=4, width=width, context=32))


def settings(offload: Offload | None = None, **more: Any) -> Settings:
    form = TileForm(("m", "v"), torch.float32, torch.float32)
    values: dict[str, Any] = {"bucket_mb": 25.0, "prefetch": 1, "units": Units(), "world_size": 1}
    return Settings(3, offload or Offload("nvme", "nvme"), precision=Precision(), form=form, **values | more)


# --- the limit ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["4 apples", "", 0, -5, 1.5, True])
def test_what_is_no_size_is_named(wrong: Any) -> None:
    with pytest.raises(ValueError, match="MemoryLimit: limit="):
        MemoryLimit(wrong)


def test_activations_are_named_too() -> None:
    with pytest.raises(ValueError, match="MemoryLimit: activations='many'"):
        MemoryLimit("1GiB", "many")
    with pytest.raises(ValueError, match="MemoryLimit: device_activations='many'"):
        MemoryLimit("1GiB", 0, "many")


def test_room_is_what_margin_and_activations_leave() -> None:
    told, untold = MemoryLimit(1000 * MIB, 100 * MIB), MemoryLimit(1000 * MIB)
    assert told.room == 870 * MIB and untold.room == 870 * MIB
    assert MemoryLimit(1000 * MIB, 0).room == 970 * MIB
    for limit in (told, untold):
        assert MemoryLimit(limit.holding(limit.room), limit.activations).room >= limit.room


def test_the_environment_is_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZCOMM_MEMORY", "8GiB")
    limit = as_limit(None, 4)
    assert limit is not None and limit.nbytes == 2 << 30
    assert as_limit("1GiB", 4) == MemoryLimit("1GiB")
    monkeypatch.setenv("ZCOMM_MEMORY", "much")
    with pytest.raises(ValueError, match="ZCOMM_MEMORY: 'much'"):
        as_limit(None)
    monkeypatch.delenv("ZCOMM_MEMORY")
    assert as_limit(None) is None


# --- the choice -----------------------------------------------------------------------------------------------------


def test_candidates_begin_with_what_was_wanted() -> None:
    wanted = settings()
    found = list(candidates(wanted))
    assert found[0] == wanted
    assert found[-1].offload.gradients == "nvme" and found[-1].units.max_bytes == 16 * MIB
    assert found[-1].bucket_mb == 1.0
    by_rows = [each.units.rows for each in found]
    assert by_rows == sorted(by_rows) and by_rows[-1], "rows come last"
    assert all(each.units.max_bytes for each in found if each.units.rows)


def test_what_the_program_has_chosen_stays() -> None:
    wanted = settings(Offload("nvme", "nvme", gradients="nvme"), units=Units(max_bytes=5 * MIB), bucket_mb=0.5)
    assert list(candidates(wanted)) == [wanted]


def test_a_small_model_in_ram_has_smaller_buckets_alone() -> None:
    form = settings().form
    wanted = Settings(2, Offload(), 1, Precision(), form, 25.0, 1, Units())
    assert {each.offload for each in candidates(wanted)} == {wanted.offload}
    assert [each.bucket_mb for each in candidates(wanted)] == [25.0, 8.0, 4.0, 2.0, 1.0]


def test_gradients_of_the_last_pass_need_room() -> None:
    """With less, backward adds all passes; buckets and tiers stay."""
    with torch.device("meta"):
        net = GPT(ModelConfig(layers=32, heads=4, width=2048, context=32))
    wanted = replace(settings(Offload("cpu")), stage=2, on_device=True, last_pass=True, precision=Precision("bf16"))
    every = [(each.bucket_mb, each.last_pass) for each in candidates(wanted)]
    assert every[:3] == [(25.0, True), (25.0, False), (8.0, True)]
    inside = resident() + 20 * MIB  # 20 MiB: memory that the test itself adds meanwhile
    most, least = (
        sum(holders(plan_memory(net, each), each, inside).values())
        for each in (wanted, replace(wanted, last_pass=False))
    )
    assert most - least > 2 * 32 * 12 * 2048**2 - (1 << 30), "all of them, but for the slots of others"
    for room, last in ((most, True), ((most + least) // 2, False)):
        limit = MemoryLimit(MemoryLimit(1, 0).holding(room), 0)
        assert choose(net, list(net.parameters()), limit, wanted, zcomm.init()) == replace(wanted, last_pass=last)


def test_units_smaller_than_a_block_in_parts_come_last() -> None:
    wanted = settings()
    plain, in_parts = list(candidates(wanted)), list(candidates(wanted, in_parts=True))
    key = str
    assert sorted(plain, key=key) == sorted(in_parts, key=key) and in_parts[0] == wanted
    sizes = [each.units.max_bytes or 1 << 40 for each in in_parts if not each.units.rows]
    assert sizes == sorted(sizes, reverse=True) and plain != in_parts
    whole = [each for each in in_parts if each.units.max_bytes is None]
    assert {each.offload.gradients for each in whole} == {None, "nvme"}, "sums on the drive come before"


def chosen(net: nn.Module, limit: MemoryLimit, **more: Any) -> Settings:
    return choose(net, list(net.parameters()), limit, settings(**more), zcomm.init())


def test_a_large_limit_changes_nothing() -> None:
    assert chosen(model(), MemoryLimit("100GiB")) == settings()


def test_sums_of_gradients_go_to_the_drive_before_the_limit_is_passed() -> None:
    with torch.device("meta"):
        net = GPT(ModelConfig(layers=32, heads=4, width=512, context=32))
    inside = resident() + 20 * MIB  # 20 MiB: memory that the test itself adds meanwhile
    wanted = settings()
    without = sum(holders(plan_memory(net, wanted), wanted, inside).values())
    found = chosen(net, MemoryLimit(MemoryLimit(1, 0).holding(without // 2 + inside // 2), 0))
    assert found.offload.gradients == "nvme"
    assert sum(holders(plan_memory(net, found), found, inside).values()) < without


@pytest.mark.parametrize("update", ["step", "forward", "auto"])
def test_a_large_vocabulary_is_gathered_by_rows_where_nothing_else_fits(
    caplog: pytest.LogCaptureFixture, update: str
) -> None:
    slots, offload = [], Offload("nvme", "nvme", update=update)
    with torch.device("meta"):
        nets = [
            nn.Sequential(nn.Embedding(words, 1024), nn.Linear(1024, words, bias=False)) for words in (64_000, 128_000)
        ]
    for net in nets:
        inside = resident() + 20 * MIB
        found = chosen(net, MemoryLimit(MemoryLimit(1, 0).holding(inside + 400 * MIB), 0), offload=offload)
        assert found.units.rows and found.units.max_bytes and "by rows" in caplog.text
        assert found.offload.update == update
        without = replace(found, units=replace(found.units, max_bytes=None, rows=False))
        held = [sum(holders(plan_memory(net, each), each, inside).values()) for each in (found, without)]
        assert held[0] <= inside + 420 * MIB < held[1]
        least = replace(found, units=Units(max_bytes=16 * MIB, rows=True), offload=offload)
        memory = plan_memory(net, least).memory
        slots.append((memory["device"]["slots"], memory["cpu"]["slots"]))
    assert slots[0] == slots[1], "no buffer grows with the vocabulary"


def resident() -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("VmRSS:"))


def test_what_does_not_fit_names_holders_and_the_limit_that_works() -> None:
    net = model()
    with pytest.raises(ValueError, match=r"memory='1MiB' .* too small .* contents of the process.* works") as told:
        chosen(net, MemoryLimit("1MiB"))
    works = int(str(told.value).split("memory='")[2].split("MiB'")[0])
    assert chosen(net, MemoryLimit((works + 8) * MIB)).bucket_mb <= 25.0  # the process itself has grown meanwhile
    three = r" is too small for this model: at least ([\d.]+ \wiB [\w ,]+[,;] ){3}memory='\d+MiB' works$"
    with pytest.raises(ValueError, match=three):
        chosen(net, MemoryLimit(works * MIB * 3 // 4))


@pytest.mark.parametrize("parts", [1, 2])
def test_activations_that_do_not_fit_name_their_parts(parts: int) -> None:
    net = model()
    if parts > 1:
        zcomm.split_batch(net.blocks, parts=parts)
    with pytest.raises(ValueError, match="works") as told:
        chosen(net, MemoryLimit("1MiB", 0))
    works = int(str(told.value).split("memory='")[2].split("MiB'")[0]) + 40
    limit = f"{works}MiB"  # of these at least 32 are for activations
    with pytest.raises(ValueError, match=r"works; zcomm\.split_batch\(blocks, parts=(\d+)\) works, too") as told:
        chosen(net, MemoryLimit(limit, "256MiB"))
    number = int(str(told.value).split("parts=")[1].split(")")[0])
    assert 256 / 44 * parts <= number <= 256 / 30 * parts and number % parts == 0
    assert chosen(net, MemoryLimit(limit, 256 * MIB * parts // number)).bucket_mb <= 25.0
    for activations in (0, "100GiB"):
        with pytest.raises(ValueError, match=r"works$"):
            chosen(net, MemoryLimit("2MiB", activations))


def test_blocks_in_parts_stay_whole_as_long_as_they_can(caplog: pytest.LogCaptureFixture) -> None:
    with torch.device("meta"):
        net = GPT(ModelConfig(layers=2, heads=4, width=2048, context=32))
    inside, wanted = resident() + 20 * MIB, settings()

    def least(**more: Any) -> int:
        found = replace(wanted, bucket_mb=1.0, **more)
        return sum(holders(plan_memory(net, found), found, inside).values())

    pieces, on_drive = {"units": Units(max_bytes=64 * MIB)}, {"offload": Offload("nvme", "nvme", gradients="nvme")}
    assert least(**pieces, **on_drive) + 100 * MIB < least(**pieces) < least(**on_drive) < least()
    limit = MemoryLimit(MemoryLimit(1).holding(least(**on_drive)))
    found = chosen(net, limit)
    assert found.units.max_bytes is not None and found.offload.gradients is None
    zcomm.split_batch(net.blocks, parts=4)
    found = chosen(net, limit)
    assert found.units.max_bytes is None and found.offload.gradients == "nvme" and "split_batch" not in caplog.text
    found = chosen(net, MemoryLimit(MemoryLimit(1).holding(least(**pieces, **on_drive))))
    assert found.units.max_bytes is not None and "each part of split_batch gathers them again" in caplog.text


def test_what_is_left_is_spent_on_weights_and_then_on_state() -> None:
    net = model()
    found = chosen(net, MemoryLimit(resident() + 128 * MIB + 8 * sum(p.nbytes for p in net.parameters()), 0))
    assert callable(found.offload.params)
    weights = plan_memory(net, found).memory
    assert weights["cpu"]["parameters"] > 0
    whole = chosen(net, MemoryLimit("100GiB", 0))
    memory = plan_memory(net, whole).memory
    assert memory["nvme"]["parameters"] == 0 and memory["nvme"]["optimizer"] == 0


@pytest.mark.parametrize("what", [{"model": [nn.Parameter(torch.ones(4))]}, {"stage": 2, "offload": None}])
def test_a_model_is_needed_and_any_stage_is_checked(what: dict[str, Any]) -> None:
    arguments = {"model": model(), "stage": 2, **what}
    with pytest.raises(ValueError, match="memory='1MiB'"):
        zcomm.ZeroOptimizer(arguments.pop("model"), memory="1MiB", **arguments)


def test_the_rank_with_least_room_decides(run_ranks: Run, tmp_path: Path) -> None:
    wide, tight = run_ranks(with_different_limits, 2, str(tmp_path))
    assert wide == tight and wide[0] == "nvme"


def with_different_limits(folder: str) -> tuple[Any, Any]:
    """Ranks of hosts of different size, for example. Returns: tier of gradients, and bytes by tier and purpose."""
    comm, net = zcomm.init(timeout=20), model()
    with pytest.raises(ValueError, match=r"memory='1MiB' \(1.0 MiB on rank 1\) is too small .*; memory='\d+MiB' works"):
        zcomm.ZeroOptimizer(net, stage=3, offload="nvme", nvme_path=folder, memory=["64GiB", "1MiB"][comm.rank])
    with torch.device("meta"):
        deep = GPT(ModelConfig(layers=64, heads=4, width=512, context=32))
    wanted = settings(world_size=2)
    without = sum(holders(plan_memory(deep, wanted), wanted, resident()).values())
    limit = MemoryLimit("64GiB", 0) if comm.rank == 0 else MemoryLimit(without - 100 * MIB, 0)
    found = choose(deep, list(deep.parameters()), limit, wanted, comm)
    return found.offload.gradients, plan_memory(deep, found).memory


@pytest.mark.parametrize("share", [True, slow(False)])
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_what_is_laid_out_is_what_there_is(run_ranks: Run, tmp_path: Path, backend: str, share: bool) -> None:
    run_ranks(as_laid_out, 2, str(tmp_path), backend, share)


def as_laid_out(folder: str, backend: str, share: bool) -> None:
    zcomm.init(backend=backend, timeout=60)
    net = model()
    wanted = settings(world_size=2, shared=share and backend == "shm")
    planned = plan_memory(net, wanted).memory
    opt = zcomm.ZeroOptimizer(
        net, "adamw", stage=3, offload="nvme", nvme_path=folder, share_parameters=share, bucket_mb=wanted.bucket_mb
    )
    assert opt.memory() == planned
    opt.close()


# --- bits and bytes -------------------------------------------------------------------------------------------------


def train(folder: str, memory: Any, **options: Any) -> list[str]:
    comm = zcomm.init(timeout=60)
    net = model()
    opt = zcomm.ZeroOptimizer(
        net, "adamw", lr=1e-2, stage=3, offload="nvme", nvme_path=folder, clip_norm=0.5, memory=memory, **options
    )
    found = []
    for step in range(3):
        tokens = torch.randint(256, (2, 2, 32), generator=torch.Generator().manual_seed(10 * step + comm.rank))
        loss = net(tokens[0], tokens[1])
        loss.backward()
        opt.step()
        opt.zero_grad()
        found += [loss.item().hex(), float(opt.grad_norm or 0).hex()]
    opt.close()
    return found


def same_bits(folder: str) -> None:
    results = [train(folder, way) for way in (None, "100GiB", MemoryLimit("100GiB", 0))]
    results.append(train(folder, None, units=Units(max_bytes=MIB)))
    with pytest.raises(ValueError, match="works") as told:
        train(folder, "1MiB")
    tight = int(str(told.value).split("memory='")[2].split("MiB")[0]) + 20  # the process's memory varies between runs
    results += [train(folder, f"{tight}MiB"), train(folder, MemoryLimit(f"{tight}MiB", "16MiB"))]
    assert all(found == results[0] for found in results), results


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_no_bit_depends_on_the_limit(run_ranks: Run, world_size: int, tmp_path: Path) -> None:
    run_ranks(same_bits, world_size, str(tmp_path))


_KEEPS = """
import resource, sys, torch, zcomm
from zcomm.demo.model import ByteLlama
from zcomm.zero.memory.limit import peak_nbytes
torch.manual_seed(1)
with zcomm.zero.Init():
    net = ByteLlama(layers=6, heads=8, width=1024)
limit = zcomm.zero.MemoryLimit(sys.argv[2], "40MiB")
opt = zcomm.ZeroOptimizer(net, stage=3, offload="nvme", nvme_path=sys.argv[1], memory=limit, precision="bf16")
# The kernel's wall for private memory. It counts what is mapped, touched or not: stacks, arenas.
wall = limit.nbytes - opt.memory()["cpu"]["slots"] + (128 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (wall, wall))
try:
    torch.empty(wall, dtype=torch.uint8)
except RuntimeError:
    print("walled")
peaks = []
for _ in range(4):
    tokens = torch.randint(256, (2, 1, 32))
    net(tokens[0], tokens[1]).backward()
    opt.step()
    opt.zero_grad()
    peaks.append(peak_nbytes())
assert (opt.memory()["nvme"]["optimizer"] > 0) == (limit.nbytes < 1 << 30)
assert peaks[-1] - peaks[1] < 0.02 * limit.nbytes, "memory is constant from the second step on"
opt.close()
if limit.nbytes <= 600 << 20:  # whole weights of the model's own have no room, either
    try:
        net.model.layers[0].mlp.up_proj.weight.sum()
    except RuntimeError as error:
        assert "before close()" in str(error), error
    else:
        raise AssertionError("140 MB of weights came into memory")
peaks.append(peak_nbytes())
assert max(peaks) <= limit.nbytes, (peaks, limit.nbytes)
"""


def keeps(
    folder: Path, limit: str, world_size: int = 1, prefix: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Train within ``limit``. prefix: words before the command."""
    script = folder / "keeps.py"
    script.write_text(_KEEPS)
    command = [
        *prefix,
        sys.executable,
        "-m",
        "zcomm.cli.main",
        "run",
        "-n",
        str(world_size),
        str(script),
        str(folder),
        limit,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.long  # test_memory_walls.py has processes that die beyond the limit
@pytest.mark.timeout_s(600)
def test_the_process_keeps_the_limit(tmp_path: Path) -> None:
    """70 million parameters: weights, sums and state would need 1.1 GB."""
    told = keeps(tmp_path, "1MiB").stderr
    least = int(told.split("; memory='")[1].split("MiB")[0])
    refused = keeps(tmp_path, f"{least * 3 // 4}MiB")
    assert refused.returncode == 1 and "is too small for this model: at least" in refused.stderr, refused.stderr
    # Libraries vary by some MiB between runs. In 900 MiB all weights are in RAM, in 2 GiB all tensors are.
    for world_size, given in ((1, least + 8), (1, 900), (1, 2048), (2, 700)):
        process = keeps(tmp_path, f"{given}MiB", world_size)
        assert process.returncode == 0, process.stderr
        assert "has held" not in process.stderr
        assert process.stdout.count("walled") == world_size


# --- the guard ------------------------------------------------------------------------------------------------------


def held_later(monkeypatch: pytest.MonkeyPatch, limit: MemoryLimit, rank: int) -> Guard:
    """Return a guard made at a time when the process had held less."""
    with monkeypatch.context() as patch:
        patch.setattr("zcomm.zero.memory.limit.peak_nbytes", lambda: 0)
        return Guard(limit, rank)


def test_the_guard_names_what_is_held_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = empty_memory()
    memory["device"]["slots"] = 3 * MIB
    guard = held_later(monkeypatch, MemoryLimit("1MiB"), 7)
    with caplog.at_level(logging.WARNING, "zcomm"):
        guard.look(lambda: memory)
        guard.look(lambda: memory)
    (record,) = caplog.records
    text = record.getMessage()
    assert "rank 7 has held" in text and "memory='1MiB'" in text and "3.0 MiB slots of the optimizer" in text
    assert "Smaller batches" in text and " 0 B" not in text


@pytest.mark.parametrize(("activations", "parts"), [(30, None), (64, 2), (160, 1), (100_000, None)])
def test_the_guard_names_parts(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, activations: int, parts: int | None
) -> None:
    """40 MiB more than the limit are held."""
    net = model()
    if parts:
        zcomm.split_batch(net.blocks, parts=parts)
    monkeypatch.setattr(memory_limit, "_resident_nbytes", lambda: 500 * MIB + sum(p.nbytes for p in net.parameters()))
    peak = (500 + 96 + activations) * MIB
    monkeypatch.setattr(memory_limit, "peak_nbytes", iter([0, peak]).__next__)
    guard = Guard(MemoryLimit(peak - 40 * MIB), 0, model=net)
    with caplog.at_level(logging.WARNING, "zcomm"):
        guard.look(empty_memory)
    if activations <= 40:
        assert "Smaller batches" in caplog.text and "split_batch" not in caplog.text, "no parts are enough"
    else:
        fewest = -(-activations // (activations - 40)) * (parts or 1)
        assert f"With zcomm.split_batch(blocks, parts={fewest})" in caplog.text


def test_what_was_held_before_is_not_the_optimizers(caplog: pytest.LogCaptureFixture) -> None:
    """A first model, or data that a program has read and dropped."""
    limit = MemoryLimit(resident() + 64 * MIB)
    with caplog.at_level(logging.WARNING, "zcomm"):
        hold_for_a_moment(peak_nbytes() - resident() + 128 * MIB)
        guard = Guard(limit, 0)
        guard.look(empty_memory)
        assert not caplog.records
        hold_for_a_moment(peak_nbytes() - resident() + 64 * MIB)
        guard.look(empty_memory)
    assert "has held" in caplog.text


def hold_for_a_moment(nbytes: int) -> None:
    with mmap.mmap(-1, nbytes) as memory:
        for begin in range(0, nbytes, mmap.PAGESIZE):
            memory[begin] = 1


def test_a_model_that_was_whole_is_named_at_construction(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "peak_nbytes", iter([1 << 20, 8 << 30]).__next__)  # before and after construction
    with caplog.at_level(logging.WARNING, "zcomm"):
        opt = zcomm.ZeroOptimizer(model(), stage=3, offload="nvme", nvme_path=tmp_path, memory="4GiB")
    opt.close()
    text = caplog.text
    assert "has held 8.0 GiB" in text and "zcomm.zero.Init()" in text and "Smaller batches" not in text


def test_the_guard_is_silent_within_the_limit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "zcomm"):
        Guard(MemoryLimit(peak_nbytes() + (1 << 30)), 0).look(empty_memory)
    assert not caplog.records
