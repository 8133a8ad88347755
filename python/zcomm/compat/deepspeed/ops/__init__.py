"""``deepspeed.ops``: its optimizers, as those of ``zcomm.optim``."""

from __future__ import annotations

from typing import Any


def refuse(name: str, **asked: Any) -> None:
    """Refuse options with another value than the one that they must have.

    asked: option: (value, the value it must have). Raises: NotImplementedError naming one that is another.
    """
    for option, (value, needed) in asked.items():
        if value != needed:
            raise NotImplementedError(f"{name}({option}={value!r}) is not available; leave it {needed!r}")
