"""``deepspeed.utils.torch``: torch's version."""

from __future__ import annotations

from zcomm.compat.deepspeed.runtime.utils import required_torch_version

__all__ = ["required_torch_version"]
