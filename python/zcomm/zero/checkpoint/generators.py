"""States of the random number generators of one rank: torch's on the CPU, Python's, and numpy's where it is loaded."""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import torch

from zcomm.zero.checkpoint.plain import from_json, to_json


def pack() -> bytes:
    """All states, as JSON."""
    state: dict[str, Any] = {
        "torch": base64.b64encode(bytes(torch.get_rng_state().numpy())).decode(),
        "python": to_json(random.getstate(), "random"),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return json.dumps(state).encode()


def unpack(data: bytes) -> None:
    """Set them all."""
    state = json.loads(data)
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(state["torch"])), dtype=torch.uint8))
    random.setstate(from_json(state["python"]))
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
