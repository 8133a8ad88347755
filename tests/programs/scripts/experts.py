"""Train a small model with experts of transformers: with all experts on each rank, or divided by "expert_parallel"."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,  # of DeepSeek's: as qk_rope_head_dim
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "output_router_logits": True,
    "pad_token_id": None,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("kind")
    parser.add_argument("--divide", action="store_true")
    parser.add_argument("--stage", type=int, default=2)
    given = parser.parse_args()
    deepspeed.init_distributed()
    rank = torch.distributed.get_rank()
    torch.manual_seed(0)
    known = vars(AutoConfig.for_model(given.kind))
    sizes = {key: value for key, value in SIZES.items() if key in known or key in ("num_experts", "n_routed_experts")}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(given.kind, **sizes))
    names = [name for name, _ in model.named_parameters()]
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2}},
        "zero_optimization": {"stage": given.stage},
        "expert_parallel": {"enabled": given.divide, "autoep_size": 2, "preset_model": given.kind},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    assert names == [name for name, _ in model.named_parameters()]
    experts = sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    losses, norms = [], []
    for step in range(8):
        ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
        norms.append(float(engine.get_global_grad_norm() or 0))
    print("RESULT " + json.dumps({"rank": rank, "losses": losses, "norms": norms, "experts": experts}))


if __name__ == "__main__":
    main()
