"""Checks of modules that run a batch in parts: a module that would give other numbers raises in its first batch.

[Note: independent samples] Parts are exact if a sample's output depends on no other sample. Two or three samples run
three times: as they are, with another first sample, with another last one. The random state is restored, so all runs
draw the same numbers, and the unchanged samples must have equal outputs. The number of samples differs from a part's,
so that an output without a batch dimension is found by its shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

Named = list[tuple[str, torch.Tensor]]  # tensors, each with its place for errors


def check_samples(
    name: str,
    run: Callable[[Sequence[torch.Tensor]], Named],
    tensors: Sequence[torch.Tensor],
    is_split: Sequence[bool],
    first: int,
    size: int,
) -> None:
    """Run samples of ``tensors``. name: begins errors. first: the number of the tensor that tells the batch. size: of
    a part. Raises: ValueError for an output without the batch, RuntimeError for a module that mixes samples."""
    count = 3 if size == 2 else 2
    samples = [tensor[:count] if split else tensor for tensor, split in zip(tensors, is_split, strict=True)]
    devices = [tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
    kind = devices[0].type if devices else "cpu"

    def outputs_of(inputs: Sequence[torch.Tensor]) -> Named:
        with torch.no_grad(), torch.random.fork_rng([device.index for device in devices], device_type=kind):
            return run(inputs)

    outputs = outputs_of(samples)
    for path, output in outputs:
        check_rows(name, path, output, count)
    for changed, others in ((0, slice(1, None)), (-1, slice(0, -1))):
        inputs = [
            _changed(sample, changed, number == first) if split else sample
            for number, (sample, split) in enumerate(zip(samples, is_split, strict=True))
        ]
        for (path, one), (_, other) in zip(outputs, outputs_of(inputs), strict=True):
            if one.shape != other.shape or not _are_close(one[others], other[others]):
                raise RuntimeError(
                    f"{name} mixes samples: {path} of a sample changes with another sample of the batch, so parts give "
                    "other numbers than the batch. Leave the module out, or move the operation over the batch (a mean, "
                    "BatchNorm, a capacity of experts) outside of it"
                )


def _changed(samples: torch.Tensor, number: int, by_random: bool) -> torch.Tensor:
    """Return ``samples`` with random values, or those of another sample, in the sample ``number``."""
    made = samples.clone()
    if by_random and (made.is_floating_point() or made.is_complex()):
        made[number] = torch.randn(made.shape[1:], generator=torch.Generator().manual_seed(0)).to(made.device)
    else:
        made[number] = samples[-1 - number]
    return made


def _are_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True for tensors that are equal, or nearly so, as sums of experts are if they have other sizes."""
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    limit = torch.finfo(one.dtype).eps ** 0.5 / 4
    scale = float(one.abs().float().nan_to_num().max())
    return torch.allclose(one, other, rtol=limit, atol=limit * scale, equal_nan=True)


def check_rows(name: str, path: str, tensor: torch.Tensor, count: int) -> None:
    """Raise ValueError for an output that has no row for each of ``count`` samples."""
    if tensor.dim() == 0 or tensor.shape[0] != count:
        raise ValueError(
            f"{name}: {path} has the shape {list(tensor.shape)} for {count} samples, so parts cannot be joined: return "
            f"[{count}, ...], one row for each sample (a loss outside of the module)"
        )


def check_attributes(name: str, module: nn.Module) -> None:
    """Raise RuntimeError if a forward has left a result with a graph in an attribute: it has the last part only."""
    for path, each in module.named_modules():
        for key, value in vars(each).items():
            is_result = isinstance(value, torch.Tensor) and value.grad_fn is not None
            if is_result and not {f"{key}_v", f"{key}_orig"} & each._parameters.keys():  # torch's weight_norm
                raise RuntimeError(
                    f"{name} keeps a result in its attribute {f'{path}.{key}'.lstrip('.')}, which has the last part "
                    "only: return it, or detach() it if no loss uses it"
                )


def versions(module: nn.Module) -> dict[int, int]:
    """Return the versions of the module's buffers by id()."""
    return {id(buffer): buffer._version for buffer in module.buffers() if not buffer.is_inference()}


def check_buffers(name: str, module: nn.Module, before: Mapping[int, int]) -> None:
    """Raise RuntimeError if a forward has changed a buffer in place. before: its ``versions``."""
    now = versions(module)
    for path, buffer in module.named_buffers():
        if id(buffer) in before and before[id(buffer)] != now.get(id(buffer)):
            raise RuntimeError(
                f"{name} changes its buffer {path} in forward; each part and recomputation would change it again: "
                "leave the module out, or replace the part with state (BatchNorm by GroupNorm)"
            )


@contextmanager
def without_caches(module: nn.Module) -> Iterator[None]:
    """Disable autocast's cache, which would keep weights without gradients, and graphs that torch.compile would add."""
    caches = torch.is_autocast_cache_enabled()
    compiled = [(vars(each), vars(each).pop("_compiled_call_impl", None)) for each in module.modules()]
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(caches)
        for attributes, call in compiled:
            if call is not None:
                attributes["_compiled_call_impl"] = call
