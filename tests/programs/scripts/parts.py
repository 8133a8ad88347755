"""zcomm.parallel.ulysses on models of transformers: losses and gradients of parts, in float64."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch

import zcomm
from tiny import VOCABULARY, config, report
from zcomm.parallel import split_sequence, ulysses


def llama(heads: int, keys: int) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(heads)
    return LlamaForCausalLM(config(hidden_size=8 * heads, num_attention_heads=heads, num_key_value_heads=keys)).double()


def compared(mesh: Any, heads: int, keys: int, padding: int) -> float:
    """Return the largest difference of gradients, after the losses are checked."""
    whole = llama(heads, keys)
    model = copy.deepcopy(ulysses(copy.deepcopy(whole), mesh))
    tokens = torch.randint(VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
    labels, mask = tokens.clone(), torch.ones_like(tokens)
    labels[0, :4] = -100
    if padding:
        mask[1, -padding:], labels[1, -padding:] = 0, -100
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": labels}
    wanted = whole(**batch).loss
    wanted.backward()
    if padding:
        model.gradient_checkpointing_enable()
        model.train()
    loss = model(**split_sequence(batch, mesh)).loss
    loss.backward()
    loss = loss.detach().clone()
    zcomm.all_reduce(loss)
    assert abs(loss - wanted) < 1e-6, (loss, wanted)  # transformers computes losses in float32
    worst = 0.0
    for mine, other in zip(model.parameters(), whole.parameters(), strict=True):
        zcomm.all_reduce(mine.grad)
        worst = max(worst, float((mine.grad - other.grad).abs().max()))
    return worst


def refused(mesh: Any) -> list[str]:
    from transformers import BloomConfig, BloomForCausalLM

    model, tokens = ulysses(llama(2, 2), mesh), torch.arange(8).view(1, 8)
    packed = {"input_ids": tokens, "position_ids": torch.arange(4).repeat(2).view(1, 8)}
    stateful = llama(2, 2)
    stateful.config.layer_types = ["full_attention", "linear_attention"]
    sizes = {"hidden_size": 16, "n_head": 2, "n_layer": 1, "vocab_size": VOCABULARY}
    calls = [
        lambda: model(input_ids=tokens),
        lambda: model(**split_sequence(packed, mesh)),
        lambda: ulysses(stateful, mesh),
        lambda: ulysses(BloomForCausalLM(BloomConfig(**sizes)), mesh),
    ]
    said = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            said.append(str(error))
    return said


if __name__ == "__main__":
    Path(sys.argv[1])
    zcomm.init(timeout=120)
    sequence = zcomm.ProcessMesh(sequence=zcomm.world_size())
    cases = [(heads, keys, padding) for heads, keys in ((4, 4), (5, 5), (6, 2), (3, 1)) for padding in (0, 3)]
    report(rank=zcomm.rank(), worst=max(compared(sequence, *case) for case in cases), said=refused(sequence))
