"""Hugging Face's files in a checkpoint's folder, so that ``from_pretrained(folder)`` reads the folder unchanged.

- model.safetensors.index.json: the file of each weight. The manifest has its size and checksum.
- config.json and generation_config.json: only of a transformers model. The manifest does not list them, because
  programs edit them.
Tied weights are stored under their first name; transformers ties the others by the model's config.
Source: the folder that transformers' ``save_pretrained`` writes with several shards.
"""

from __future__ import annotations

import copy
import json
import logging
import zlib
from pathlib import Path
from typing import Any

from torch import nn

from zcomm.zero.checkpoint.manifest import Manifest
from zcomm.zero.files import durable
from zcomm.zero.files.staging import CONFIG, GENERATION

INDEX = "model.safetensors.index.json"


def index_of(sizes: dict[str, int], files: dict[str, str]) -> bytes:
    """Return the content of the index. sizes, files: bytes and file of each tensor, by name."""
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": files}
    return (json.dumps(index, indent=2) + "\n").encode()


def write_index(folder: Path, manifest: Manifest) -> None:
    """Write the index of the manifest's weights into the folder, and note it in the manifest."""
    entries = dict(sorted(manifest.weights.items()))
    data = index_of(
        {name: entry.nbytes for name, entry in entries.items()}, {name: entry.file for name, entry in entries.items()}
    )
    durable.write_file(folder / INDEX, data)
    manifest.files[INDEX], manifest.checksums[INDEX] = len(data), zlib.crc32(data)


def configs_of(model: nn.Module, dtype: str) -> dict[str, bytes]:
    """Return the content of the model's configs by file name; empty unless it is a transformers model.

    dtype: of the weights, by torch's name. A config that cannot be written is omitted, with a warning.
    """
    found: dict[str, bytes] = {}
    if not hasattr(type(model), "config_class"):  # other classes have other names of weights
        return found
    configs = [(CONFIG, vars(model).get("config"), {"architectures": [type(model).__name__], "dtype": dtype})]
    if getattr(model, "can_generate", bool)():
        configs.append((GENERATION, vars(model).get("generation_config"), {}))
    for name, config, changed in configs:
        if hasattr(config, "to_json_string"):
            try:
                found[name] = _json(config, changed)
            except Exception as error:  # of the program's classes: a checkpoint is worth more than this file
                logging.getLogger("zcomm").warning("the checkpoint has no %s: %r", name, error)
    return found


def _json(config: Any, changed: dict[str, Any]) -> bytes:
    config = copy.deepcopy(config)
    for name, value in changed.items():
        setattr(config, name, value)
    return str(config.to_json_string()).encode()
