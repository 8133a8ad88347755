"""SpanCache against an array of bytes, with operations as late as they may be, and with faults and interrupts.

Its keys and windows are whole pages.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
from late_swap import LateSwap
from tiers import slow
from zcomm import _core
from zcomm.zero.cache.span_cache import SpanCache, Sweep, WorkGroup, windows_nbytes
from zcomm.zero.layout.placement import over_all
from zcomm.zero.layout.sections import PAGE_NBYTES, Sections
from zcomm.zero.options import Offload
from zero_jobs import batch, digest, loss_of, small_gpt

SIZES = [4096, 100, 9000, 0, 4097, 4096, 17]  # of items; the third has two keys
ARENA = _core.PinnedArena


def keys_of(item: int) -> Iterator[tuple[str, int]]:
    first = min(SIZES[item], 8192)
    yield f"item.{item}.0", first
    if SIZES[item] > first:
        yield f"item.{item}.1", SIZES[item] - first


class Faulty(LateSwap):
    """Lets chosen future calls of ``read`` and ``write`` raise at once, or their works raise in ``wait``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.at_once: dict[int, BaseException] = {}
        self.later: dict[int, BaseException] = {}
        self.calls = 0
        self.moved: list[tuple[str, str]] = []

    def _later(self, key: str, reads: bool, address: int, begin: Any) -> Any:
        number, self.calls = self.calls, self.calls + 1
        self.moved.append(("read" if reads else "write", key))
        if number in self.at_once:
            raise self.at_once.pop(number)
        work = super()._later(key, reads, address, begin)
        return Failing(work, self.later.pop(number)) if number in self.later else work

    def fail(self, error: BaseException, after: int = 0, at_once: bool = False) -> None:
        (self.at_once if at_once else self.later)[self.calls + after] = error


class Failing:
    """A work that raises in its first wait; an interrupt leaves it in flight."""

    def __init__(self, work: Any, error: BaseException) -> None:
        self._work, self._error = work, [error]

    def wait(self, timeout: float | None = None) -> None:
        if self._error and not isinstance(self._error[0], Exception):
            raise self._error.pop()
        self._work.wait(timeout)
        if self._error:
            raise self._error.pop()

    def done(self) -> bool:
        return bool(self._work.done())


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Faulty]:
    file = Faulty([str(tmp_path)])
    yield file
    file.close()


def made(swap: Faulty, windows: int = 3) -> SpanCache:
    return SpanCache(swap, ARENA(), len(SIZES), keys_of, windows)


def noise(draw: random.Random, item: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(draw.randbytes(SIZES[item]) or b"x"), dtype=torch.uint8)[: SIZES[item]].clone()


def put(cache: SpanCache, item: int, value: torch.Tensor) -> None:
    cache.edit(item, load=False).copy_(value)
    cache.write(item)


EIO = OSError(errno.EIO, "the drive")


