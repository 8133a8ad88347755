"""The demo's decoder as a rank trains it, all on the drive; for programs of ranks."""

from __future__ import annotations

from typing import Any


def make(
    layers: int,
    width: int,
    folder: str,
    rule: str,
    limit: int | str | None,
    clip: float | None = None,
    **tiers: Any,
) -> tuple[Any, Any]:
    """Make the model and its optimizer. clip: norm of gradients. tiers: options of ``Offload``; without them weights,
    gradients and state are on the drive, and updates run in step()."""
    import zcomm
    from zcomm.zero import Init, Offload

    with Init():
        made = model(layers, width)
    optimizer = zcomm.ZeroOptimizer(
        made,
        rule,
        lr=1e-4,
        stage=3,
        offload=Offload("nvme", "nvme", **{"gradients": "nvme", "update": "step", **tiers}),
        nvme_path=folder,
        precision="bf16",
        clip_norm=clip,
        memory=limit,
    )
    return made, optimizer


def model(layers: int, width: int) -> Any:
    """Make the model without an optimizer."""
    from zcomm.demo.model import ByteLlama

    return ByteLlama(layers, max(1, width // 64), width)


def step(model: Any, optimizer: Any, context: int, number: int, rank: int) -> str:
    """Take step ``number``; return its loss as hexadecimal text."""
    loss = model(*tokens(context, number, rank))
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return str(loss.item().hex())


def tokens(context: int, number: int, rank: int) -> Any:
    """Return inputs and targets of step ``number``: int64 [2, 1, context]."""
    import torch

    generator = torch.Generator().manual_seed(1000 * number + rank)
    return torch.randint(256, (2, 1, context), generator=generator)
