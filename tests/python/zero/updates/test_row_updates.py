"""Updates of weights by rows in forward and backward: one bucket at a time, late reads, errors, interrupts."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import test_atomic
import test_mode_faults
import zcomm
from test_mode_faults import STATE, SUMS, WEIGHTS, WIDTH, BadSwap, Fault, bits_of, met, small_spans
from tiers import long, one_in, slow
from zcomm.zero import Offload, Units
from zcomm.zero.params.shards import SwapSource
from zero_jobs import Case

Run = Callable[..., list[Any]]
UP, BLOCKS = 2112, 4  # rows: two blocks of each weight
ROWS = Units(max_bytes=1088 * WIDTH * 4, rows=True)
NVME = Case(3, "nvme", 0.004, gradients="nvme")
FORWARD, BACKWARD = replace(NVME, update="forward"), replace(NVME, update="backward")


def larger_spans(patch: pytest.MonkeyPatch) -> None:
    """Cut a bucket of rows, which is larger than those of other tests, into some ten spans."""
    small_spans(patch)
    patch.setattr(zcomm.zero.layout.tiles, "TILE_COUNT", 1536)


class Wide(nn.Module):
    """Wide Linears, of which the last is whole and used in every other pass. late: called in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, UP) for _ in range(BLOCKS))
        self.rare = nn.ModuleList((nn.Linear(WIDTH, WIDTH),))
        self.late: Callable[[torch.Tensor], Any] | None = None

    def forward(self, x: torch.Tensor, rarely: bool = True) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = torch.tanh(block(x)).unflatten(-1, (-1, WIDTH)).mean(-2)
            if number == 0 and self.late is not None:
                x.register_hook(self.late)
        return self.rare[0](x) if rarely else x


def made(folder: str, case: Case, **options: Any) -> tuple[Wide, Any]:
    torch.manual_seed(3)
    net = Wide()
    return net, zcomm.ZeroOptimizer(net, lr=1e-2, nvme_path=folder, **{**case.arguments(), "units": ROWS, **options})


def loss_of(net: Wide, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * number + zcomm.rank())
    return net(torch.randn(3, WIDTH, generator=generator)).square().mean()


def run(net: Wide, opt: Any, begin: int, end: int) -> None:
    for number in range(begin, end):
        loss_of(net, number).backward()
        opt.step()
        opt.zero_grad()


# --- one bucket at a time -------------------------------------------------------------------------------------------


