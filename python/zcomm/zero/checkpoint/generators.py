"""States of the random number generators of one rank: torch's on the CPU and on the model's CUDA device, Python's, and
numpy's where it is loaded."""

from __future__ import annotations

import base64
import json
import random
import sys
from typing import Any

import torch

from zcomm.zero.checkpoint.plain import from_json, to_json


def pack(device: torch.device) -> bytes:
    """All states, as JSON. device: where the model is."""
    state: dict[str, Any] = {
        "torch": _text(torch.get_rng_state()),
        "python": to_json(random.getstate(), "random"),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), *rest]
    return json.dumps(state).encode()


def unpack(data: bytes, device: torch.device) -> None:
    """Set them all; that of CUDA where it was saved and the model is on such a device again."""
    state = json.loads(data)
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)
    random.setstate(from_json(state["python"]))
    if "numpy" in state:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
