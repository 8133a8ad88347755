"""``deepspeed.module_inject.layers``: whether tensor parallelism is for training. It changes nothing: it always is."""

from __future__ import annotations

from zcomm.compat.deepspeed.modules import names_of

_training = False


def set_autotp_mode(training: bool = False) -> None:
    """Record the mode, for ``is_autotp_training_mode``."""
    global _training
    _training = training


def is_autotp_training_mode() -> bool:
    """Return the recorded mode."""
    return _training


__getattr__ = names_of(__name__)
