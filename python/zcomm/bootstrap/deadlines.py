"""Deadlines: how long joining and operations wait for other ranks, and when late ranks are logged.

A time set by the program or by ``DEEPSPEED_TIMEOUT`` is exact. The default is ``DEFAULT_S``. While the late ranks are
alive, an operation waits for up to ``LIMIT_S`` (src/coll/late_clock.hpp).
Thread rule: values, and pure functions of them and of the environment.
"""

from __future__ import annotations

import datetime
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

DEFAULT_S = 600.0
LIMIT_S = 1800.0  # torch's own default for groups of the CPU
WARN_S = 60.0
MOST_S = 1e9  # limit of the clocks of the core and of Python
_VARIABLE = "DEEPSPEED_TIMEOUT"


class CoreArguments(TypedDict):
    """Arguments of the core's communicators."""

    timeout_s: float
    limit_s: float
    warn_s: float


@dataclass(frozen=True)
class Deadlines:
    """Times of one communicator."""

    timeout_s: float  # of joining; of an operation, while no late rank shows life
    limit_s: float  # of an operation, at most
    warn_s: float

    @staticmethod
    def exactly(timeout_s: float) -> Deadlines:
        return Deadlines(timeout_s, timeout_s, WARN_S)

    @staticmethod
    def of(timeout: Any, env: Mapping[str, str] = os.environ) -> Deadlines:
        """Return the deadlines for ``timeout``, seconds or a timedelta; None: the environment's or the default.

        Raises: ValueError naming the argument or the variable.
        """
        if timeout is not None:
            return Deadlines.exactly(_seconds(timeout))
        if _VARIABLE in env:
            return Deadlines.exactly(_from_environment(env[_VARIABLE]))
        return Deadlines(DEFAULT_S, LIMIT_S, WARN_S)

    def as_arguments(self) -> CoreArguments:
        """Return the deadlines as arguments for the core."""
        return {"timeout_s": self.timeout_s, "limit_s": self.limit_s, "warn_s": self.warn_s}


def _seconds(timeout: Any) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real) or not 0 < float(seconds) <= MOST_S:
        raise ValueError(f"init: timeout={timeout!r}: expected seconds, more than 0 and at most {MOST_S:g}")
    return float(seconds)


def _from_environment(text: str) -> float:
    try:
        seconds = float(text) * 60.0
    except ValueError:
        seconds = -1.0
    if not 0 < seconds <= MOST_S:
        raise ValueError(f"environment variable {_VARIABLE}={text!r}: expected minutes, a number more than 0")
    return seconds
