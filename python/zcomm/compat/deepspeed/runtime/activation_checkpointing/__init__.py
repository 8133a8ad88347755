"""``deepspeed.runtime.activation_checkpointing``: the module ``checkpointing``."""

from __future__ import annotations
