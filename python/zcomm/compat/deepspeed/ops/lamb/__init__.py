"""``deepspeed.ops.lamb``: ``zcomm.optim.Lamb``, of DeepSpeed's formula and defaults."""

from __future__ import annotations

from zcomm import optim
from zcomm.compat.deepspeed.ops import refuse
from zcomm.compat.deepspeed.ops.adam import Betas, Params


def FusedLamb(
    params: Params,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Betas = (0.9, 0.999),
    eps: float = 1e-8,
    eps_inside_sqrt: bool = False,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    amsgrad: bool = False,
) -> optim.Lamb:
    """Make LAMB for ``initialize(optimizer=)``. Raises: NotImplementedError for clipping of its own, and amsgrad.

    The configuration's "gradient_clipping" clips.
    """
    refuse("FusedLamb", max_grad_norm=(max_grad_norm, 0.0), amsgrad=(amsgrad, False))
    return optim.Lamb(
        params,
        lr,
        betas,
        eps,
        weight_decay,
        bias_correction=bias_correction,
        eps_inside_sqrt=eps_inside_sqrt,
        max_coeff=max_coeff,
        min_coeff=min_coeff,
    )
