"""A prepared model's weights as files of plain models have them: values of now, under the names of the layers.

Quantisers and masks have no names then, nor ranges of inputs. Shapes are unchanged: only ``clean`` cuts.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zcomm.comm.communicator import Communicator
from zcomm.compression.activations import NAME
from zcomm.compression.masks import Masked, largest
from zcomm.compression.weights import WeightQuantiser
from zcomm.zero.agree import ErrorHolder, agree
from zcomm.zero.checkpoint.save import start
from zcomm.zero.files.save_task import SaveTask
from zcomm.zero.files.staging import NewFile
from zcomm.zero.files.tensor_file import Writer
from zcomm.zero.parts import Parts


@torch.no_grad()
def baked(model: nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict of ``model`` with the values that its layers compute with at this step. Local.

    state: all of it, whole tensors under the names of the prepared model; it is unchanged. A weight that it lacks is
    left out.
    """
    found = dict(state)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for name in [each for each in found if each.startswith(f"{prefix}{NAME}.")]:
            del found[name]
        listed = module._modules.get("parametrizations")
        for tensor in list(listed) if isinstance(listed, nn.ModuleDict) else ():
            chain: Any = listed[tensor]
            if not all(isinstance(part, (WeightQuantiser, Masked)) for part in chain):
                continue  # the program's own
            own = f"{prefix}parametrizations.{tensor}."
            value: Any = found.get(f"{own}original")
            for number, part in enumerate(chain) if value is not None else ():
                value = _value(part, value, state, f"{own}{number}.mask.")
            for name in [each for each in found if each.startswith(own)]:
                del found[name]
            if value is not None:
                found[f"{prefix}{tensor}"] = value
    return found


def _value(part: Any, value: torch.Tensor, state: dict[str, Any], mask: str) -> torch.Tensor:
    if isinstance(part, WeightQuantiser):
        return part.value(value)
    if not part.mask.enabled:
        return value
    kept = state[f"{mask}mask"] if part.mask.method == "l1" else largest(state[f"{mask}scores"], part.mask.ratio)
    found: torch.Tensor = part.times(value, kept)
    return found


def save_baked(parts: Parts, state: dict[str, Any], path: Path, wait: bool) -> SaveTask:
    """Write ``baked(parts.model, state)`` to the safetensors file ``path`` on rank 0. Collective.

    state: whole tensors, on all ranks. wait: False writes while training continues. Raises: OSError, on every rank.
    """
    tensors = baked(parts.model, state) if parts.comm.rank == 0 else {}
    tensors = {name: value.contiguous() for name, value in tensors.items() if isinstance(value, torch.Tensor)}

    def write(comm: Communicator) -> None:
        kept = ErrorHolder()
        with kept.errors(), ExitStack() as ends:
            if comm.rank == 0:
                ends.callback((new := NewFile(path)).discard)
                writer = Writer(new.path, [(name, value.dtype, value.shape) for name, value in tensors.items()])
                ends.callback(writer.close)
                for value in tensors.values():
                    writer.add(value)
                writer.check_whole()
                writer.close()
                new.put()
        agree(comm, kept.error, f"saving {path}")

    return start(parts, write, wait)
