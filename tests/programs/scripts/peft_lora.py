"""PEFT: LoRA adapters of a small Llama by the Trainer; the adapter is saved, and loaded by plain PEFT."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from tiny import arguments_of_trainer, report, rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int)
    parser.add_argument("--tier", default="none")
    parser.add_argument("--batch", type=int, default=4)
    given = parser.parse_args()

    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    arguments = TrainingArguments(
        output_dir=str(given.folder / "out"),
        per_device_train_batch_size=given.batch,
        learning_rate=1e-2,
        max_steps=6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=11,
        **arguments_of_trainer(given.stage, given.tier, given.folder),
    )
    set_seed(11)
    base = LlamaForCausalLM.from_pretrained(given.folder / "model")
    set_seed(12)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(base, lora)
    trainable, everything = model.get_nb_trainable_parameters()
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(64))
    trainer.train()
    trainer.save_model(str(given.folder / "adapter"))
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    after = None
    if trainer.is_world_process_zero():
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        plain = PeftModel.from_pretrained(
            LlamaForCausalLM.from_pretrained(given.folder / "model"), given.folder / "adapter"
        )
        tokens = torch.tensor([row["input_ids"] for row in rows(8, seed=6)])
        with torch.no_grad():
            after = float(plain(input_ids=tokens, labels=tokens).loss)
    report(rank=arguments.process_index, losses=losses, after=after, trainable=trainable, everything=everything)


if __name__ == "__main__":
    main()
