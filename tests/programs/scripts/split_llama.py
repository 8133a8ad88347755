"""A Llama with layers that run the batch in parts: losses and weights of layers that loop over their parts by hand."""

from __future__ import annotations

import argparse
import functools
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import zcomm
from tiny import config, report, rows

COUNT, PARTS, STEPS = 8, 4, 3


def by_hand(forward: Any, x: torch.Tensor, **named: Any) -> Any:
    found = []
    for at, part in enumerate(x.chunk(PARTS)):
        own = {
            name: value.chunk(PARTS)[at] if isinstance(value, torch.Tensor) and value.shape[0] == COUNT else value
            for name, value in named.items()
        }
        found.append(checkpoint(forward, part, use_reentrant=False, **own))
    return torch.cat(found)


def batch(rank: int, step: int, padded: bool) -> dict[str, torch.Tensor]:
    lists = rows(COUNT, seed=10 * step + rank)
    found = {name: torch.tensor([row[name] for row in lists]) for name in lists[0]}
    if padded:
        found["attention_mask"][::2, :3] = 0
    return found


def train(folder: Path, padded: bool, split: bool) -> tuple[list[float], str, str]:
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    settings = config()
    settings.attention_dropout = 0.1
    model = LlamaForCausalLM(settings).train()
    if split:
        zcomm.split_batch(model.model.layers, parts=PARTS)
    else:
        for layer in model.model.layers:
            layer.forward = functools.partial(by_hand, layer.forward)
    how: dict[str, Any] = {"stage": 3, "offload": "nvme", "nvme_path": folder} if split else {"stage": 0}
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=1e-2, **how)
    losses = []
    torch.manual_seed(zcomm.rank())
    for step in range(STEPS):
        loss = model(**batch(zcomm.rank(), step, padded), use_cache=False).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    sha = hashlib.sha256()
    for name, value in sorted(opt.full_state_dict().items()):
        sha.update(name.encode() + value.numpy().tobytes())
    refused = ""
    if split:
        try:
            model(**batch(0, 0, padded), use_cache=True)
        except TypeError as error:
            refused = str(error)
        with torch.no_grad():
            model.eval().generate(batch(0, 0, padded)["input_ids"][:3], max_new_tokens=4, do_sample=False)
    opt.close()
    return losses, sha.hexdigest(), refused


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    zcomm.init()
    found = {}
    for padded in (False, True):
        wanted = train(given.folder, padded, split=False)
        losses, weights, refused = train(given.folder, padded, split=True)
        found[str(padded)] = {"same": (losses, weights) == wanted[:2], "losses": losses, "refused": refused}
    report(rank=zcomm.rank(), **found)
    zcomm.shutdown()


if __name__ == "__main__":
    main()
