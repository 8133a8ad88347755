"""Model, tokenizer and text of the programs, made on the spot: ``python tiny.py FOLDER`` writes the first two."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

VOCABULARY, LENGTH = 64, 16


def config(kind: str = "llama", **more: Any) -> Any:
    """Return the configuration of a small model. more: sizes in place of these, and others."""
    from transformers import AutoConfig

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return AutoConfig.for_model(kind, **{**sizes, **more})


def folder_of_model(folder: Path, kind: str = "llama", **more: Any) -> str:
    """Write a model and its tokenizer into ``folder``, and return it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(config(kind, **more)).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | {f"w{i}": i for i in range(4, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return str(folder)


def rows(count: int, seed: int = 5) -> list[dict[str, list[int]]]:
    """Return ``count`` sequences of LENGTH tokens, each a walk that a model can learn."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(4, VOCABULARY, (count,), generator=generator)
    steps = torch.randint(1, 4, (count,), generator=generator)
    tokens = 4 + (starts[:, None] - 4 + steps[:, None] * torch.arange(LENGTH)) % (VOCABULARY - 4)
    return [{"input_ids": row, "labels": row, "attention_mask": [1] * LENGTH} for row in tokens.tolist()]


def texts(count: int, seed: int = 5) -> list[str]:
    """Return the rows as texts of words."""
    return [" ".join(f"w{token}" for token in row["input_ids"]) for row in rows(count, seed)]


def zero(stage: int, tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return the JSON of a stage, with all state that it can place on ``tier``."""
    where: dict[str, Any] = {"device": tier}
    if tier == "nvme":
        where["nvme_path"] = str(folder / "swap")
    zero_optimization: dict[str, Any] = {"stage": stage}
    if tier != "none":
        zero_optimization["offload_optimizer"] = where
        if stage == 3:
            zero_optimization["offload_param"] = where
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero_optimization,
        **more,
    }


def arguments_of_trainer(stage: int | None, tier: str, folder: Path, **more: Any) -> dict[str, Any]:
    """Return the TrainingArguments that choose one process, or ``stage`` on the ranks of the launcher."""
    return {"use_cpu": True} if stage is None else {"deepspeed": zero(stage, tier, folder, **more)}


def report(**result: Any) -> None:
    """Print the result that the test reads."""
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    folder_of_model(Path(sys.argv[1]), *sys.argv[2:], **(experts if "mixtral" in sys.argv else {}))
