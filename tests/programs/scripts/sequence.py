"""Parts of sequences on two ranks: Trainer, or Accelerate's loop, with ParallelismConfig(sp_size=2); or one process."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tiny import config, report, rows, zero

STEPS, ACCUMULATION = 6, 2


def model() -> Any:
    """Return a Llama of 3 heads, which 2 ranks cannot divide evenly, with one key head."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(3)
    return LlamaForCausalLM(config(hidden_size=24, num_attention_heads=3, num_key_value_heads=1))


def data(count: int) -> list[dict[str, Any]]:
    """Return rows of 15 tokens with 10 labels of next tokens: more in the first part, or more in the second."""
    found = []
    for number, row in enumerate(rows(count)):
        tokens = row["input_ids"][:15]
        labels = [-100] * 5 + tokens[5:] if number % 2 else tokens[:11] + [-100] * 4
        found.append({"input_ids": tokens, "labels": labels, "position_ids": list(range(15))})
    return found


def parallel(ranks: int) -> dict[str, Any]:
    from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig

    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa", sp_seq_length_is_variable=True)
    divided = ParallelismConfig(sp_backend="deepspeed", sp_size=ranks, dp_shard_size=1, sp_handler=handler)
    return {"parallelism_config": divided}


def by_trainer(given: argparse.Namespace) -> None:
    from transformers import Trainer, TrainingArguments, default_data_collator, set_seed

    more: dict[str, Any] = {"use_cpu": True}
    if given.stage is not None:
        more = {"deepspeed": zero(given.stage, "none", given.folder), **parallel(2)}
    arguments = TrainingArguments(
        output_dir=str(given.folder / "out"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=ACCUMULATION,
        learning_rate=5e-3,
        max_steps=STEPS,
        logging_steps=1,
        max_grad_norm=0.5,
        save_strategy="no",
        report_to=[],
        seed=11,
        **more,
    )
    set_seed(11)
    trainer = Trainer(
        model=model(), args=arguments, train_dataset=data(48), data_collator=default_data_collator, eval_dataset=data(4)
    )
    trainer.train()
    log = trainer.state.log_history
    report(
        rank=trainer.accelerator.process_index,
        losses=[row["loss"] for row in log if "loss" in row],
        norms=[float(row["grad_norm"]) for row in log if "loss" in row],
        evaluation=trainer.evaluate()["eval_loss"],
    )


def by_accelerate(given: argparse.Namespace) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin
    from torch.utils.data import DataLoader
    from transformers import default_data_collator
    from transformers.integrations.deepspeed import deepspeed_sp_compute_loss

    plugin = None
    if given.stage is not None:
        plugin = DeepSpeedPlugin(hf_ds_config=zero(given.stage, "none", given.folder) | {"gradient_clipping": 0.5})
    more = {} if plugin is None else parallel(2)
    accelerator = Accelerator(
        cpu=plugin is None, deepspeed_plugin=plugin, gradient_accumulation_steps=ACCUMULATION, **more
    )
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3)
    loader = DataLoader(data(48), batch_size=2, collate_fn=default_data_collator)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    losses = []
    for _, batch in zip(range(STEPS * ACCUMULATION), loader, strict=False):
        with accelerator.accumulate(net):
            if plugin is None:
                loss = net(**batch).loss
            else:
                loss = deepspeed_sp_compute_loss(accelerator, net, batch, False, accelerator.parallelism_config)
            accelerator.backward(loss)
            if plugin is None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    report(rank=accelerator.process_index, losses=losses)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("by", choices=["trainer", "accelerate"])
    parser.add_argument("--stage", type=int)
    arguments = parser.parse_args()
    {"trainer": by_trainer, "accelerate": by_accelerate}[arguments.by](arguments)
