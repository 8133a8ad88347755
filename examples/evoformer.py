"""An Evoformer block on one process: attention in chunks, and activations that wait on a drive until backward.

``python examples/evoformer.py [--offload nvme --folder DIR]``: one training step of four blocks for each setting, and
the peak of the process's memory. Rows are sequences of an alignment, columns residues; the pair has both.
Source: Jumper et al., "Highly accurate protein structure prediction with AlphaFold" (2021), algorithm 6, without gates.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import tempfile
from collections.abc import Callable

import torch
from torch import nn

import zcomm
from zcomm.attention.evoformer import evoformer_attention

Attend = Callable[..., torch.Tensor]


class Attention(nn.Module):
    """Attention along the axis before the last one, with a bias from the pair if ``pair_width`` is given."""

    def __init__(self, width: int, heads: int, pair_width: int = 0, attend: Attend = evoformer_attention) -> None:
        super().__init__()
        self.heads, self.attend = heads, attend
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.bias = nn.Linear(pair_width, heads, bias=False) if pair_width else None
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, pair: torch.Tensor | None = None) -> torch.Tensor:
        """x: [B, N, L, width]; pair: [B, L, L, pair_width]. Returns: as x."""
        query, key, value = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        bias = None
        if self.bias is not None and pair is not None:
            bias = self.bias(pair).permute(0, 3, 1, 2).unsqueeze(1).contiguous()  # [B, 1, heads, L, L]
        out = self.attend(query.contiguous(), key.contiguous(), value.contiguous(), None, bias)
        return self.out(out.flatten(-2))


def transition(width: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    """Rows and columns of the alignment, their outer product into the pair, and the pair's triangles."""

    def __init__(self, width: int, pair_width: int, heads: int, attend: Attend = evoformer_attention) -> None:
        super().__init__()
        self.row = Attention(width, heads, pair_width, attend)
        self.column = Attention(width, heads, attend=attend)
        self.change = transition(width)
        self.norm, self.left, self.right = nn.LayerNorm(width), nn.Linear(width, 8), nn.Linear(width, 8)
        self.outer = nn.Linear(64, pair_width)
        self.start = Attention(pair_width, heads, pair_width, attend)
        self.end = Attention(pair_width, heads, pair_width, attend)
        self.change_pair = transition(pair_width)

    def forward(self, rows: torch.Tensor, pair: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """rows: [B, N, L, width]; pair: [B, L, L, pair_width]. Returns: both, of the same shapes."""
        rows = rows + self.row(rows, pair)
        rows = rows + self.column(rows.transpose(1, 2)).transpose(1, 2)
        rows = rows + self.change(rows)
        normed = self.norm(rows)
        outer = torch.einsum("bnic,bnjd->bijcd", self.left(normed), self.right(normed)) / rows.shape[1]
        pair = pair + self.outer(outer.flatten(-2))
        pair = pair + self.start(pair, pair)
        turned = pair.transpose(1, 2)
        pair = pair + self.end(turned, turned).transpose(1, 2)
        return rows, pair + self.change_pair(pair)


def step(
    blocks: nn.ModuleList, rows: torch.Tensor, pair: torch.Tensor, offload: zcomm.offload_activations | None
) -> float:
    """Run forward and backward once. Returns: the loss."""
    with offload or contextlib.nullcontext():
        for block in blocks:
            rows, pair = block(rows, pair)
        loss = rows.square().mean() + pair.square().mean()
    loss.backward()
    return loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--residues", type=int, default=128)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--offload", choices=("none", "cpu", "nvme"), default="nvme")
    parser.add_argument("--folder", default=None, help="a folder on the drive (default: a temporary one)")
    given = parser.parse_args()
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block(64, 32, 4) for _ in range(given.blocks))
    rows = torch.randn(1, given.sequences, given.residues, 64)
    pair = torch.randn(1, given.residues, given.residues, 32)
    with tempfile.TemporaryDirectory() as folder:
        offload = None
        if given.offload == "nvme":
            offload = zcomm.offload_activations("nvme", nvme_path=given.folder or folder)
        elif given.offload == "cpu":
            offload = zcomm.offload_activations()
        loss = step(blocks, rows, pair, offload)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"offload {given.offload}: loss {loss:.6f}, peak of the process's memory {peak:.0f} MiB")
        if offload is not None:
            print(", ".join(f"{name} {value}" for name, value in offload.stats().items()))
            offload.close()


if __name__ == "__main__":
    main()
