"""load_folder: a model of transformers from a folder, with no weight in memory before its use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from zcomm.zero import Init


def library_for(path: Path) -> Any:
    """Return transformers, which reads a folder of ``save_pretrained``.

    Raises: FileNotFoundError for a folder without a model; ModuleNotFoundError without transformers.
    """
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path} does not contain a model: config.json is missing")
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a model's folder is read by transformers: pip install transformers") from error
    return transformers


def load_folder(path: Path) -> nn.Module:
    """Build the causal language model of a folder of ``save_pretrained``, in the dtype of its file.

    Weights are read later, by pieces, from the file ([Note: mapped files]).
    Raises: as ``library_for``; transformers' errors.
    """
    auto = library_for(path).AutoModelForCausalLM
    with Init():
        model: nn.Module = auto.from_pretrained(path, dtype="auto", local_files_only=True)
    return model
