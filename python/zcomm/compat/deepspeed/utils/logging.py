"""``deepspeed.utils.logging``: zcomm's logger under DeepSpeed's names."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "get_current_level",
    "get_log_level_from_string",
    "log_dist",
    "log_dist_once",
    "log_levels",
    "logger",
    "print_dist",
    "print_json_dist",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
]

logger = logging.getLogger("zcomm")
log_levels = {name.lower(): getattr(logging, name) for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")}


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Log a warning once for these arguments."""
    logger.warning(*args, **kwargs)


def _message(message: str, ranks: Sequence[int] | None) -> str | None:
    """Return the message with its rank if this rank is among ``ranks`` (None, or -1 among them: all)."""
    from zcomm.comm import job

    rank = job.current().rank if job.is_initialized() else 0
    return f"[Rank {rank}] {message}" if ranks is None or -1 in ranks or rank in ranks else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on ``ranks`` (None, or -1 among them: on all)."""
    text = _message(message, ranks)
    if text is not None:
        logger.log(level, "%s", text)


@functools.cache
def _once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log as ``log_dist``, each message once."""
    _once(message, None if ranks is None else tuple(ranks), level)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on ``ranks`` (None, or -1 among them: on all), at any level."""
    text = _message(message, ranks)
    if text is not None:
        print(text)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: str | Path = "") -> None:
    """Write ``message`` and the rank to the file ``path``, on ``ranks``."""
    from zcomm.comm import job

    if _message("", ranks) is not None:
        message["rank"] = job.current().rank if job.is_initialized() else 0
        Path(path).write_text(json.dumps(message))


def get_log_level_from_string(log_level_str: str) -> int:
    """Return the level that a word names. Raises: ValueError."""
    level = log_levels.get(log_level_str.lower())
    if level is None:
        raise ValueError(f"{log_level_str!r} is not a level; expected one of {', '.join(log_levels)}")
    return int(level)


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of a logger (zcomm's) and of its handlers. Raises: ValueError."""
    chosen = custom_logger or logger
    level = get_log_level_from_string(log_level_str)
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """Return the logger's level."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return True if the logger's level is at most this one. Raises: ValueError."""
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


# DeepSpeed's logger has these two as methods.
vars(logger)["warning_once"] = warning_once
vars(logger)["log_dist_once"] = log_dist_once
