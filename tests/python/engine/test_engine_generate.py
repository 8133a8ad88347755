"""generate() of transformers under stage 3 by units, between training steps; needs transformers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed"),
]
Run = Callable[..., list[Any]]


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 10}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=1, eos_token_id=None))


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(2, 64, (1, count), generator=torch.Generator().manual_seed(seed))


def generated(model: Any, prompt: torch.Tensor, count: int, **more: Any) -> torch.Tensor:
    whole = torch.ones_like(prompt)
    result: torch.Tensor = model.generate(
        prompt, attention_mask=whole, max_new_tokens=count, do_sample=False, use_cache=True, **more
    )
    return result


def generate_and_train(folder: str, how: str) -> list[list[float]]:
    """Return losses of the engine and of plain torch. how: the remedy for ranks with different numbers of tokens."""
    from zcomm.compat.deepspeed import init_distributed

    comm = init_distributed(timeout=60.0)
    rank, ranks = comm.rank, range(comm.world_size)
    want, net = llama(), llama()
    optimizer = torch.optim.AdamW(want.parameters(), lr=0.01, weight_decay=0.0)
    zero = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": folder}}
    settings = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "gradient_clipping": 0.0}
    adamw = {"type": "AdamW", "params": {"lr": 0.01}}
    engine = zcomm.initialize(model=net, config=settings | {"optimizer": adamw})[0]
    losses = []
    for step in range(3):
        prompt, count = tokens(3 + 2 * rank, step), 5 if how == "same" else 5 + 3 * rank
        engine.eval()
        opened = zcomm.zero.GatheredParameters(net.parameters()) if how == "gathered" else nullcontext()
        more = {"synced_gpus": True} if how == "synced" else {}
        with torch.no_grad(), opened:
            assert torch.equal(generated(engine.module, prompt, count, **more), generated(want, prompt, count))
        engine.train()
        x = [tokens(6, 100 * step + each) for each in ranks]
        loss = engine(input_ids=x[rank], labels=x[rank]).loss
        engine.backward(loss)
        engine.step()
        each = [want(input_ids=ids, labels=ids).loss for ids in x]
        (sum(each) / len(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item(), each[rank].item()])
    engine.destroy()
    torch.distributed.destroy_process_group()
    return losses


@pytest.mark.parametrize("how", ["same", "synced", "gathered"])
def test_generate_between_training_steps_equals_one_process(run_ranks: Run, tmp_path: Path, how: str) -> None:
    for losses in run_ranks(generate_and_train, 2, str(tmp_path), how):
        for ours, torchs in losses:
            assert ours == pytest.approx(torchs, rel=1e-5)


@pytest.mark.leaves_swap
def test_ranks_that_generate_other_numbers_of_tokens_get_an_error_with_the_remedy(
    run_ranks: Run, tmp_path: Path
) -> None:
    """Without ``synced_gpus`` and without GatheredParameters: an error names unit and remedy, and no rank hangs."""
    results = run_ranks(generate_and_train, 2, str(tmp_path), "other", check=False)
    for result in results:
        text = result.describe()
        assert "CollectiveMismatch" in text and "layers." in text
        assert "generate()" in text and "zcomm.zero.GatheredParameters(model)" in text
