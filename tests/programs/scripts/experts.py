"""Train a small model with experts of transformers: with all experts on each rank, or divided by "expert_parallel"."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

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
    saved = saved_whole(engine, given.folder) if given.divide else None
    print("RESULT " + json.dumps({"rank": rank, "losses": losses, "norms": norms, "experts": experts, "saved": saved}))


def saved_whole(engine: Any, folder: Path) -> dict[str, bool]:
    """Save the model in each way that programs use; return whether all experts are read from it, equal to the bit."""
    from safetensors.torch import load_file

    from zcomm.zero.checkpoint.export import export

    model, rank = engine.module, torch.distributed.get_rank()
    state = model.state_dict()
    engine.save_checkpoint(folder / "saved", tag="last")
    engine.save_16bit_model(folder / "16bit")
    model.save_pretrained(folder / "hf", is_main_process=rank == 0)
    one = engine._zero3_consolidated_16bit_state_dict()
    other = copy.deepcopy(state)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2.0)
    torch.distributed.barrier()
    engine.load_checkpoint(folder / "saved", tag="last")
    loaded = same(model.state_dict(), state)
    torch.distributed.barrier()
    if rank:
        return {"loaded": loaded}
    export(folder / "saved/last", folder / "exported")
    model.config.save_pretrained(folder / "exported")
    read = {name: AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("hf", "exported")}
    read |= {"16bit": load_file(folder / "16bit/model.safetensors"), "consolidated": one, "copied": other}
    return {"loaded": loaded} | {name: same(tensors, state) for name, tensors in read.items()}


def same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(torch.equal(found[name].to(value.dtype), value) for name, value in wanted.items())


if __name__ == "__main__":
    main()