def look(folder: str) -> None:
    """Log the reads and updates of the weights' buckets in a forward after a step."""
    zcomm.init(timeout=60)
    net, opt = made(folder, FORWARD, clip_norm=1.0, prefetch=0)
    run(net, opt, 0, 1)
    parts, log = opt._open_parts, []
    by_rows = [unit for unit in parts.store.units if unit.by_rows]
    assert len(by_rows) == BLOCKS and all(len(unit.buckets) == 2 for unit in by_rows)

    def logging(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def logged(self: Any, bucket: Any, *rest: Any) -> Any:
            log.append((name, bucket.index))
            return act(self, bucket, *rest)

        return logged

    with pytest.MonkeyPatch.context() as patch:
        for name in ("load", "fetch_part"):
            patch.setattr(SwapSource, name, logging(name, getattr(SwapSource, name)))
        before = parts.swap.stats()["read_nbytes"]
        loss = loss_of(net, 1)
        read = parts.swap.stats()["read_nbytes"] - before
    expected = [bucket.index for unit in by_rows for bucket in unit.buckets]
    assert log == [("load", index) for index in expected], "each once: rows are taken out of what was updated"
    assert not parts.updates.waits
    shards = sum(bucket.shard_count for bucket in parts.geometry.buckets)
    assert read <= shards * (4 + 8 + 4) * 1.1 + 2**16, "weights, two moments and sums, each once"
    loss.backward()
    opt.step()
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_forward_updates_bucket_by_bucket_before_its_rows(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(look, world_size, str(tmp_path))


# --- rows that are read late ----------------------------------------------------------------------------------------


def read_late(folder: str, update: str, since: int) -> tuple[str, int]:
    """Read rows of a weight in backward after its gradient, from step ``since`` on. Returns: bits, and updates in
    backward."""
    zcomm.init(timeout=20)
    net, opt = made(folder, replace(NVME, update=update))
    updated = 0

    def late(grad: torch.Tensor) -> None:
        F.linear(grad.detach(), net.blocks[2].weight)

    for number in range(5):
        if number >= since:
            net.late = late
        loss_of(net, number).backward()
        updated += opt._open_parts.updates.pending
        opt.step()
        opt.zero_grad()
    found = bits_of(opt)
    opt.close()
    return found, updated


def reads_late(folder: str) -> None:
    wanted, none = read_late(folder, "step", 9)
    assert read_late(folder, "forward", 0) == (wanted, 0) and not none
    with pytest.raises(RuntimeError, match=r"backward uses unit blocks\.2\.weight again.*nothing has been changed"):
        read_late(folder, "backward", 0)
    with pytest.raises(RuntimeError, match=r"backward uses unit blocks\.2\.weight again, of which it has all grad"):
        read_late(folder, "backward", 3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_that_are_read_after_their_gradient(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(reads_late, world_size, str(tmp_path))


def between(folder: str) -> None:
    """Use weights by rows between backward and step()."""
    zcomm.init(timeout=20)
    net, opt = made(folder, BACKWARD)
    run(net, opt, 0, 2)
    loss_of(net, 2).backward()
    for use in (lambda: net.blocks[0](torch.ones(WIDTH)), lambda: net.blocks[1].weight.sum(), lambda: loss_of(net, 3)):
        with pytest.raises(RuntimeError, match="backward has updated the weights already"):
            use()
    opt.step()
    opt.zero_grad()
    run(net, opt, 3, 5)
    found = bits_of(opt)
    opt.close()
    net, opt = made(folder, NVME)
    run(net, opt, 0, 5)
    assert bits_of(opt) == found
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_use_before_step_raises(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(between, world_size, str(tmp_path))


# --- errors ---------------------------------------------------------------------------------------------------------


SCENES = [
    ("nvme, step", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ("nvme, forward", "forward", Fault("read", STATE, good=40), "loaded"),
    ("nvme, forward", "forward", Fault("read", SUMS, good=1), "loaded"),
    ("nvme, forward", "forward", Fault("write", STATE, errno.ENOSPC, good=3), "loaded"),
    ("cpu, forward", "forward", Fault("write", WEIGHTS, errno.ENOSPC, refused=True), "loaded"),
    ("cpu, forward", "forward", Fault("read", WEIGHTS, good=1), "loaded"),
    ("nvme, forward", "full_param", Fault("read", STATE, good=3), "loaded"),
    ("nvme, forward", "eval", Fault("write", STATE, good=4), "loaded"),
    ("nvme, forward", "join", Fault("read", SUMS, good=2), "loaded"),
    ("nvme, backward", "forward", Fault("read", WEIGHTS, good=2), "again"),
    ("nvme, backward", "amid backward", Fault("read", WEIGHTS, good=4), "loaded"),
    ("nvme, backward", "backward", Fault("read", STATE, good=30), "loaded"),
    ("nvme, backward", "backward", Fault("write", WEIGHTS, errno.ENOSPC, good=1), "loaded"),
]


def met_by_rows(mode: str, phase: str, fault: Fault, way: str, folder: str, failing: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_mode_faults, "Net", Wide)
        patch.setattr(test_mode_faults, "small_spans", larger_spans)
        met(mode, phase, fault, way, folder, failing, units=ROWS)


@pytest.mark.parametrize("world_size", [long(1), 2])
@pytest.mark.parametrize(("mode", "phase", "fault", "way"), one_in(4, 1, SCENES, lambda each: slow(*each)))
def test_an_error_on_one_rank_raises_on_all(
    run_ranks: Run, tmp_path: Path, world_size: int, mode: str, phase: str, fault: Fault, way: str
) -> None:
    run_ranks(met_by_rows, world_size, mode, phase, fault, way, str(tmp_path), world_size - 1)


def undone_by_rows(mode: str, where: str, fault: Fault, folder: str, failing: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        larger_spans(patch)
        case, options = test_atomic.MODES[mode]
        by_rows = {**options, "units": ROWS, "net": Wide}
        patch.setitem(test_atomic.MODES, mode, (replace(case, precision="fp32"), by_rows))
        test_atomic.undone(mode, where, fault, Path(folder), failing)
    zcomm.shutdown()


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    ("mode", "where", "fault"),
    [
        ("forward", "after", Fault("read", STATE, good=30)),
        ("forward", "after", Fault("read", SUMS, good=1)),
        ("forward, sums in RAM", "after", Fault("write", STATE, errno.ENOSPC, good=3)),
        ("backward", "pass", Fault("write", STATE, errno.ENOSPC, good=4)),
        ("backward, bf16", "pass", Fault("write", WEIGHTS, errno.ENOSPC, refused=True)),
    ],
)
def test_a_step_that_fails_is_undone(
    run_ranks: Run, tmp_path: Path, world_size: int, mode: str, where: str, fault: Fault
) -> None:
    run_ranks(undone_by_rows, world_size, mode, where, fault, str(tmp_path), world_size - 1)


# --- interrupts -----------------------------------------------------------------------------------------------------


class Stop(Exception):
    """Error that a signal's handler raises."""


def stop(*_: Any) -> None:
    raise Stop


def interrupted(folder: str, atomic: bool) -> str:
    """Interrupt a forward while the drive is slow to read the state of rows that it updates; run it again."""
    zcomm.init(timeout=30)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.MonkeyPatch.context() as patch:
            larger_spans(patch)
            net, opt = made(folder, replace(FORWARD, atomic=atomic), clip_norm=1.0)
            run(net, opt, 0, 2)
            for good in (2, 30):
                BadSwap.arm(Fault("read", STATE, good=good, stall_s=1.5))
                signal.setitimer(signal.ITIMER_REAL, 0.75)
                with pytest.raises(Stop):
                    loss_of(net, 2)
                    signal.pause()
            run(net, opt, 2, 4)
            found = bits_of(opt)
            opt.close()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return found


@pytest.mark.parametrize("atomic", [False, True])
def test_a_forward_that_an_interrupt_ends_can_be_run_again(tmp_path: Path, atomic: bool) -> None:
    net, opt = made(str(tmp_path), NVME, clip_norm=1.0)
    run(net, opt, 0, 4)
    wanted = bits_of(opt)
    opt.close()
    assert interrupted(str(tmp_path), atomic) == wanted
    zcomm.shutdown()


def test_a_backward_that_is_interrupted_as_it_reads_rows_poisons_or_is_undone(tmp_path: Path) -> None:
    net, opt = made(str(tmp_path), NVME)
    run(net, opt, 0, 5)
    wanted = bits_of(opt)
    opt.close()
    for atomic in (False, True):
        net, opt = made(str(tmp_path), replace(BACKWARD, atomic=atomic))
        run(net, opt, 0, 3)
        loss, begun = loss_of(net, 3), []

        def fail(grad: torch.Tensor, opt: Any = opt, begun: list[bool] = begun) -> None:
            begun.append(opt._open_parts.updates.pending)
            raise Stop

        net.late = fail
        loss = loss_of(net, 3)
        with pytest.raises(Stop):
            loss.backward()
        assert begun == [True]
        net.late = None
        if not atomic:
            with pytest.raises(RuntimeError, match="half way"):
                loss_of(net, 3)
        else:
            opt.zero_grad()
            run(net, opt, 3, 5)
            assert bits_of(opt) == wanted
        opt.close()
    zcomm.shutdown()


# --- an embedding, few rows of which a forward reads ------------------------------------------------------------------


class Words(nn.Module):
    """An embedding, of which all tokens are in one block, and Linears that are whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, WIDTH)  # four blocks, each a bucket
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.rare = nn.ModuleList((nn.Linear(WIDTH, WIDTH),))

    def forward(self, x: torch.Tensor, rarely: bool = True) -> torch.Tensor:
        x = x + self.embed(1100 + (x[:, 0].abs() * 100).long() % 800)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.rare[0](x) if rarely else x


FEW = Units(max_bytes=1024 * WIDTH * 4, rows=True)


def update_behind(folder: str) -> None:
    """Count the deferred updates after each block of a forward: one less, unless the tokens' bucket was next."""
    comm = zcomm.init(timeout=60)
    torch.manual_seed(3)
    options = {**FORWARD.arguments(), "units": FEW, "prefetch": 0, "clip_norm": 1.0}
    opt = zcomm.ZeroOptimizer(net := Words(), lr=1e-2, nvme_path=folder, **options)
    run(net, opt, 0, 1)
    parts = opt._open_parts
    embed = next(unit for unit in parts.store.units if unit.by_rows)
    mine = {bucket.index for bucket in embed.buckets}
    assert len(mine) == 4
    left = []

    def look(*_: Any) -> None:
        parts.store.gather.synchronize()
        left.append(len(mine & parts.updates._left.keys()))

    handles = [module.register_forward_hook(look) for module in (net.embed, *net.blocks)]
    loss = loss_of(net, 1)
    assert left == [3, 2, 2, 1, 0]
    for handle in handles:
        handle.remove()
    loss.backward()
    opt.step()
    opt.zero_grad()
    run(net, opt, 2, 4)
    found = bits_of(opt)
    opt.close()
    torch.manual_seed(3)
    opt = zcomm.ZeroOptimizer(net := Words(), lr=1e-2, nvme_path=folder, **{**options, **NVME.arguments()})
    run(net, opt, 0, 4)
    assert bits_of(opt) == found and comm.world_size
    opt.close()


@pytest.mark.parametrize("world_size", [1, 2])
def test_buckets_without_tokens_are_updated_behind_the_forward(run_ranks: Run, tmp_path: Path, world_size: int) -> None:
    run_ranks(update_behind, world_size, str(tmp_path))


def met_behind(fault: Fault, folder: str, failing: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_mode_faults, "Net", Words)
        patch.setattr(test_mode_faults, "small_spans", larger_spans)
        met("nvme, forward", "forward", fault, "loaded", folder, failing, units=FEW)


def undone_behind(fault: Fault, folder: str, failing: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        larger_spans(patch)
        case, options = test_atomic.MODES["forward"]
        patch.setitem(test_atomic.MODES, "forward", (case, {**options, "units": FEW, "net": Words}))
        test_atomic.undone("forward", "after", fault, Path(folder), failing)
    zcomm.shutdown()


@pytest.mark.parametrize("run_one", [met_behind, undone_behind])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("what", ["read", "write"])
def test_an_error_behind_a_forward_raises_on_all(
    run_ranks: Run, tmp_path: Path, world_size: int, what: str, run_one: Callable[..., None]
) -> None:
    run_ranks(run_one, world_size, Fault(what, LAST_OF_EMBEDDING), str(tmp_path), world_size - 1)


LAST_OF_EMBEDDING = "state.3."  # it is updated behind the fourth block; the root has no parameters


def settle_alone(folder: str) -> str:
    """Settle on only one rank: the updates behind a forward continue in the same way."""
    comm = zcomm.init(timeout=20)
    torch.manual_seed(3)
    options = {**FORWARD.arguments(), "units": FEW, "clip_norm": 1.0}
    opt = zcomm.ZeroOptimizer(net := Words(), lr=1e-2, nvme_path=folder, **options)
    for number in range(3):
        run(net, opt, number, number + 1)
        if comm.rank == number % 2:
            opt.join()
        with torch.no_grad():
            loss_of(net, 50)
            loss_of(net, 51)
    found = bits_of(opt)
    opt.close()
    return found


def test_a_rank_that_settles_alone(run_ranks: Run, tmp_path: Path) -> None:
    assert len(set(run_ranks(settle_alone, 2, str(tmp_path)))) == 1


class Branches(nn.Module):
    """An embedding, many rows of which no token reads, wide Linears, and a block without a gradient on odd ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20000, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(16, 2200, bias=False) for _ in range(4))

    def forward(self, tokens: torch.Tensor, times: int = 1) -> torch.Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            for _ in range(times if number == 1 else 1):
                y = torch.tanh(block(x))
                x = x + (y.detach() if number == 1 and zcomm.rank() % 2 else y)
        for wide in self.wide:
            x = x + wide(x)[..., :16]
        return x.square().mean()


def train_branches(folder: str, update: Any, repeats: bool) -> str:
    """Train with ranks that use units a different number of times; repeats: in forward, too."""
    comm = zcomm.init(timeout=20)
    torch.manual_seed(1)
    units = Units(max_bytes=1600 * 16 * 4, rows=True)
    offload = Offload("nvme", "nvme", gradients="nvme", update=update)
    options = {"stage": 3, "offload": offload, "nvme_path": folder, "units": units, "bucket_mb": 0.02, "prefetch": 3}
    opt = zcomm.ZeroOptimizer(net := Branches(), lr=1e-2, **options)
    for number in range(5):
        generator = torch.Generator().manual_seed(10 * number + comm.rank)
        tokens = torch.randint(0, 900, (2, 5), generator=generator)
        net(tokens, 1 + 2 * comm.rank if repeats else 1).backward()
        opt.step()
        opt.zero_grad()
    found = bits_of(opt)
    opt.close()
    return found


@pytest.mark.parametrize("repeats", [False, True])
def test_ranks_may_use_a_unit_a_different_number_of_times(run_ranks: Run, tmp_path: Path, repeats: bool) -> None:
    wanted = run_ranks(train_branches, 2, str(tmp_path), "step", repeats)
    for update in ("forward", "backward"):
        assert run_ranks(train_branches, 2, str(tmp_path), update, repeats) == wanted, update


class Again(nn.Module):
    """An embedding, many rows of which no token reads, and blocks, two of which are gathered twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12000, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for number in (0, 1, 2, 0, 1, 3, 4):
            x = torch.tanh(self.blocks[number](x))
        return x.square().mean()


def load_after_an_error(folder: str) -> None:
    """Let a write of updated weights fail on rank 0; load on all ranks, and go on."""
    comm = zcomm.init(timeout=20)
    torch.manual_seed(1)
    units = Units(max_bytes=1600 * 16 * 4, rows=True)
    options = {**FORWARD.arguments(), "units": units, "prefetch": 0, "bucket_mb": 0.02}
    opt = zcomm.ZeroOptimizer(net := Again(), lr=1e-2, nvme_path=folder, **options)

    def loss(number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * number + comm.rank)
        return net(torch.randint(0, 900, (2, 5), generator=generator))

    def run_steps(begin: int, end: int) -> None:
        for number in range(begin, end):
            loss(number).backward()
            opt.step()
            opt.zero_grad()

    run_steps(0, 3)
    opt.save(f"{folder}/saved")
    run_steps(3, 6)
    wanted = bits_of(opt)
    opt.load(f"{folder}/saved")
    run_steps(3, 4)
    swap = opt._parts.swap
    (third,) = (unit for unit in opt._parts.store.units if unit.name == "blocks.2")
    write, failed = swap.write, list[str]()

    def fail(key: str, ptr: int, nbytes: int) -> Any:
        if comm.rank == 0 and not failed and key.startswith(f"parameters.{third.buckets[0].index}."):
            failed.append(key)
            return BadWork()
        return write(key, ptr, nbytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "write", fail)
        with pytest.raises((OSError, RuntimeError), match="injected"):
            loss(4)
    assert bool(failed) == (comm.rank == 0)
    opt.load(f"{folder}/saved")
    run_steps(3, 6)
    assert bits_of(opt) == wanted
    opt.close()


class BadWork:
    """A write that has failed."""

    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        raise OSError(errno.EIO, "injected")


def test_training_goes_on_after_a_load_that_follows_an_error_of_one_rank(run_ranks: Run, tmp_path: Path) -> None:
    run_ranks(load_after_an_error, 2, str(tmp_path))