@pytest.mark.parametrize("seed", range(12))
def test_random_operations_are_those_of_an_array(swap: Faulty, seed: int) -> None:
    draw = random.Random(seed)
    windows = draw.choice([1, 2, 3, 7, 20])
    cache = made(swap, windows)
    assert cache.nbytes == windows_nbytes(max(SIZES), len(SIZES), windows)
    model = [torch.zeros(size, dtype=torch.uint8) for size in SIZES]
    on_drive = [value.clone() for value in model]  # of clean items

    def written() -> None:
        for item in range(len(SIZES)):
            if not cache.is_dirty(item):
                on_drive[item] = model[item].clone()

    def edit(end: bool) -> None:
        load = draw.random() < 0.5
        memory = cache.edit(item, load)
        if load:
            assert torch.equal(memory, model[item])
        value = noise(draw, item)
        memory.copy_(value)
        model[item] = value
        (cache.write if end else cache.mark)(item)

    def abandoned() -> None:
        cache.flush()
        cache.edit(item).fill_(7)  # neither written nor marked

    def forget() -> None:
        cache.forget()
        model[:] = [value.clone() for value in on_drive]

    def erase() -> None:
        cache.erase(lost=draw.random() < 0.5)
        model[:] = [torch.zeros_like(value) for value in model]

    def into() -> None:
        if not cache.is_dirty(item) and model[item].any():
            out = torch.empty_like(model[item])
            cache.read_into(item, out).wait()
            assert torch.equal(out, model[item])
            low = draw.randrange(SIZES[item] + 1)
            part = torch.empty(draw.randrange(SIZES[item] - low + 1), dtype=torch.uint8)
            cache.read_part_into(item, low, part)
            assert torch.equal(part, model[item][low : low + part.numel()])

    def peek() -> None:
        memory = cache.peek(item)
        assert memory is None or torch.equal(memory, model[item])

    def lend() -> None:
        cache.flush()
        cache.edit(item).fill_(7)  # used up, not stored
        cache.lend(item, None)
        assert cache.held(cache.window(item)) == -1

    def sweep() -> None:
        items = sorted(draw.sample(range(len(SIZES)), draw.randrange(len(SIZES) + 1)), reverse=draw.random() < 0.5)
        then = [draw.randrange(len(SIZES)) for _ in range(draw.randrange(4))]
        turn = Sweep(cache, items, draw.choice([1, 2, 8]), then)
        for each in items:
            memory = turn.take()
            assert torch.equal(memory, model[each])
            memory.add_(1)
            model[each] = model[each] + 1
            turn.write()

    operations = [
        lambda: cache.prefetch(item),
        lambda: cache.prefetch_if_free(item),
        lambda: edit(True),
        lambda: edit(True),
        lambda: edit(False),
        lambda: edit(False),
        abandoned,
        cache.flush,
        cache.settle,
        cache.finish,
        forget,
        erase,
        into,
        peek,
        lend,
        sweep,
        sweep,
    ]
    for _ in range(150):
        item = draw.randrange(len(SIZES))
        draw.choice(operations)()
        written()
        item = draw.randrange(len(SIZES))
        assert torch.equal(cache.read(item), model[item])
        written()
    cache.close()


def test_a_sweep_reads_ahead_and_writes_behind(swap: Faulty) -> None:
    cache = made(swap, 4)
    for item in range(len(SIZES)):
        put(cache, item, torch.full((SIZES[item],), item, dtype=torch.uint8))
    cache.forget()
    swap.moved.clear()
    sweep = Sweep(cache, [0, 1, 3, 4, 5], 2, then=[6])
    assert [kind for kind, _ in swap.moved] == ["read"] * 2, "two of depth 2, before any is wanted"
    for _ in range(5):
        sweep.take()
        sweep.write()
    kinds = [(kind, int(key.split(".")[1])) for kind, key in swap.moved]
    assert kinds[2:5] == [("write", 0), ("read", 3), ("write", 1)], "behind each write the next read"
    assert kinds[-2:] == [("read", 6), ("write", 5)], "wanted after the pass, once all reads of it have begun"
    assert cache.peek(6) is None and cache.held(cache.window(6)) == 6
    swap.moved.clear()
    assert Sweep(cache, [5, 4, 3], 2).take()[0] == 5 and not swap.moved, "held, so that no byte moves"
    cache.close()


@pytest.mark.parametrize("at_once", [False, True])
def test_a_failed_read_is_raised_once_and_the_window_is_empty(swap: Faulty, at_once: bool) -> None:
    cache = made(swap)
    put(cache, 2, torch.full((SIZES[2],), 5, dtype=torch.uint8))
    cache.finish()
    cache.forget()
    swap.fail(EIO, after=1, at_once=at_once)  # the second key
    with pytest.raises(OSError, match="the drive"):
        cache.read(2)
    assert cache.held(cache.window(2)) == -1
    assert cache.read(2).unique().tolist() == [5]
    cache.close()


def test_a_failed_read_ahead_is_raised_once_by_the_call_that_wants_its_window(swap: Faulty) -> None:
    cache = made(swap, 3)
    for item in (0, 6):  # of one window
        put(cache, item, torch.full((SIZES[item],), 1 + item, dtype=torch.uint8))
    cache.forget()
    swap.fail(EIO)
    cache.prefetch(0)
    with pytest.raises(OSError, match="the drive"):
        cache.read(6)
    assert cache.read(6).unique().tolist() == [7] and cache.read(0).unique().tolist() == [1]
    cache.close()


