"""Parameters of zero.Init before ZeroOptimizer: rank 0's values, copies, and errors where there is no value."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.zero import GatheredParameters
from zcomm.zero.agree import from_root

Run = Callable[..., list[Any]]

ERRORS: list[tuple[Exception, type[Exception], str]] = [
    (ValueError("the value"), ValueError, "reading it failed on rank 1: the value"),
    (OSError(errno.ENOSPC, "the drive"), OSError, r"\[Errno 28\] reading it failed on rank 1: \[Errno 28\] the drive"),
    (RuntimeError("the cause"), OSError, r"\[Errno 5\] reading it failed on rank 1: RuntimeError: the cause"),
]


def fail_at_root() -> None:
    comm = zcomm.init(timeout=60)
    assert from_root(comm, 1, "reading it", lambda: comm.rank) == (1 if comm.rank == 1 else None)
    for error, kind, text in ERRORS:
        with pytest.raises(type(error) if comm.rank == 1 else kind, match=None if comm.rank == 1 else text):
            from_root(comm, 1, "reading it", partial(_raise, error))
    model = nn.Sequential(nn.Linear(8, 8))
    opt = zcomm.ZeroOptimizer(model, "sgd", lr=0.1, stage=3, share_parameters=False)
    for rank in range(2):
        wrong = pytest.raises(ValueError, match=r"0\.weight has shape \(2, 8\) now, not \(8, 8\)")
        with wrong if rank == 1 else contextlib.nullcontext(), GatheredParameters(model, modifier_rank=1):
            if comm.rank == rank:
                model[0].weight.data = torch.zeros(2, 8)
    opt.close()


def _raise(error: Exception) -> None:
    raise error


def test_errors_of_one_rank_reach_the_others_with_their_text(run_ranks: Run) -> None:
    run_ranks(fail_at_root, 2)
