"""States of the random number generators of one rank.

They are torch's on the CPU and on the model's CUDA device, Python's, and numpy's if it is imported.
"""

from __future__ import annotations

import base64
import json
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from zcomm.zero.checkpoint.json_values import from_json, to_json


def pack(device: torch.device) -> bytes:
    """Return all states as JSON. device: the model's."""
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


def parse(data: bytes, device: torch.device, source: str) -> Callable[[], None]:
    """Return the function that sets all generators to these states.

    CUDA's state is set if it was saved and the model is on a CUDA device again. Each state except CUDA's is first set
    on a temporary generator, so that an invalid state raises before any change.

    Raises: ValueError naming the file ``source`` and the state that is not valid.
    """
    sets: list[Callable[[], None]] = []
    name = "JSON"
    try:
        state = json.loads(data)
        for name, of in _READ.items():
            if name in state or name in ("torch", "python"):
                sets.append(of(state[name], device))
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{source}: {name!r} is not a state of random number generators: {error!r}") from error

    def apply() -> None:
        for each in sets:
            each()

    return apply


def _of_torch(text: str, device: torch.device) -> Callable[[], None]:
    state = _tensor(text)
    torch.Generator().set_state(state)
    return lambda: torch.set_rng_state(state)


def _of_cuda(text: str, device: torch.device) -> Callable[[], None]:
    state = _tensor(text)
    return (lambda: torch.cuda.set_rng_state(state, device)) if device.type == "cuda" else lambda: None


def _of_python(value: Any, device: torch.device) -> Callable[[], None]:
    state = from_json(value)
    random.Random().setstate(state)
    return lambda: random.setstate(state)


def _of_numpy(value: Any, device: torch.device) -> Callable[[], None]:
    import numpy

    kind, keys, *rest = value
    state = (kind, numpy.array(keys, dtype=numpy.uint32), *rest)
    numpy.random.RandomState().set_state(state)
    return lambda: numpy.random.set_state(state)


_READ: dict[str, Callable[[Any, torch.device], Callable[[], None]]] = {
    "torch": _of_torch,
    "cuda": _of_cuda,
    "python": _of_python,
    "numpy": _of_numpy,
}


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text, validate=True)), dtype=torch.uint8)