def test_a_failed_write_is_raised_once_by_the_call_that_needs_the_window(swap: Faulty) -> None:
    cache = made(swap, 3)
    for use in (lambda: cache.read(6), lambda: cache.edit(0), cache.settle, cache.finish):
        swap.fail(EIO)
        put(cache, 0, torch.zeros(SIZES[0], dtype=torch.uint8))
        with pytest.raises(OSError, match="the drive"):
            use()
        assert cache.held(0) == -1
        cache.settle()
    cache.close()


def test_a_write_that_could_not_begin_leaves_the_item_dirty(swap: Faulty) -> None:
    cache = made(swap)
    swap.fail(EIO, after=1, at_once=True)
    with pytest.raises(OSError, match="the drive"):
        put(cache, 2, torch.full((SIZES[2],), 3, dtype=torch.uint8))
    assert cache.is_dirty(2)
    cache.finish()
    cache.forget()
    assert cache.read(2).unique().tolist() == [3]
    cache.close()


def test_finish_waits_for_all_windows_and_raises_the_first_error(swap: Faulty) -> None:
    cache = made(swap)
    swap.fail(EIO, after=1)
    for item in range(3):
        cache.edit(item, load=False).fill_(item)
        cache.mark(item)
    with pytest.raises(OSError, match="the drive"):
        cache.finish()
    assert swap.pending_in(cache.memory(0).data_ptr(), cache.nbytes) == 0
    assert [cache.held(window) for window in range(3)] == [0, -1, 2]
    cache.close()


@pytest.mark.parametrize("reads", [False, True])
def test_an_interrupt_leaves_the_operation_pending(swap: Faulty, reads: bool) -> None:
    cache = made(swap)
    put(cache, 0, torch.full((SIZES[0],), 9, dtype=torch.uint8))
    if reads:
        cache.forget()
    else:
        cache.finish()
        cache.edit(0).fill_(8)
    swap.fail(KeyboardInterrupt())
    (cache.prefetch if reads else cache.write)(0)
    window = cache.memory(0)
    with pytest.raises(KeyboardInterrupt):
        cache.edit(0)
    assert swap.pending_in(window.data_ptr(), window.numel()) == 1, "the memory is not free"
    assert cache.edit(0).unique().tolist() == [9 if reads else 8]
    assert swap.pending_in(window.data_ptr(), window.numel()) == 0
    cache.close()


@pytest.mark.parametrize("end", ["forget", "erase", "close"])
def test_nothing_is_in_flight_behind_forget_erase_and_close(swap: Faulty, end: str) -> None:
    cache = made(swap)
    for item in range(3):
        put(cache, item, torch.full((SIZES[item],), item + 1, dtype=torch.uint8))
    cache.forget()
    memory = cache.memory(0).data_ptr()
    cache.edit(2)
    put(cache, 1, torch.zeros(SIZES[1], dtype=torch.uint8))
    cache.prefetch(0)
    swap.fail(KeyboardInterrupt(), at_once=True)
    with pytest.raises(KeyboardInterrupt):
        cache.write(2)
    stray = swap.read("item.1.0", cache.memory(1).data_ptr(), SIZES[1])  # lost by its window in an interrupt
    assert swap.pending_in(memory, cache.nbytes) > 1
    if end == "erase":
        cache.erase(lost=True)
    else:
        getattr(cache, end)()
    assert swap.pending_in(memory, cache.nbytes) == 0 and stray.done()


def test_an_erased_item_with_a_failed_write_is_zeros_and_in_no_copy(swap: Faulty) -> None:
    cache = made(swap)
    swap.fail(EIO)
    put(cache, 0, torch.ones(SIZES[0], dtype=torch.uint8))
    cache.erase()
    assert swap.written() == []
    assert not cache.read(0).any()
    cache.close()


def test_a_lent_window_is_free_once_its_use_has_ended(swap: Faulty) -> None:
    class Use:
        waited = False

        def done(self) -> bool:
            return self.waited

        def wait(self) -> None:
            self.waited = True

    cache, use = made(swap), Use()
    cache.edit(0)
    cache.mark(0)
    cache.lend(0, use)
    put(cache, 1, torch.zeros(SIZES[1], dtype=torch.uint8))
    cache.prefetch_if_free(6)
    assert not use.waited and cache.held(0) == -1
    cache.edit(6)
    assert use.waited
    cache.close()


