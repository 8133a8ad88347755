"""Values of "auto" in a configuration when ``initialize()`` is called directly: derived from its arguments.

Hugging Face's Trainer writes its TrainingArguments over every "auto" before DeepSpeed reads the file. Here ``args`` may
be such an object, or any namespace with some of its attributes. Learning rates also come from the optimizer and the
configuration, and precision from the model. Epochs become steps once the ranks and the data are known (``with_steps``).
A value without a source is the key's default (config/parse.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zcomm.config import Config
from zcomm.config.source import read_source
from zcomm.config.words import in_todays_words


def auto_values(args: Any, model: nn.Module, optimizer: Any, source: Any) -> dict[str, Any]:
    """Return the values of "auto" by dotted key; None for a value without a source."""
    rate = _first(args, "learning_rate", "lr")
    betas = (_first(args, "adam_beta1"), _first(args, "adam_beta2"))
    return {
        "train_micro_batch_size_per_gpu": _first(args, "per_device_train_batch_size"),
        "gradient_accumulation_steps": _first(args, "gradient_accumulation_steps"),
        "gradient_clipping": _first(args, "max_grad_norm"),
        "fp16.enabled": _precision(args, model, "fp16", torch.float16),
        "bf16.enabled": _precision(args, model, "bf16", torch.bfloat16),
        "optimizer.params.lr": rate,
        "optimizer.params.betas": None if None in betas else betas,
        "optimizer.params.eps": _first(args, "adam_epsilon"),
        "optimizer.params.weight_decay": _first(args, "weight_decay"),
        "scheduler.params.warmup_max_lr": _first_rate(optimizer, source) if rate is None else rate,
        "scheduler.params.warmup_num_steps": _warmup(args),
        "scheduler.params.total_num_steps": _positive(_first(args, "max_steps")),
    }


def epochs_of(args: Any) -> float | None:
    """Return ``num_train_epochs``, unless ``max_steps`` overrides it."""
    epochs = _positive(_first(args, "num_train_epochs"))
    return None if epochs is None or _positive(_first(args, "max_steps")) is not None else float(epochs)


def with_steps(values: dict[str, Any], args: Any, epochs: float, micro_steps: int, accumulation: int) -> dict[str, Any]:
    """Return ``values`` with the values that follow from the optimizer steps of ``epochs``.

    micro_steps: of an epoch and rank.
    """
    steps = max(1, int(epochs * micro_steps) // accumulation)
    return values | {
        "scheduler.params.warmup_num_steps": _warmup(args, steps),
        "scheduler.params.total_num_steps": steps,
    }


def _first(args: Any, *names: str) -> Any:
    found = (args.get(name) if isinstance(args, Mapping) else getattr(args, name, None) for name in names)
    return next((value for value in found if value is not None), None)


def _positive(value: Any) -> Any:
    """Return None for -1 and 0, which TrainingArguments has for a value that is not set."""
    return value if value is not None and value > 0 else None


def _precision(args: Any, model: nn.Module, name: str, dtype: torch.dtype) -> bool:
    given = _first(args, name)
    if given is not None:
        return bool(given)
    if _first(args, "fp16", "bf16") is not None:
        return False
    return any(param.dtype == dtype for param in model.parameters())


def _first_rate(optimizer: Any, source: Any) -> Any:
    """Return the learning rate of the optimizer that was given, or of the configuration's own."""
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.param_groups[0].get("lr")
    if isinstance(source, Config):
        return None
    data: Any = in_todays_words(*read_source(source))[0]
    for name in ("optimizer", "params", "lr"):
        data = data.get(name) if isinstance(data, Mapping) else None
    return None if data == "auto" else data


def _warmup(args: Any, all_steps: int | None = None) -> int | None:
    steps, ratio = _first(args, "warmup_steps"), _first(args, "warmup_ratio")
    all_steps = all_steps or _positive(_first(args, "max_steps"))
    if steps is None and ratio is None:
        return None
    share = steps if steps and steps < 1 else ratio if not steps else None  # transformers 5: warmup_steps=0.1
    if share and all_steps:
        steps = math.ceil(all_steps * share)
    return max(1, int(steps or 0))
