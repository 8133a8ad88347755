"""Attention functions of Hugging Face's registry over parts: grouped heads, positions, padding, and refused masks."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import zcomm
from zcomm.parallel.attention import RegisteredAttention
from zcomm.parallel.heads import cut, sequence_ranks

Run = Callable[..., list[Any]]
TOKENS = 7


def core(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Compute as transformers' "sdpa": repeat key heads by the module's number of groups."""
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    module.seen.append(kwargs.get("position_ids"))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2), None


def module_of(group: int, **more: Any) -> Any:
    return types.SimpleNamespace(num_key_value_groups=group, seen=[], training=True, **more)


def parts(heads: int, keys: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return query, key and value of all tokens, and of this rank's."""
    generator = torch.Generator().manual_seed(heads)
    sizes = (heads, keys, keys)
    whole = [torch.randn(2, size, TOKENS, 4, generator=generator).double() for size in sizes]
    part = cut(TOKENS, zcomm.world_size())[zcomm.rank()]
    return whole, [each[:, :, part] for each in whole]


def two_ranks() -> list[str]:
    zcomm.init(timeout=60)
    ranks = sequence_ranks(zcomm.ProcessMesh(sequence=zcomm.world_size()))
    part = cut(TOKENS, ranks.size)[ranks.rank]
    rows = torch.arange(TOKENS).expand(2, -1)
    sdpa, flash = RegisteredAttention(core, "sdpa", ranks), RegisteredAttention(core, "flash", ranks)
    for heads, keys in ((4, 2), (3, 1), (6, 3)):
        whole, mine = parts(heads, keys)
        module = module_of(heads // keys)
        wanted = core(module, *whole, None)[0]
        out, weights = sdpa(module, *mine, None, position_ids=rows[:, part], labels=rows[:, part])
        torch.testing.assert_close(out, wanted[:, part], rtol=1e-12, atol=1e-12)
        assert weights is None and module.seen == [None, None] and module.num_key_value_groups == heads // keys

    whole, mine = parts(4, 4)
    module, count = module_of(1), part.stop - part.start
    wanted = core(module, *whole, None)[0]
    real = torch.ones(2, TOKENS, dtype=torch.bool)
    real[1, -2:] = False
    causal = real[:, None, None, part] & torch.ones(count, count).tril().bool()
    for mask in (causal, torch.zeros(causal.shape).masked_fill(~causal, -1e9), real[:, part]):
        out, _ = sdpa(module, *mine, mask, position_ids=rows[:, part])
        torch.testing.assert_close(out[0], wanted[0, part], rtol=1e-12, atol=1e-12)
    packed = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)
    flash(module, *mine, None, position_ids=packed[:, part])
    assert torch.equal(module.seen[-1], packed)
    flash(module, *mine, None, position_ids=rows[:, part], sliding_window=3)
    assert module.seen[-1] is None
    resting = module_of(1)
    resting.training = False
    alone, _ = RegisteredAttention(core, "sdpa", ranks, disable_in_eval=True)(resting, *whole, None)
    torch.testing.assert_close(alone, wanted)

    left = real.flip(1)
    given = {"position_ids": rows[:, part]}
    band = causal & ~torch.ones(count, count).tril(-2).bool()
    calls: list[Callable[[], Any]] = [
        lambda: sdpa(module, *mine, None, position_ids=packed[:, part]),
        lambda: sdpa(module, *mine, None, position_ids=torch.arange(count).expand(2, -1)),
        lambda: sdpa(module, *mine, left[:, part], **given),
        lambda: sdpa(module, *mine, band, **given),
        lambda: sdpa(module, *mine, object(), **given),
        lambda: sdpa(module_of(1, is_causal=False), *mine, real[:, part], **given),
        lambda: sdpa(module, *mine, None, sliding_window=3, **given),
        lambda: sdpa(module_of(1, config=types.SimpleNamespace(attention_chunk_size=4)), *mine, None, **given),
        lambda: sdpa(module, *mine, None, s_aux=torch.ones(4), **given),
        lambda: sdpa(module, *mine, None, output_attentions=True, **given),
        lambda: sdpa(module, *[each[:, :, :1] for each in mine[:1]], *mine[1:], None, **given),
        lambda: RegisteredAttention(core, "eager", ranks),
    ]
    said = []
    for call in calls:
        with pytest.raises((ValueError, NotImplementedError)) as error:
            call()
        said.append(str(error.value))
    return said


def test_attention_of_the_registry(run_ranks: Run) -> None:
    words = [
        "the positions of a part do not follow each other",
        "row 0 begins at position 0 on rank 1 of the sequence and ends at 3 on rank 0",
        "padding before or between tokens needs a mask",
        "the attention mask is not causal with padding",
        "such as a BlockMask",
        "the attention mask is not causal with padding",
        "sliding_window=3 with 7 tokens",
        "attention_chunk_size=4 with 7 tokens",
        "s_aux= of shape (4,)",
        "output_attentions=True",
        "query and key have different lengths",
        "attention 'eager' is causal by a mask",
    ]
    for said in run_ranks(two_ranks, 2):
        for text, word in zip(said, words, strict=True):
            assert word in text, (text, word)
