"""offload_states and reload_states of the engine. They check the location of its states, and move nothing.

zcomm changes no tier while training: offloaded states are on the host or a drive between their uses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.zero import ZeroOptimizer

STATES = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")  # DeepSpeed's words
_PURPOSES = {"optim_states": "optimizer", "hp_params": "optimizer", "lp_params": "parameters"}  # else gradients


def offload_states(zero: ZeroOptimizer, accelerator: Any, include: Iterable[Any] | None, device: Any) -> None:
    """Check that the states ``include`` are on the host, as ``device`` "cpu" asks.

    accelerator: the engine's device. include: DeepSpeed's words, or members of its enumeration; None: all.
    Raises: ValueError for a word that is not known; NotImplementedError for states on a device.
    """
    names = [str(getattr(each, "value", each)) for each in (STATES if include is None else include)]
    unknown = [name for name in names if name not in STATES]
    if unknown:
        raise ValueError(f"offload_states(include={unknown}): expected some of {', '.join(STATES)}")
    where = str(getattr(device, "value", device))
    if where == "none":
        logging.getLogger("zcomm").warning('offload_states(device="none") moves nothing: name the device "cpu"')
        return
    if where != "cpu":
        raise ValueError(f'offload_states(device={where!r}): expected "cpu"')
    if accelerator.type == "cpu":
        return  # they already are in host memory or on a drive
    tiers = zero.memory()
    left = {name: tiers["device"][_PURPOSES.get(name, "gradients")] for name in names}
    left = {name: nbytes for name, nbytes in left.items() if nbytes}
    if left:
        shown = ", ".join(f"{name} ({nbytes} bytes)" for name, nbytes in left.items())
        raise NotImplementedError(
            f"offload_states(): {shown} of this rank are on {accelerator}, and zcomm moves no states while training: "
            'use "zero_optimization.offload_optimizer" and "offload_param", which keep them on the host between uses'
        )
