"""Call sites in messages: the program's line, not a decorator's, torch's or zcomm's."""

from __future__ import annotations

import functools
import inspect
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typing_extensions
from torch.nn.parallel import DistributedDataParallel

import zcomm
from torch_world import world

HERE = "test_call_sites.py"
_LAST = torch.ones(5)


def _line() -> int:
    """Return the caller's line."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


@typing_extensions.deprecated("an old name")
def _deprecated(call: Callable[[], Any]) -> Any:
    return call()


def _mismatch(rank: int, call: Callable[[], Any]) -> str:
    """Make different calls on the two ranks; return the error's message."""
    try:
        dist.all_reduce(_LAST.clone()) if rank == 1 else call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def plain(rank: int) -> tuple[str, int]:
    return _mismatch(rank, lambda: dist.all_reduce(torch.ones(3))), _line()


def deprecated_by_torch(rank: int) -> tuple[str, int]:
    """torch wraps this call in typing_extensions' decorator."""
    return _mismatch(rank, lambda: dist._reduce_scatter_base(torch.ones(3), torch.ones(6))), _line()


def through_a_library(rank: int) -> tuple[str, int]:
    """Put a decorator of typing_extensions around the call: the message has the innermost program frame's line."""
    return _mismatch(rank, functools.partial(_deprecated, lambda: dist.barrier())), _line()


def of_an_executor(rank: int) -> tuple[str, int]:
    def body() -> None:
        dist.all_reduce(torch.ones(3))

    with ThreadPoolExecutor(1) as pool:
        return _mismatch(rank, lambda: pool.submit(body).result()), body.__code__.co_firstlineno + 1


def under_many_frames_of_torch(rank: int) -> tuple[str, int]:
    """Call from a module 20 deep in torch's modules: more frames of torch than the message has room for."""

    class Reduces(torch.nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            dist.barrier()
            return inputs

    net: torch.nn.Module = Reduces()
    for _ in range(20):
        net = torch.nn.Sequential(net)
    return _mismatch(rank, lambda: net(torch.ones(1))), Reduces.forward.__code__.co_firstlineno + 1


def after_a_callback(rank: int) -> tuple[str, int]:
    """Call before a callback has returned, so that another thread starts the call: the message has the call's line."""
    told = dist.all_reduce(torch.ones(1), async_op=True).get_future().then(lambda own: time.sleep(0.2))

    def call() -> None:
        work = dist.all_reduce(torch.ones(3), async_op=True)
        told.wait()
        work.wait()

    return _mismatch(rank, call), call.__code__.co_firstlineno + 1


def in_a_callback(rank: int) -> tuple[str, int]:
    def callback(own: Any) -> None:
        dist.all_reduce(torch.ones(3))

    future = dist.all_reduce(torch.ones(1), async_op=True).get_future()
    line = callback.__code__.co_firstlineno + 1
    return _mismatch(rank, lambda: future.then(callback if rank == 0 else lambda own: None).wait()), line


def _job(check: Callable[[int], tuple[str, int]]) -> tuple[str, int]:
    warnings.simplefilter("ignore")
    with world(timeout_s=30.0) as (rank, _size):
        return check(rank)


@pytest.mark.parametrize(
    "check",
    [
        plain,
        deprecated_by_torch,
        through_a_library,
        of_an_executor,
        under_many_frames_of_torch,
        after_a_callback,
        in_a_callback,
    ],
    ids=lambda check: check.__name__,
)
def test_the_line_of_the_program(run_ranks: Callable[..., list[Any]], check: Callable[[int], tuple[str, int]]) -> None:
    text, line = run_ranks(_job, 2, check)[0]
    text = text.split("\nAt:")[0]  # torch's stack of a callback
    assert f"at {HERE}:{line}" in text.split("rank 1")[0], (line, text)
    assert "typing_extensions" not in text and "distributed_c10d" not in text, text


def _hook() -> str:
    """Reduce in a hook of torch, run by autograd under DDP: the program's only frame on the stack is backward()."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    with world(timeout_s=30.0) as (rank, _size):
        net = DistributedDataParallel(torch.nn.Linear(3, 3))
        net.register_comm_hook(None, default_hooks.allreduce_hook)
        loss = net(torch.ones(1, 3)).sum()
        return _mismatch(rank, lambda: loss.backward())


def test_a_hook_of_torchs(run_ranks: Callable[..., list[Any]]) -> None:
    text = run_ranks(_hook, 2)[0]
    assert f" at {HERE}:" in text and "distributed_c10d" not in text, text


def _own_api() -> str:
    zcomm.init(timeout=20)
    try:
        if zcomm.rank() == 0:
            _deprecated(lambda: zcomm.all_reduce(torch.ones(3)))
        else:
            zcomm.barrier()
    except zcomm.CollectiveMismatch as error:
        return str(error)
    return ""


def test_zcomms_own_calls(run_ranks: Callable[..., list[Any]]) -> None:
    lines, first = inspect.getsourcelines(_own_api)
    place = first + next(i for i, text in enumerate(lines) if "_deprecated(" in text)
    assert f"at {HERE}:{place}" in run_ranks(_own_api, 2)[0]
