"""zcomm under DeepSpeed's name, with the parts that transformers and Accelerate use before they train."""

from __future__ import annotations

import importlib
import os
import sys
import types
from pathlib import Path

import torch

from zcomm.compat.deepspeed import install


def be_deepspeed(folder: Path) -> None:
    """Install the names. folder: for the metadata of a distribution of that name."""
    install()
    importlib.import_module("deepspeed")
    info = folder / f"rank{os.environ['RANK']}" / "deepspeed-0.19.8.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.19.8\n")
    sys.path.insert(0, str(info.parent))
    # Names that transformers replaces in DeepSpeed's Init, which converts tensors of torch.arange; zcomm's does not.
    _module(
        "runtime.zero.partition_parameters",
        zero_wrapper_for_fp_tensor_constructor=None,
        _orig_torch_arange=torch.arange,
    )
    _module("runtime.lr_schedules", VALID_LR_SCHEDULES=["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR"])


def _module(name: str, **names: object) -> None:
    path = "deepspeed"
    for part in name.split("."):
        above, path = sys.modules[path], f"{path}.{part}"
        try:
            importlib.import_module(path)
        except ModuleNotFoundError:
            sys.modules[path] = types.ModuleType(path)
        setattr(above, part, sys.modules[path])
    vars(importlib.import_module(path)).update(names)
