"""DeepSpeed's files, read without running code of a file's choice: torch.load(weights_only=True) with an allowlist.

The four DeepSpeed classes in these files are replaced by empty classes. Tensors are mapped, not read.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _stand_in(module: str, name: str, base: type = object) -> type:
    """Return an empty class under DeepSpeed's name, which the unpickler instantiates before it sets attributes."""
    return type(name, (base,), {"__module__": module})


_ALLOWED: list[Any] = [
    _stand_in("deepspeed.runtime.zero.config", "ZeroStageEnum", int),
    _stand_in("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    _stand_in("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    _stand_in("deepspeed.utils.tensor_fragment", "fragment_address"),
]


def load(path: Path) -> Any:
    """Return the content of a file. Raises: FileNotFoundError; ValueError naming the file and the reason."""
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, EOFError, ValueError) as error:
        raise ValueError(f"{path}: it is damaged, or not a file of torch.save: {str(error).splitlines()[0]}") from None
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        what = f"names {found[1]}, which is not in the allowlist" if found else str(error).splitlines()[0]
        raise ValueError(f"{path}: not read, as it is a pickle that {what}") from None


def load_kind(folder: Path, kind: str) -> list[Any]:
    """Return the contents of all ``*_KIND_states.pt`` in a folder, by the numbers in their names. Raises: as ``load``;
    ValueError if there are none."""
    by_number: Callable[[Path], Any] = lambda path: [int(n) for n in re.findall(r"\d+", path.name)]  # noqa: E731
    files = sorted(folder.glob(f"*_{kind}_states.pt"), key=by_number)
    if not files:
        raise ValueError(
            f"{folder}: no ZeRO checkpoint of DeepSpeed (*_model_states.pt, and *_optim_states.pt or the folder zero "
            "of a universal checkpoint)"
        )
    return [_dict(path) for path in files]


def _dict(path: Path) -> dict[Any, Any]:
    found = load(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: {type(found).__name__} is there, expected a dict")
    return found
