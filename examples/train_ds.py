"""A DeepSpeed training script, moved over by its import line: next-byte prediction on Python's own source.

    zcomm run -n 2 examples/train_ds.py --deepspeed_config examples/ds.json

Runs as it is with python, zcomm run, torchrun or mpirun; with DeepSpeed, exchange the import.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import zcomm.compat.deepspeed as deepspeed

CONTEXT = 32  # bytes that a prediction sees


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Sample i: bytes i * stride ... + CONTEXT of the text (int64 [CONTEXT]), and the byte after each of them."""

    def __init__(self, text: bytes, stride: int = 16) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self.stride = stride

    def __len__(self) -> int:
        return (len(self.text) - CONTEXT - 1) // self.stride

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        begin = index * self.stride
        return self.text[begin : begin + CONTEXT], self.text[begin + 1 : begin + CONTEXT + 1]


class ByteModel(nn.Module):
    """A byte from the ``history`` bytes before it: bytes [batch, CONTEXT] -> mean cross entropy in nats."""

    def __init__(self, history: int = 6, width: int = 32, hidden: int = 256) -> None:
        super().__init__()
        self.history = history
        self.embed = nn.Embedding(256, width)
        self.hidden = nn.Linear(history * width, hidden)
        self.head = nn.Linear(hidden, 256)

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        seen = F.pad(self.embed(inputs), (0, 0, self.history - 1, 0))  # [batch, history - 1 + CONTEXT, width]
        windows = seen.unfold(1, self.history, 1).flatten(2)  # [batch, CONTEXT, width * history]
        return F.cross_entropy(self.head(F.gelu(self.hidden(windows))).flatten(0, 1), targets.flatten())


def unigram_entropy(text: bytes) -> float:
    """Return the nats per byte of a model that knows only how often each byte occurs: training has to beat it."""
    shares = [text.count(byte) / len(text) for byte in set(text)]
    return -sum(share * math.log(share) for share in shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--data", type=Path, default=Path(argparse.__file__), help="text file to train on")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    if args.deepspeed_config is None:
        args.deepspeed_config = str(Path(__file__).with_name("ds.json"))

    torch.manual_seed(0)  # the same first weights on every rank
    text = args.data.read_bytes()
    model = ByteModel()
    engine, _, loader, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters(), training_data=Windows(text)
    )

    losses: list[float] = []
    while engine.global_steps < args.steps:
        for inputs, targets in loader:
            loss = engine(inputs, targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            if engine.global_steps == args.steps:
                break
    if engine.global_rank == 0:
        last = losses[-engine.gradient_accumulation_steps() * 10 :]
        print(f"loss {sum(last) / len(last):.3f} nats per byte; unigram entropy {unigram_entropy(text):.3f}")
    engine.destroy()


if __name__ == "__main__":
    main()
