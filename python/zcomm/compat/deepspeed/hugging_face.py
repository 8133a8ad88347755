"""Hugging Face Accelerate on ranks without a GPU: sets its backend, and checks its ranks.

Without a GPU Accelerate knows no backend. It would take each rank for the only process, and all ranks would train on
all data. This module imports nothing of Accelerate.
"""

from __future__ import annotations

import sys
from typing import Any


def _shared(kind: str) -> dict[str, Any]:
    """Return the state that Accelerate's objects of ``kind`` share, or an empty dict if there is none."""
    state = sys.modules.get("accelerate.state")
    shared = getattr(getattr(state, kind, None), "_shared_state", None)
    return shared if isinstance(shared, dict) else {}


def name_backend() -> None:
    """Fill in the backend of a PartialState that is under construction, and has found none.

    Its constructor then calls deepspeed.comm.is_initialized(). A backend that the program names is not changed.
    """
    shared = _shared("PartialState")
    if "num_processes" not in shared and shared.get("backend", "") is None:
        shared["backend"] = "zcomm"


def check_ranks(world_size: int) -> None:
    """Check that Accelerate, if it drives this engine, has all ranks. Raises: RuntimeError."""
    drives = str(_shared("AcceleratorState").get("distributed_type", "")).endswith("DEEPSPEED")
    known = _shared("PartialState").get("num_processes", world_size)
    if drives and known != world_size:
        raise RuntimeError(
            f"Accelerate has {known} process(es), the job {world_size} ranks, so each would get the data of others: "
            "its PartialState was made before deepspeed was asked for. Make Accelerator(deepspeed_plugin=) or "
            "TrainingArguments(deepspeed=) first, or start the program by `accelerate launch --use_deepspeed`"
        )
