"""Futures of "zcomm" and their callbacks: none delays another, and collectives keep one order on all ranks."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from torch_world import world


def _in_flight(rank: int, tensor: torch.Tensor, group: Any = None) -> Any:
    """Start an all_reduce that ends 0.2 s after its call on all ranks except the last."""
    if rank == dist.get_world_size() - 1:
        time.sleep(0.2)
    return dist.all_reduce(tensor, async_op=True, group=group)


# ---- callbacks that wait ----
def waits_for_an_earlier_one(rank: int, size: int) -> None:
    """Wait in a callback for the Future of the next all_reduce, issued before the callback was registered."""
    first, second = torch.ones(3), torch.ones(3)
    futures = [work.get_future() for work in (_in_flight(rank, first), dist.all_reduce(second, async_op=True))]
    told = futures[0].then(lambda own: float(own.value()[0][0] + futures[1].wait()[0][0]))
    assert told.wait() == 2 * size


def waits_for_all(rank: int, size: int) -> None:
    """Wait by torch.futures.wait_all, which waits in C++."""
    futures = [_in_flight(rank, torch.ones(3)).get_future()]
    futures += [dist.all_reduce(torch.ones(3), async_op=True).get_future() for _ in range(3)]
    told = futures[0].then(lambda own: [float(value[0][0]) for value in torch.futures.wait_all(futures[1:])])
    assert told.wait() == [size] * 3
    gathered = torch.futures.collect_all([_in_flight(rank, torch.ones(1)).get_future()])
    later = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    assert gathered.then(lambda own: float(later.wait()[0])).wait() == size


def issues_and_waits(rank: int, size: int) -> None:
    """Call a collective in a callback: by Future, by Work and blocking; then chains, and callbacks in callbacks."""

    def by_future(own: Any) -> torch.Tensor:
        return dist.all_reduce(own.value()[0].clone(), async_op=True).get_future().wait()[0]

    def by_work(own: Any) -> torch.Tensor:
        tensor = own.value().clone()
        dist.all_reduce(tensor, async_op=True).wait()
        return tensor

    def blocking(own: Any) -> torch.Tensor:
        tensor = own.value().clone()
        dist.all_reduce(tensor)
        return tensor

    def nested(own: Any) -> torch.Tensor:
        future = dist.all_reduce(own.value().clone(), async_op=True).get_future()
        return future.then(lambda inner: blocking(inner.then(lambda last: last.value()[0]))).wait()

    future = _in_flight(rank, torch.ones(2)).get_future()
    assert future.then(by_future).then(by_work).then(blocking).then(nested).wait().tolist() == [size**6] * 2


def order_is_the_programs(rank: int, size: int) -> None:
    """Order calls of callbacks and later calls of the program equally on all ranks, however late one is."""
    for late in range(size):
        log: list[torch.Tensor] = []

        def again(own: Any, log: list[torch.Tensor] = log) -> None:
            tensor = own.value()[0] * 10
            dist.all_reduce(tensor)
            log.append(tensor)

        chains = []
        programs = [torch.full((2,), float(k + 1)) for k in range(6)]
        for k, tensor in enumerate(programs):
            if rank == late and k % 2:
                time.sleep(0.02)
            chains.append(dist.all_reduce(tensor, async_op=True).get_future().then(again).then(lambda own: own.value()))
        last = torch.ones(2)
        dist.all_reduce(last)  # blocking, so after all of them
        assert last.tolist() == [size] * 2
        for chain in chains:
            chain.wait()
        assert [t[0].item() for t in programs] == [size * (k + 1) for k in range(6)]
        assert [t[0].item() for t in log] == [10 * size * size * (k + 1) for k in range(6)]


def waits_for_a_later_one(rank: int, size: int) -> None:
    """Pass a callback the Future of a collective that the program called after registering it."""
    handed, is_there = [], threading.Event()

    def callback(own: Any) -> float:
        assert is_there.wait(30)
        return float(handed[0].get_future().wait()[0])

    told = _in_flight(rank, torch.ones(1)).get_future().then(callback)
    handed.append(dist.all_reduce(torch.ones(1), async_op=True))
    is_there.set()
    assert told.wait() == size


def waits_for_a_chained_one(rank: int, size: int) -> None:
    """Wait for ``then`` of a later collective's Future, and for all of several: later callbacks complete these."""
    for ask in ("chained", "longer chain", "collect_all", "wait_all"):
        handed: list[Any] = []
        is_there, order = threading.Event(), []

        def callback(own: Any, ask: str = ask, handed: list[Any] = handed, is_there: Any = is_there) -> list[float]:
            assert is_there.wait(30)
            if ask == "collect_all":
                return [float(future.value()) for future in torch.futures.collect_all(handed).wait()]
            if ask == "wait_all":
                return [float(value) for value in torch.futures.wait_all(handed)]
            return [float(handed[-1].wait())]

        def note(own: Any, order: list[int] = order, number: int = 0) -> float:
            order.append(number)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            return float(own.value()[0][0]) + float(tensor)

        told = _in_flight(rank, torch.ones(1)).get_future().then(callback)
        for number in range(3):
            future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
            future = future.then(lambda own, n=number, note=note: note(own, number=n))
            handed.append(future.then(lambda own: own.value() + 1) if ask == "longer chain" else future)
        is_there.set()
        wanted = 2.0 * size + (ask == "longer chain")
        assert told.wait() == [wanted] * (3 if ask.endswith("all") else 1)
        for future in handed:
            future.wait()
        assert order == [0, 1, 2]


