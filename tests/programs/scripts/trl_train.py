"""TRL: SFT, DPO with a reference model, or GRPO that generates; in one process, or with deepspeed=."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tiny import arguments_of_trainer, report, texts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", choices=("sft", "dpo", "grpo"))
    parser.add_argument("--stage", type=int)
    parser.add_argument("--tier", default="none")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--unit-by-unit", action="store_true", help="GRPO: do not gather whole weights to generate")
    given = parser.parse_args()

    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaForCausalLM, set_seed

    common: dict[str, Any] = {
        "output_dir": str(given.folder / "out"),
        "per_device_train_batch_size": given.batch,
        "learning_rate": 5e-3,
        "max_steps": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "seed": 11,
        "bf16": False,
        "gradient_checkpointing": False,
        **arguments_of_trainer(given.stage, given.tier, given.folder),
    }
    tokenizer = AutoTokenizer.from_pretrained(given.folder / "model")
    set_seed(11)
    if given.what == "sft":
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(**common, max_length=32)
        model = LlamaForCausalLM.from_pretrained(given.folder / "model")
        data = Dataset.from_dict({"text": texts(64)})
        trainer: Any = SFTTrainer(model, args=arguments, train_dataset=data, processing_class=tokenizer)
    elif given.what == "dpo":
        from trl import DPOConfig, DPOTrainer

        arguments = DPOConfig(**common, max_length=32)
        model = LlamaForCausalLM.from_pretrained(given.folder / "model")
        reference = LlamaForCausalLM.from_pretrained(given.folder / "model")
        halves = [(" ".join(row.split()[:8]), " ".join(row.split()[8:])) for row in texts(32)]
        rejected = [" ".join(reversed(end.split())) for _, end in halves]
        data = Dataset.from_dict(
            {"prompt": [start for start, _ in halves], "chosen": [end for _, end in halves], "rejected": rejected}
        )
        trainer = DPOTrainer(model, reference, args=arguments, train_dataset=data, processing_class=tokenizer)
    else:
        from trl import GRPOConfig, GRPOTrainer

        common |= {"num_generations": 2, "max_completion_length": 6, "beta": 0.04, "temperature": 1.0}
        arguments = GRPOConfig(**common, ds3_gather_for_generation=not given.unit_by_unit)
        model = LlamaForCausalLM.from_pretrained(given.folder / "model")

        def reward(completions: list[str], **kwargs: Any) -> list[float]:
            return [float(len(set(text.split()))) for text in completions]

        data = Dataset.from_dict({"prompt": [" ".join(row.split()[:6]) for row in texts(32)]})
        trainer = GRPOTrainer(
            model, reward_funcs=reward, args=arguments, train_dataset=data, processing_class=tokenizer
        )
    trainer.train()
    weights = trainer.accelerator.unwrap_model(trainer.model_wrapped).state_dict()  # on all ranks
    log = [row for row in trainer.state.log_history if "loss" in row]
    report(
        rank=trainer.accelerator.process_index,
        losses=[row["loss"] for row in log],
        norms=[float(row["grad_norm"]) for row in log],
        rewards=[row.get("reward") for row in log],
        kl=[row.get("kl") for row in log],
        weights={name: value.double().flatten()[::97].tolist() for name, value in weights.items()},
    )


if __name__ == "__main__":
    main()
