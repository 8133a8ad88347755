"""Models of transformers divided by their own plans: gradients and norms of the whole model, in float64 and by ZeRO."""

from __future__ import annotations

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import zcomm
import zcomm.torch_backend
from experts import SIZES
from tiny import report

GPT = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MORE: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},  # norms of heads
    "apertus": {},  # trained activations between divided layers
    "sarvam_moe": {"num_experts": 4, "first_k_dense_replace": 1},  # norms of heads that its plan forgets
    "phi3": {"rope_scaling": None},
    "gpt_neox": {},
    "gpt2": {**GPT, "resid_pdrop": 0.0},
    "openai-gpt": {**GPT, "resid_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4},
    "deepseek_v2": {"n_routed_experts": 4, "num_experts": 4, "num_local_experts": 4, "first_k_dense_replace": 1},
    "granitemoe_swa": {"num_local_experts": 4, "sliding_window": 4},  # sinks
}


def model_of(kind: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    known = {key: value for key, value in SIZES.items() if key in vars(AutoConfig.for_model(kind))}
    if kind != "deepseek_v2":
        known.pop("head_dim", None)
    config = AutoConfig.for_model(
        kind,
        **{
            **known,
            **MORE[kind],
            "tie_word_embeddings": kind == "llama",
            **({"vocab_size": 63} if kind == "qwen3" else {}),
        },
    )
    how = {"experts_implementation": "eager"} if "num_experts_per_tok" in vars(config) else {}
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager", **how)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.05)
    return model


def loss_of(model: Any, number: int) -> torch.Tensor:
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm_of(model: Any) -> float:
    return float(torch.stack([whole(param.grad).norm() for param in model.parameters()]).norm())


def exact(kind: str, mesh: Any, steps: int = 2) -> float:
    """Return the largest difference of losses, gradients and norms from the whole model, relative, in float64."""
    model = model_of(kind, torch.float64)
    alone = copy.deepcopy(model)
    zcomm.parallel.tensor(model, mesh)
    worst = 0.0
    opts = [torch.optim.AdamW(each.parameters(), lr=1e-3, foreach=False) for each in (model, alone)]
    for step in range(steps):
        losses = [loss_of(each, step) for each in (model, alone)]
        for loss in losses:
            loss.backward()
        scale = norm_of(alone)
        found = [abs(norm_of(model) - scale), abs(losses[0].item() - losses[1].item())]
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            found.append(float((whole(mine.grad) - theirs.grad).abs().max()))
        worst = max(worst, max(found) / scale)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return worst


def norms_of_zero(mesh: Any, folder: Path | None = None) -> float:
    """Return the largest difference of losses and norms in 20 steps of a Llama in fp32, relative.

    folder: transformers itself divides a Mixtral, which it reads there, and ZeroOptimizer trains that.
    """
    from transformers import AutoModelForCausalLM

    alone = model_of("llama" if folder is None else "mixtral", torch.float32)
    if folder is None:
        model = copy.deepcopy(alone)
        zcomm.parallel.tensor(model, mesh)
    else:
        from transformers.distributed import DistributedConfig

        if zcomm.rank() == 0:
            alone.save_pretrained(folder)
        zcomm.barrier()
        model = AutoModelForCausalLM.from_pretrained(
            folder, distributed_config=DistributedConfig(tp_size=zcomm.world_size())
        )
    opt = zcomm.ZeroOptimizer(model, "adamw", lr=1e-2, mesh=mesh, stage=2, clip_norm=0.5)
    reference = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    worst = 0.0
    for step in range(20):
        mine, theirs = loss_of(model, step), loss_of(alone, step)
        mine.backward()
        theirs.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5))
        for each in (opt, reference):
            each.step()
            each.zero_grad()
        worst = max(worst, abs(mine.item() / theirs.item() - 1), abs(float(opt.grad_norm or 0) / norm - 1))
    opt.close()
    return worst


def words() -> list[str]:
    """Return the styles of the plans of all configurations and models of transformers."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    found = set()
    for kind in CONFIG_MAPPING:
        plans = [
            getattr(CONFIG_MAPPING[kind], "base_model_tp_plan", None),
            getattr(CONFIG_MAPPING[kind], "base_model_ep_plan", None),
        ]
        found |= set(itertools.chain.from_iterable((plan or {}).values() for plan in plans))
    for kind in MORE:
        name = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]
        found |= set((getattr(getattr(__import__("transformers"), name), "_tp_plan", None) or {}).values())
    return sorted(found)


if __name__ == "__main__":
    dist.init_process_group("zcomm")
    zcomm.init(timeout=120)
    ranks = zcomm.ProcessMesh(tensor=zcomm.world_size())
    report(
        rank=zcomm.rank(),
        exact={kind: exact(kind, ranks, 20 if kind == "llama" else 2) for kind in MORE},
        zero=[norms_of_zero(ranks), norms_of_zero(ranks, Path(sys.argv[1]) / "model")],
        words=words() if zcomm.rank() == 0 else [],
    )
