"""Idioms that programs use around an optimizer, each written once, as a PyTorch user writes it.

`IDIOMS` is the table. Idioms without a listed refusal have torch's numbers. Sources: torch's tutorials and docs of
torch.optim, torch.nn.utils, torch.autograd and torch.amp; training loops of timm, transformers, Accelerate, Lightning;
the papers that the functions name.
"""

from __future__ import annotations

from idioms import edits, gradients, hooks, models, passes, reads, steps
from idioms.table import IDIOMS, Idiom

__all__ = ["IDIOMS", "Idiom", "edits", "gradients", "hooks", "models", "passes", "reads", "steps"]
