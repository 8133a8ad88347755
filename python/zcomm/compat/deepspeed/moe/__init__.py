"""``deepspeed.moe`` can be imported, as scripts do at their head; what it has raises NotImplementedError when used."""

from __future__ import annotations

from typing import Any, NoReturn


def refuse(name: str) -> Any:
    """Return a class that raises NotImplementedError when constructed, or called: there is no mixture of experts."""

    def init(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"deepspeed.moe: {name} is not available: zcomm has no mixture of experts; train without it (no --moe)"
        )

    return type(name, (), {"__init__": init})
