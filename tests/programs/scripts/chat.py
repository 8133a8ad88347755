"""RLHF by DeepSpeed's calls: supervised tuning, a reward model, and PPO with five engines of ZeRO stage 3.

The calls are those of DeepSpeed-Chat; the program is our own. Two ranks train; each also computes the first two steps
by torch with the whole batch, and generates with resident copies of the actor.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, get_scheduler
from transformers.integrations.deepspeed import HfDeepSpeedConfig

from tiny import report, rows

RATE, STEPS, MICRO, BETA = 5e-3, 3, 2, 0.9
NO_DECAY = ("bias", "norm.weight")


class Scorer(nn.Module):
    """A decoder with a score for each token: reward model and critic."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder
        self.head = nn.Linear(decoder.config.hidden_size, 1, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return scores, [batch, tokens]."""
        return self.head(self.decoder(tokens, use_cache=False)[0]).squeeze(-1)

    def last(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the score of each last token."""
        return self(tokens)[:, -1]


def settings(args: Any, trains: bool = True, hybrid: bool = False) -> dict[str, Any]:
    place = {"device": args.tier} | ({"nvme_path": str(args.folder / "swap")} if args.tier == "nvme" else {})
    zero = {"stage": args.stage, "overlap_comm": True, "stage3_param_persistence_threshold": 1e4}
    if args.stage == 3:
        zero["offload_param"] = place
    if trains:
        zero["offload_optimizer"] = place
    ranks = torch.distributed.get_world_size()
    found = {
        "train_batch_size": MICRO * ranks,
        "train_micro_batch_size_per_gpu": MICRO,
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "prescale_gradients": False,
        "wall_clock_breakdown": False,
    }
    if hybrid:
        found["hybrid_engine"] = {"enabled": True, "max_out_tokens": 64, "release_inference_cache": True}
    return found


def causal(args: Any, ds: dict[str, Any], weights: Path | None = None) -> nn.Module:
    holder = HfDeepSpeedConfig(ds) if args.stage == 3 else None  # from_pretrained then builds inside of zero.Init
    model = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    del holder
    if weights is not None:
        load(model, weights)
    return model


def scorer(args: Any, ds: dict[str, Any] | None, weights: Path | None = None) -> Scorer:
    config = AutoConfig.from_pretrained(args.folder / "model")
    torch.manual_seed(9)
    if ds is None or args.stage != 3:
        model = Scorer(AutoModel.from_config(config))
    else:
        with deepspeed.zero.Init(config_dict_or_path=ds):
            model = Scorer(AutoModel.from_config(config))
    if weights is not None:
        load(model, weights)
    return model


def load(model: nn.Module, file: Path) -> None:
    """Load a file on rank 0 only, module by module."""
    saved = torch.load(file)
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(prefix=prefix, recurse=False))
        given = [own[name] for name in saved if name in own]
        if given:
            with deepspeed.zero.GatheredParameters(given, modifier_rank=0):
                if torch.distributed.get_rank() == 0:
                    module._load_from_state_dict(saved, f"{prefix}.", {}, True, [], [], [])


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    decays = [p for name, p in named if not any(word in name for word in NO_DECAY)]
    others = [p for name, p in named if any(word in name for word in NO_DECAY)]
    return [{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def engine_of(args: Any, model: nn.Module, ds: dict[str, Any], trains: bool = True) -> Any:
    if not trains:
        return deepspeed.initialize(model=model, config=ds)[0]
    optimizer = DeepSpeedCPUAdam(groups(model), lr=RATE, betas=(0.9, 0.95))
    schedule = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=0, num_training_steps=2 * STEPS)
    made = deepspeed.initialize(model=model, optimizer=optimizer, args=args, config=ds, lr_scheduler=schedule)
    assert made[3] is schedule
    return made[0]


def fetched(params: list[torch.Tensor]) -> list[torch.Tensor]:
    return [p for p in params if hasattr(p, "ds_id") and p.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def save(engine: Any, file: Path) -> dict[str, torch.Tensor]:
    """Save each parameter, gathered by itself, on rank 0. Returns: copies, on all ranks."""
    kept = {}
    for name, param in engine.module.named_parameters():
        with deepspeed.zero.GatheredParameters(fetched([param])):
            kept[name] = param.data.cpu().clone()
    if torch.distributed.get_rank() == 0:
        torch.save(kept, file)
    torch.distributed.barrier()
    return kept


def language_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch, use_cache=False).loss


def pair_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Return the loss of rows against the same rows reversed."""
    scores = model(torch.cat([batch, batch.flip(1)]))[:, -1]
    good, bad = scores.chunk(2)
    return -F.logsigmoid(good - bad).mean()


def tune(
    args: Any, model: nn.Module, wanted: nn.Module, loss_of: Any, ds: dict[str, Any], file: Path
) -> dict[str, Any]:
    """Train ``model`` on two ranks and ``wanted`` by torch. Returns: losses of both, and the largest difference."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    engine = engine_of(args, model, ds)
    plain = torch.optim.AdamW(groups(wanted), lr=RATE, betas=(0.9, 0.95))
    schedule = get_scheduler("cosine", optimizer=plain, num_warmup_steps=0, num_training_steps=2 * STEPS)
    data = torch.tensor([row["input_ids"] for row in rows(STEPS * MICRO * ranks)]).split(MICRO * ranks)
    losses: list[list[float]] = [[], []]
    for batch in data:
        engine.train()
        loss = loss_of(engine, batch.chunk(ranks)[rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        torch.distributed.all_reduce(mean)
        losses[0].append(float(mean) / ranks)
        other = loss_of(wanted, batch)
        other.backward()
        torch.nn.utils.clip_grad_norm_(wanted.parameters(), 1.0)
        plain.step()
        plain.zero_grad()
        schedule.step()
        losses[1].append(float(other))
        assert engine.get_lr()[0] == plain.param_groups[0]["lr"]
    kept, mine = save(engine, file), dict(wanted.named_parameters())
    engine.destroy()
    assert kept.keys() == mine.keys()
    return {"losses": losses, "difference": max(float((kept[n] - p).abs().max()) for n, p in mine.items())}


def log_probs(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens, use_cache=False).logits[:, :-1]
    return F.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def generate(actor: Any, tokens: torch.Tensor, count: int, **more: Any) -> torch.Tensor:
    return actor.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        **more,
    )


def move_average(actor: Any, average: Any) -> None:
    """Let the weights of ``average`` follow, by one rank, which GatheredParameters tells the others."""
    with torch.no_grad():
        for param, other in zip(actor.parameters(), average.parameters(), strict=True):
            with (
                deepspeed.zero.GatheredParameters([param]),
                deepspeed.zero.GatheredParameters([other], modifier_rank=0),
            ):
                other.data.copy_(torch.lerp(param.data, other.data, BETA))


def reinforce(args: Any, policy: Path, scores: Path) -> dict[str, Any]:
    """PPO: actor, reference, critic, reward model and moving average. Returns: losses, and the checks' results."""
    rank = torch.distributed.get_rank()
    ds, frozen = settings(args), settings(args, trains=False)
    actor = engine_of(args, causal(args, ds, policy), settings(args, hybrid=args.hybrid))
    reference = engine_of(args, causal(args, frozen, policy), frozen, trains=False)
    average = engine_of(args, causal(args, frozen, policy), frozen, trains=False)
    critic = engine_of(args, scorer(args, ds, scores), ds)
    reward = engine_of(args, scorer(args, frozen, scores), frozen, trains=False)
    resident = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32).eval()
    expected = {n: p.clone() for n, p in torch.load(policy).items()}
    losses, lengths = [], []
    for step in range(STEPS):
        for each in (actor, critic, reference, reward):
            each.eval()
        prompts = torch.tensor([row["input_ids"][:6] for row in rows(MICRO, seed=10 * step + rank)])
        count = 4 + (3 * rank if args.hybrid else 0)  # without whole weights ranks keep step
        tokens = generate(actor.module, prompts, count, synced_gpus=args.stage == 3)
        resident.load_state_dict(actor.optimizer.full_state_dict())
        assert torch.equal(tokens, generate(resident, prompts, count, synced_gpus=False)), step
        lengths.append(tokens.shape[1])
        start = prompts.shape[1] - 1
        with torch.no_grad():
            before, usual = log_probs(actor, tokens), log_probs(reference, tokens)
            value, score = critic(tokens)[:, :-1], reward.module.last(tokens)
        rewards = -0.1 * (before - usual)
        rewards[:, -1] += score.clamp(-5, 5)
        gained = rewards[:, start:].flip(1).cumsum(1).flip(1)
        for each in (actor, critic):
            each.train()
        ratio = (log_probs(actor, tokens) - before)[:, start:].exp()
        advantage = gained - value[:, start:]
        actor_loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
        actor.backward(actor_loss)
        actor.step()
        critic_loss = 0.5 * (critic(tokens)[:, start:-1] - gained).square().mean()
        critic.backward(critic_loss)
        critic.step()
        losses.append([float(actor_loss), float(critic_loss)])
        move_average(actor.module, average.module)
        now = actor.optimizer.full_state_dict()
        expected = {n: torch.lerp(now[n], p, BETA) for n, p in expected.items()}
    kept = {
        name: save(each, args.folder / name) for name, each in (("actor", actor), ("ema", average), ("critic", critic))
    }
    moved = [float(p.double().sum()) for name in kept for p in kept[name].values()]
    same = max(float((kept["ema"][n] - p).abs().max()) for n, p in expected.items())
    changed = max(float((p - torch.load(policy)[n]).abs().max()) for n, p in kept["actor"].items())
    for each in (actor, reference, average, critic, reward):
        each.destroy()
    return {"losses": losses, "lengths": lengths, "sums": moved, "ema": same, "changed": changed}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--tier", default="cpu")
    parser.add_argument("--hybrid", action="store_true")
    parser.add_argument("--local_rank", type=int, default=-1)
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    (args.folder / "swap").mkdir(exist_ok=True)
    ds = settings(args)
    plain = AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=torch.float32)
    policy, scores = args.folder / "policy.bin", args.folder / "scores.bin"
    supervised = tune(args, causal(args, ds), plain, language_loss, ds, policy)
    judge = scorer(args, None)
    rewarded = tune(args, scorer(args, ds), copy.deepcopy(judge), pair_loss, ds, scores)
    report(rank=torch.distributed.get_rank(), sft=supervised, reward=rewarded, ppo=reinforce(args, policy, scores))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
