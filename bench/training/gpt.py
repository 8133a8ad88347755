"""The model and the data that every variant trains."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser, context: int) -> None:
    add = parser.add_argument
    add("--layers", type=int, default=12)
    add("--width", type=int, default=480)
    add("--heads", type=int, default=8)
    add("--context", type=int, default=context, help=f"bytes of a sample ({context})")
    add("--batch", type=int, default=1, help="samples per rank and step (1)")


def add_turn_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a case in which steps with and without a feature alternate, and the model's flags."""
    add = parser.add_argument
    add("-np", dest="world_size", type=int, default=2, help="ranks (2)")
    add("--stages", default="2,3", help="by commas (2,3)")
    add("--rounds", type=int, default=9, help="turns of each (9)")
    add_arguments(parser, 64)


def make_model(arguments: argparse.Namespace) -> Any:
    """Make the model with the same weights at each call, on each rank."""
    import torch

    from zcomm.demo.model import GPT, ModelConfig

    torch.manual_seed(1)
    return GPT(ModelConfig(arguments.layers, arguments.heads, arguments.width, arguments.context))


def make_batch(arguments: argparse.Namespace, rank: int) -> tuple[Any, Any]:
    """Return inputs and targets of this rank."""
    import torch

    generator = torch.Generator().manual_seed(rank)
    text = torch.randint(256, (arguments.batch, arguments.context + 1), generator=generator)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()