def raises(rank: int, size: int) -> None:
    def broken(own: Any) -> None:
        raise ValueError("no good")

    bad = _in_flight(rank, torch.ones(1)).get_future().then(broken)
    good = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda own: float(own.value()[0]))
    with pytest.raises(RuntimeError, match="no good"):
        bad.wait()
    with pytest.raises(RuntimeError, match="no good"):
        bad.then(lambda own: own.value()).wait()
    assert good.wait() == size
    seen: list[float] = []
    done = threading.Event()
    future = _in_flight(rank, torch.ones(1)).get_future()
    future.add_done_callback(broken)
    future.add_done_callback(lambda own: (seen.append(float(own.value()[0])), done.set()))
    dist.barrier()
    assert done.wait(30) and seen == [size]


def messages(rank: int, size: int) -> None:
    """Callbacks of messages: one that waits for another message's Future, whichever comes first."""
    peer = (rank + 1) % size, (rank - 1) % size
    incoming = [torch.zeros(2) for _ in range(3)]
    futures = [dist.irecv(t, peer[1], tag=k).get_future() for k, t in enumerate(incoming)]
    told = futures[2].then(lambda own: [float(f.wait()[0][0]) for f in futures[:2]])
    last = futures[1].then(lambda own: float(own.value()[0][0]))
    for tag in (2, 1, 0):
        dist.send(torch.full((2,), float(tag)), peer[0], tag=tag)
        time.sleep(0.02)
    assert told.wait() == [0.0, 1.0] and last.wait() == 1.0


def subgroup(rank: int, size: int) -> None:
    """Call a collective of another group in a callback of one group's Future."""
    other = dist.new_group()

    def call_other(own: Any) -> float:
        tensor = own.value()[0].clone()
        dist.all_reduce(tensor, group=other)
        return float(tensor)

    assert _in_flight(rank, torch.ones(())).get_future().then(call_other).wait() == size * size
    dist.destroy_process_group(other)


WAITING = (
    waits_for_an_earlier_one,
    waits_for_all,
    issues_and_waits,
    order_is_the_programs,
    waits_for_a_later_one,
    waits_for_a_chained_one,
    raises,
    messages,
    subgroup,
)


def _job(check: Callable[[int, int], None]) -> None:
    with world(timeout_s=40.0) as (rank, size):
        check(rank, size)
        check(rank, size)
        last = torch.ones(1)
        dist.all_reduce(last)
        assert last.item() == size


@pytest.mark.parametrize("check", WAITING, ids=lambda check: check.__name__)
def test_callbacks(run_ranks: Callable[..., list[Any]], check: Callable[[int, int], None]) -> None:
    run_ranks(_job, 2, check)


# ---- DDP with torch's own hooks ----
def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 4))


def _losses(rank: int, bucket_mb: float, hook: str) -> list[float]:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    net = DistributedDataParallel(_model(), bucket_cap_mb=bucket_mb)
    if hook == "fp16":
        net.register_comm_hook(None, default_hooks.fp16_compress_hook)
    else:
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5, random_seed=1
        )
        net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for step in range(6):
        inputs, wanted = torch.randn(16, 40, generator=generator), torch.randn(16, 4, generator=generator)
        optimizer.zero_grad()
        loss = (net(inputs) - wanted).square().mean()
        if step % 3 == rank:
            time.sleep(0.02)  # ranks reach their buckets at different times
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _hooks(backend: str, hooks: list[tuple[str, float]]) -> list[list[float]]:
    if backend == "zcomm":
        with world(timeout_s=40.0) as (rank, _):
            return [_losses(rank, bucket_mb, hook) for hook, bucket_mb in hooks]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, os.environ["ZCOMM_INIT_METHOD"] + "-torch", rank=rank, world_size=size)
    losses = [_losses(rank, bucket_mb, hook) for hook, bucket_mb in hooks]
    dist.destroy_process_group()
    return losses


