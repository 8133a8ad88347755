"""``deepspeed.ops``: its optimizers, as those of ``zcomm.optim``."""

from __future__ import annotations

from typing import Any

from zcomm.compat.deepspeed.lazy import names_of


def refuse(name: str, **asked: Any) -> None:
    """Refuse options with another value than the one that they must have.

    asked: option: (value, the value it must have). Raises: NotImplementedError naming one that is another.
    """
    for option, (value, needed) in asked.items():
        if value != needed:
            raise NotImplementedError(f"{name}({option}={value!r}) is not available; leave it {needed!r}")


_names = names_of(__name__)


def __getattr__(name: str) -> Any:
    if name in ("__compatible_ops__", "__installed_ops__"):
        from zcomm.compat.deepspeed import git_version_info

        return getattr(git_version_info, name.strip("_"))
    return _names(name)
