"""Models of transformers through deepspeed.compression in stage 3: from_pretrained loads exported and cleaned models.

Prints for each model whether outputs are equal: of engine and exported file, and of cleaned and saved model.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.compression.compress import init_compression, redundancy_clean
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM

from tiny import report

BITS = {"start_bits": 8, "target_bits": 8, "quantization_period": 0}


def method(name: str, params: dict[str, Any], modules: list[str], related: Any = None, **shared: Any) -> dict[str, Any]:
    group = {"params": params, "modules": modules, "related_modules": related}
    return {
        name: {"shared_parameters": {"enabled": True, "schedule_offset": 1, **shared}, "different_groups": {"g": group}}
    }


BERT = {
    **method("weight_quantization", BITS, ["attention.self", "word_embeddings"], quantize_groups=4),
    **method("sparse_pruning", {"dense_ratio": 0.5}, ["attention.output.dense"], method="topk"),
    **method("row_pruning", {"dense_ratio": 0.5}, ["intermediate.dense"], [[r"layer.\w+.output.dense"]], method="topk"),
}
LLAMA = {
    **method("weight_quantization", BITS, ["mlp"]),
    **method("row_pruning", {"dense_ratio": 0.5}, ["up_proj"], [["gate_proj", "down_proj"]], method="topk"),
    **method("head_pruning", {"dense_ratio": 0.5}, ["o_proj"], [["q_proj", "k_proj", "v_proj"]], num_heads=4),
}


def bert() -> Any:
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
            intermediate_size=48, head_dim=8,
        )
    )  # fmt: skip


def resize(model: Any) -> None:
    """Write the sizes of the cleaned layers to the model's configuration."""
    if isinstance(model, BertForSequenceClassification):
        model.config.intermediate_size = model.bert.encoder.layer[0].intermediate.dense.out_features
    else:
        heads = model.model.layers[0].self_attn.q_proj.out_features // model.config.head_dim
        model.config.num_attention_heads = model.config.num_key_value_heads = heads
        model.config.intermediate_size = model.model.layers[0].mlp.up_proj.out_features


def through(folder: Path, make: Any, section: dict[str, Any]) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        "compression_training": section,
    }
    torch.manual_seed(3)
    model = init_compression(make(), config)
    kind, exported, saved = type(model), folder / "exported", folder / "saved"
    engine = deepspeed.initialize(model=model, config=config)[0]
    ids = torch.arange(12).view(2, 6) + engine.global_rank
    for _ in range(3):
        engine.backward(engine(input_ids=ids).logits.square().mean())
        engine.step()
    engine.eval()
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        masked = engine(input_ids=ids).logits
        engine.save_16bit_model(exported)
        model.config.save_pretrained(exported)
        deepspeed.comm.barrier()
        again = kind.from_pretrained(exported).eval()(input_ids=ids).logits
        redundancy_clean(engine, config)
        cleaned = engine(input_ids=ids).logits
        resize(model)
        if engine.global_rank == 0:
            model.save_pretrained(saved)
        deepspeed.comm.barrier()
        loaded = kind.from_pretrained(saved)
        found = loaded.eval()(input_ids=ids).logits
    return {
        "exported": torch.equal(again, masked),
        "near": (cleaned - masked).abs().max().item(),
        "saved": torch.equal(found, cleaned),
        "numel": [sum(param.numel() for param in each.parameters()) for each in (make(), loaded)],
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    deepspeed.init_distributed()
    found = {
        make.__name__: through(folder / make.__name__, make, section)
        for make, section in ((bert, BERT), (llama, LLAMA))
    }
    report(rank=deepspeed.comm.get_rank(), **found)


if __name__ == "__main__":
    main()