def test_torchs_hooks_train_as_over_gloo(run_ranks: Callable[..., list[Any]]) -> None:
    """PowerSGD calls collectives in callbacks. Gloo orders them randomly with several buckets, so it has one."""
    whole = [("powerSGD", 25.0), ("fp16", 25.0)]
    wanted = run_ranks(_hooks, 2, "gloo", whole)
    for got, want in zip(run_ranks(_hooks, 2, "zcomm", whole), wanted, strict=True):
        for one, other in zip(got, want, strict=True):
            assert one == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("hook", ["powerSGD", "fp16"])
def test_hooks_with_many_buckets(run_ranks: Callable[..., list[Any]], hook: str) -> None:
    """Callbacks of one bucket run concurrently with collectives of the next, in the same order on every rank."""
    runs = run_ranks(_hooks, 3, "zcomm", [(hook, 0.001)] * 2)
    for losses in runs:
        assert losses[0] == losses[1]


# ---- life ----
def _destroyed_amid() -> list[str]:
    """End the group while a callback waits, another has not begun, and a collective waits for both."""
    texts = []
    began = threading.Event()
    with world(timeout_s=40.0) as (rank, _size):
        store = dist.distributed_c10d._get_default_store()
        lonely = dist.all_reduce(torch.ones(1), async_op=True) if rank == 0 else None
        if lonely is not None:
            work = lonely

            def callback(own: Any) -> None:
                own.value()

            waiting = [work.get_future().then(callback), work.get_future().then(lambda own: began.set())]
            behind = dist.all_reduce(torch.ones(2), async_op=True)
            assert not began.wait(0.2)
            store.set("seen", "yes")
        else:
            store.wait(["seen"])
    if lonely is not None:
        for end in (waiting[0].wait, behind.wait, behind.get_future().wait):
            with pytest.raises((RuntimeError, ConnectionError)) as caught:
                end()
            texts.append(str(caught.value))
        assert began.wait(10)
    return texts


def test_destroyed_with_callbacks_in_flight(run_ranks: Callable[..., list[Any]]) -> None:
    texts = run_ranks(_destroyed_amid, 2)[0]
    assert len(texts) == 3 and all("closed" in text or "left" in text for text in texts), texts


def _forked() -> None:
    """Fork while callbacks are waiting: the child gets an error, and ends."""
    with world(timeout_s=40.0) as (rank, size):
        gate = threading.Event()
        tensor = torch.ones(1)
        told = _in_flight(rank, tensor).get_future().then(lambda own: gate.wait(30))
        behind = dist.all_reduce(torch.ones(1), async_op=True)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                for call in (lambda: dist.all_reduce(torch.ones(1)), behind.wait):
                    with pytest.raises(RuntimeError, match="forked"):
                        call()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        gate.set()
        assert status == 0 and told.wait() is True
        behind.wait()
        assert tensor.item() == size


def test_a_forked_child_is_refused(run_ranks: Callable[..., list[Any]]) -> None:
    run_ranks(_forked, 2)


def _stuck() -> str:
    """Wait in a callback for an event that follows a blocking call: the deadline ends the call with its name."""
    with world(timeout_s=1.0) as (rank, _size):
        free = threading.Event()
        dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda own: free.wait(30))
        text = ""
        if rank == 0:
            with pytest.raises(TimeoutError) as caught:
                dist.barrier()
            text = str(caught.value)
        free.set()
        return text


def test_a_callback_that_never_returns_is_named(run_ranks: Callable[..., list[Any]]) -> None:
    text = run_ranks(_stuck, 2)[0]
    assert "barrier" in text and "callback" in text and "1 s" in text, text


def _waits_for_itself() -> str:
    """Wait in a callback for its own Future: the deadline raises in a thread that waits for it."""
    with world(timeout_s=1.0):
        handed: list[Any] = []
        is_there = threading.Event()

        def callback(own: Any) -> Any:
            is_there.wait(30)
            return handed[0].wait()

        handed.append(dist.all_reduce(torch.ones(1), async_op=True).get_future().then(callback))
        is_there.set()
        with pytest.raises((TimeoutError, RuntimeError)) as caught:
            handed[0].wait()
        return str(caught.value)