def test_works_raise_the_first_error_once_all_have_ended(swap: Faulty) -> None:
    works, memory = WorkGroup(), torch.zeros(64, dtype=torch.uint8)
    swap.reserve("a", 64)
    swap.fail(EIO)
    swap.fail(OSError(errno.ENOSPC, "another"), after=1)
    for _ in range(3):
        works.add(swap.write("a", memory.data_ptr(), 64))
    with pytest.raises(OSError, match="the drive"):
        works.wait()
    assert swap.pending_in(memory.data_ptr(), 64) == 0 and works.done()
    works.wait()


# --- whole pages ------------------------------------------------------------------------------------------------------

Run = Callable[..., list[Any]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("align", [64, 2048])
def test_shards_on_a_drive_are_whole_pages_and_others_are_not_padded(
    world_size: int, itemsize: int, align: int
) -> None:
    model = small_gpt()
    offload = Offload("nvme", lambda name, param: "nvme" if param.ndim == 2 else "device")
    placements = over_all(model.parameters(), world_size, 0)
    sections = Sections(model, list(model.parameters()), [], placements, 3, offload, True)
    geometry = sections.geometry(1 << 14, itemsize, align)
    for bucket in geometry.every:
        on_drive = sections.list[bucket.section].weights == "nvme"
        used = sum(-(-geometry.places[index].count // align) * align for index in bucket.params)
        step = max(PAGE_NBYTES // itemsize, align) if on_drive else align
        assert bucket.shard_count % step == 0
        assert bucket.count - used < world_size * step
        for index in bucket.params:
            assert geometry.places[index].offset % align == 0


def swapped(folder: str, optimizer: str, options: dict[str, Any], checkpoint: str) -> tuple[str, dict[str, Any]]:
    """Train, save and load; return the bits and the swap file's counters."""
    comm = zcomm.init(timeout=60)
    model = small_gpt()
    opt = zcomm.ZeroOptimizer(
        model, optimizer, lr=1e-3, nvme_path=folder if options.get("offload") else None, bucket_mb=0.02, **options
    )

    def step(number: int) -> None:
        loss_of(model, *batch(comm.rank, number)).backward()
        opt.step()
        opt.zero_grad()

    for number in range(3):
        step(number)
    opt.save(checkpoint)
    step(3)
    opt.load(checkpoint)
    step(4)
    bits = digest(opt.full_state_dict())
    swap = opt._live.swap
    stats = {} if swap is None else dict(swap.stats())
    opt.close()
    return bits, stats


CASES = [
    ("adamw", {"stage": 3, "precision": "bf16"}),
    ("adamw", {"stage": 3, "precision": "fp32", "share_parameters": False}),
    ("adamw", {"stage": 3, "precision": "bf16", "state_dtype": "8bit"}),
    ("adamw", {"stage": 2, "precision": "bf16"}),
]


@pytest.mark.parametrize(("optimizer", "options"), CASES)
@pytest.mark.parametrize("world_size", [1, slow(2)])
def test_nothing_is_bounced_and_no_bit_changes(
    run_ranks: Run, tmp_path: Path, world_size: int, optimizer: str, options: dict[str, Any]
) -> None:
    if not _is_direct(tmp_path):
        pytest.skip("no O_DIRECT here: nothing can be bounced")
    on_drive = {**options, "offload": "nvme"}
    found = run_ranks(swapped, world_size, str(tmp_path), optimizer, on_drive, str(tmp_path / "on_drive"))
    in_ram = run_ranks(swapped, world_size, str(tmp_path), optimizer, options, str(tmp_path / "in_ram"))
    assert len({bits for bits, _ in (*found, *in_ram)}) == 1
    for _, stats in found:
        assert stats["written_nbytes"] > 0
        assert stats["read_nbytes"] > 0 or options["stage"] < 3, "weights are always read"
        assert stats["bounced_nbytes"] == 0 and stats["bounce_nbytes"] == 0


def _is_direct(folder: Path) -> bool:
    with zcomm.SwapFile(folder) as swap:
        data = torch.zeros(1000)
        swap.write("key", data).wait()
        stats = swap.stats()
        assert (stats["bounced_nbytes"] > 0) == stats["direct"]
        return bool(stats["direct"])
