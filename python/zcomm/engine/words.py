"""Words of an engine in errors of the optimizer below it.

ZeroOptimizer's errors name its own constructor, arguments and methods, which a program with an engine never wrote. An
error that leaves a method of the engine, or its construction, names the engine's methods and the configuration's keys.
Errors of other packages, which a model's forward may raise, are not changed.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_PACKAGE = str(Path(__file__).resolve().parents[1]) + os.sep
_KEYS = {
    "clip_norm": "gradient_clipping",
    "grad_accum": "gradient_accumulation_steps",
    "stage": "zero_optimization.stage",
    "bucket_mb": "zero_optimization.reduce_bucket_size",
    "prefetch": "zero_optimization.stage3_prefetch_bucket_size",
    "overlap": "zero_optimization.overlap_comm",
    "nvme_path": "zero_optimization.offload_optimizer.nvme_path",
    "communication_dtype": "communication_data_type",
    "buffer_dtype": "data_types.buffer_dtype",
    "loss_scale": "fp16.loss_scale",
    "skip_nonfinite": "bf16.check_grad_overflow",
}
_METHODS = {"backward": "backward", "step": "step", "save": "save_checkpoint", "load": "load_checkpoint"}
_QUANTIZED = {name: f"zero_optimization.zero_quantized_{name}" for name in ("weights", "gradients")}
_EITHER = " and ".join(f'"{key}"' for key in _QUANTIZED.values())


def _codec_keys(match: re.Match[str]) -> str:
    """Return the keys behind a Compression in a message."""
    asked = [key for name, key in _QUANTIZED.items() if f"{name}=None" not in match[0]]
    return " and ".join(f'"{key}": true' for key in asked)


_PHRASES: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"\bcompression=Compression\([^)]*\)", _codec_keys),
    (r"\bcompression is (?=Compression\()", f"the codec of {_EITHER} is "),
    (r"\bleave compression= out", "leave that out"),
    (r"\bcompression=(?!\w)", f'"{_QUANTIZED["gradients"]}": true'),
    (r"\bweights= is of", f'"{_QUANTIZED["weights"]}" is of'),
    (r"\bgive hops='across'", f'leave "{_QUANTIZED["weights"]}" out'),
    (r"\bWithout the block generate\(\)", 'With "hybrid_engine.pin_parameters": false generate()'),
    (r"\bhpz=True\b", '"zero_optimization.zero_hpz_partition_size"'),
    (r"save, close\(\) and build it again", "call save_checkpoint(), engine.destroy() and initialize() again"),
    (r"close\(\) it and build it again", "call engine.destroy() and initialize() again"),
    (r"close the optimizer, change the model, and build", "call engine.destroy(), change the model, and initialize"),
    (r"set opt\.boundary to", "call engine.set_gradient_accumulation_boundary() with"),
    (r"\bload\(optimizer=False\)", "load_checkpoint(load_optimizer_states=False)"),
    (r"(?<!\w)optimizer=False", "load_optimizer_states=False"),
    (r"build ZeroOptimizer", "call initialize()"),
    (r"ZeroOptimizer is built", "initialize() is called"),
    (r"(\w+\(\)) of the ZeroOptimizer\b", r"engine.optimizer.\1"),
    (r"\b(this|its|the|earlier|open|another|closed|gradient's) ZeroOptimizer\b", r"\1 engine"),
    (r"\ba ZeroOptimizer\b", "an engine"),
    (r"\bZeroOptimizer (was|is) built\b", r"the engine \1 made"),
    (r"\bZeroOptimizer\b", "the engine"),
    (r"\bprecision='(bf16|fp16)'", r'"\1.enabled": true'),
    (r"\bprecision=(?!\w|')", '"bf16.enabled" or "fp16.enabled"'),
    (rf"(?<![\w.\"])({'|'.join(_KEYS)})=(?=[\w'\"])", lambda match: f'"{_KEYS[match[1]]}": '),
    (rf"(?<![\w.\"])({'|'.join(_KEYS)})=(?!=)", lambda match: f'"{_KEYS[match[1]]}"'),
    (rf"(?<![\w.\"])({'|'.join(_KEYS)}) is (?=\S+(?:, not| on rank))", lambda match: f'"{_KEYS[match[1]]}" is '),
    (rf"\bopt\.({'|'.join(_METHODS)})\b", lambda match: f"engine.{_METHODS[match[1]]}"),
    (r"(?<![\w./])opt\.(?=\w+\()", "engine.optimizer."),  # not a parameter of a module with this name
    (r"(?<![\w.])close\(\)", "engine.destroy()"),
    (r"(?<![\w.])(save|load)\(", lambda match: f"{_METHODS[match[1]]}("),
)


def in_engines_words(text: str) -> str:
    """Return a message of ZeroOptimizer as the engine's."""
    for pattern, words in _PHRASES:
        text = re.sub(pattern, words, text)
    return text


def speaks_of_the_engine(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of the engine: rewords zcomm's errors for programs with an engine."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if error.args and isinstance(error.args[0], str) and _is_ours(error):
                error.args = (in_engines_words(error.args[0]), *error.args[1:])
            raise

    return call


def _is_ours(error: BaseException) -> bool:
    """Return True if code of this package has raised the error."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and os.path.realpath(last.tb_frame.f_code.co_filename).startswith(_PACKAGE)
