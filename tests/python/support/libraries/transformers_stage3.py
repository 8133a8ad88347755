"""A script for two ranks: transformers' from_pretrained in stage 3, with zcomm under DeepSpeed's name."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from as_deepspeed import be_deepspeed

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3},
}


def main(folder: str) -> None:
    be_deepspeed(Path(folder))
    folder = f"{folder}/model"
    import deepspeed
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed()
    rank = deepspeed.comm.get_rank()
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    plain = LlamaForCausalLM(config)
    if rank == 0:
        plain.save_pretrained(folder)
    deepspeed.comm.barrier()
    wanted = {name: param.detach().clone() for name, param in plain.named_parameters()}
    keep = HfDeepSpeedConfig(CONFIG)
    torch.manual_seed(100 + rank)
    model = LlamaForCausalLM.from_pretrained(folder)
    marked = all(getattr(param, "_is_hf_initialized", False) for param in model.parameters())
    engine, optimizer, *_ = deepspeed.initialize(model=model, config=CONFIG)
    found = optimizer.full_state_dict()
    wrong = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    tokens = torch.arange(12).view(1, 12) + rank
    loss = engine(input_ids=tokens, labels=tokens).loss
    same = torch.equal(loss, plain(input_ids=tokens, labels=tokens).loss)
    engine.backward(loss)
    engine.step()
    print("RESULT " + json.dumps({"wrong": wrong, "marked": marked, "same": same, "count": len(wanted)}), flush=True)
    engine.destroy()
    del keep


if __name__ == "__main__":
    main(sys.argv[1])