def test_a_callback_that_waits_for_itself_is_named(run_ranks: Callable[..., list[Any]]) -> None:
    for text in run_ranks(_waits_for_itself, 2):
        assert "Future" in text and "1 s" in text, text


# ---- signals ----
def _interrupted(folder: str) -> float:
    """Rank 0 waits for a Future of a collective that cannot end; the signal's handler raises."""

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    with world(timeout_s=60.0) as (rank, _size):
        if rank == 0:
            signal.signal(signal.SIGTERM, handler)
            told = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda own: own.value())
            sent = time.monotonic() + 0.5
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
            with pytest.raises(KeyboardInterrupt):
                told.wait()
            took_s = time.monotonic() - sent
            Path(folder, "interrupted").touch()
            assert float(told.wait()[0]) == 2.0, "it may be waited for again"
        else:
            while not Path(folder, "interrupted").exists():
                time.sleep(0.01)
            took_s = 0.0
            dist.all_reduce(torch.ones(1))
    return took_s


def test_a_handler_runs_while_a_future_is_waited_for(run_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    assert max(run_ranks(_interrupted, 2, str(tmp_path))) < 20


# ---- random programs ----
def _program(seed: int, rank: int, size: int) -> None:
    """Run one program on all ranks, each at its own pace: every tensor ends with the value that the order gives it."""
    choose, delay = random.Random(seed), random.Random(1000 * seed + rank)
    checks: list[tuple[torch.Tensor, float]] = []
    ends: list[Callable[[], Any]] = []

    def pause() -> None:
        if delay.random() < 0.2:
            time.sleep(delay.random() * 0.003)

    def begin() -> tuple[Any, torch.Tensor, float]:
        value = float(choose.randint(1, 9))
        count = choose.choice([1, 300, 40_000])
        tensor = torch.full((count, 2), value)
        tensor = tensor.t() if choose.random() < 0.4 else tensor
        pause()
        return dist.all_reduce(tensor, async_op=True), tensor, value * size

    def calling(kind: str, told: list[float]) -> Callable[[Any], None]:
        def callback(own: Any) -> None:
            tensor = torch.full((3,), 2.0)
            pause()
            if kind == "blocking":
                dist.all_reduce(tensor)
            elif kind == "work":
                dist.all_reduce(tensor, async_op=True).wait()
            elif kind == "future":
                dist.all_reduce(tensor, async_op=True).get_future().wait()
            elif kind == "dropped":
                dist.all_reduce(tensor.expand(1, 3).t().contiguous(), async_op=True)
                tensor.fill_(2.0 * size)
            told.append(float(tensor[0]))

        return callback

    for _ in range(choose.randint(10, 30)):
        act = choose.random()
        work, tensor, wanted = begin()
        checks.append((tensor, wanted))
        if act < 0.2:
            continue  # dropped
        if act < 0.35:
            work.wait()
            assert bool((tensor == wanted).all())
        elif act < 0.5:
            future = work.get_future()
            ends.append(future.wait)
        elif act < 0.9:
            told: list[float] = []
            chain = work.get_future()
            kinds = [choose.choice(["blocking", "work", "future", "dropped", "nothing"]) for _ in range(3)]
            for kind in kinds[: choose.randint(1, 3)]:
                pause()
                chain = chain.then(calling(kind, told))
            ends.append(chain.wait)
        else:
            last = torch.ones(2)
            dist.all_reduce(last)
            assert last.tolist() == [size] * 2
        if choose.random() < 0.2 and ends:
            ends.pop(choose.randrange(len(ends)))()
    for end in ends:
        end()
    dist.barrier()
    for tensor, wanted in checks:
        assert bool((tensor == wanted).all()), (seed, tensor.shape, tensor[0, 0].item(), wanted)


def _programs(first: int, count: int) -> None:
    with world(timeout_s=30.0) as (rank, size):
        for seed in range(first, first + count):
            _program(seed, rank, size)
        before = len(os.listdir("/proc/self/fd"))
        _program(first, rank, size)
        assert len(os.listdir("/proc/self/fd")) <= before and threading.active_count() < 12


@pytest.mark.parametrize("world_size", [2, 3])
def test_programs_by_chance(run_ranks: Callable[..., list[Any]], world_size: int) -> None:
    run_ranks(_programs, world_size, 100 * world_size, int(os.environ.get("ZCOMM_TEST_PROGRAMS", "12")))
