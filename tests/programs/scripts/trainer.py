"""transformers' Trainer: evaluation, saving, resuming, load_best_model_at_end; in one process, or with deepspeed=."""

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
    parser.add_argument("--experts", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    given = parser.parse_args()

    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, set_seed

    experts = {"expert_parallel": {"enabled": True, "autoep_size": given.experts}} if given.experts > 1 else {}
    arguments = TrainingArguments(
        output_dir=str(given.folder / "out"),
        per_device_train_batch_size=given.batch,
        per_device_eval_batch_size=given.batch,
        gradient_accumulation_steps=2,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        max_steps=8,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=4,
        save_steps=4,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        report_to=[],
        seed=11,
        **arguments_of_trainer(given.stage, given.tier, given.folder, **experts),
    )
    source = given.folder / "model"
    if not (source / "config.json").exists():
        raise SystemExit(f"{source}: make it first")
    set_seed(11)
    model = AutoModelForCausalLM.from_pretrained(source)
    trainer = Trainer(model=model, args=arguments, train_dataset=rows(64), eval_dataset=rows(8, seed=6))
    if given.steps < 8:
        stop_after(trainer, given.steps)
    trainer.train(resume_from_checkpoint=given.resume)
    final = trainer.evaluate()["eval_loss"]
    trainer.save_model(str(given.folder / "saved"))
    log = trainer.state.log_history
    report(
        rank=trainer.accelerator.process_index,
        world=trainer.accelerator.num_processes,
        losses=[row["loss"] for row in log if "loss" in row],
        norms=[float(row["grad_norm"]) for row in log if "loss" in row],
        evaluations=[row["eval_loss"] for row in log if "eval_loss" in row],
        final=final,
        best=trainer.state.best_model_checkpoint,
        reloaded=reloaded(given.folder / "saved") if trainer.is_world_process_zero() else None,
    )


def stop_after(trainer: object, steps: int) -> None:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: object, state: object, control: object, **kwargs: object) -> None:
            control.should_training_stop = state.global_step >= steps

    trainer.add_callback(Stop())


def reloaded(folder: Path) -> float:
    """Return the loss of the saved model on the evaluation's rows, by plain transformers."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = torch.tensor([row["input_ids"] for row in rows(8, seed=6)])
    with torch.no_grad():
        return float(model(input_ids=tokens, labels=tokens).loss)


if __name__ == "__main__":
    main()
