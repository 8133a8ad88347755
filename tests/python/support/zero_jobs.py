"""Jobs of ranks in the ZeRO tests: a small GPT, deterministic batches, and training with ZeroOptimizer or DDP."""

from __future__ import annotations

import hashlib
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F

STEPS = 20


@dataclass(frozen=True)
class Case:
    """One training run; no field except precision may change the bits."""

    stage: int
    offload: str | None = None
    bucket_mb: float = 25.0
    overlap: bool = True
    precision: str = "fp32"
    prefetch: int = 1
    share_parameters: bool = True
    fraction: float = 1.0  # of the optimizer state that is offloaded
    gradients: str | None = None  # tier of their sums
    update: str = "step"
    atomic: bool = False
    max_bytes: int | None = None  # of a unit

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ZeroOptimizer."""
        values = asdict(self)
        import zcomm

        if max_bytes := values.pop("max_bytes"):
            values["units"] = zcomm.zero.Units(max_bytes=max_bytes)
        others = {name: values.pop(name) for name in ("fraction", "gradients", "update", "atomic")}
        if others != {"fraction": 1.0, "gradients": None, "update": "auto", "atomic": False}:
            params = self.offload if self.stage == 3 else None
            values["offload"] = zcomm.Offload(self.offload, params, **others)
        return values


def share_small_buckets() -> None:
    """Let shards on a drive begin at 512 bytes, not at pages: else rank 0 has all of a small bucket.

    For the process of a rank, which ends with the test.
    """
    import zcomm.zero.layout.sections

    zcomm.zero.layout.sections.PAGE_NBYTES = 512


def small_gpt(seed: int = 3) -> torch.nn.Module:
    from zcomm.demo.model import GPT, ModelConfig

    return GPT(ModelConfig(layers=3, heads=2, width=48, context=16, seed=seed))


def batch(rank: int, number: int, size: int = 2, context: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randint(0, 64, (size, context + 1), generator=generator)
    return x[:, :-1], x[:, 1:]


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(x).float().view(-1, 256), y.reshape(-1))


def language(step: int, rank: int, size: int = 8) -> torch.Tensor:
    """Return sentences of 17 tokens, each of which follows from the one before up to one bit."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, 64, (size, 17), generator=generator)
    chance = torch.randint(0, 2, (size, 17), generator=generator)
    for place in range(1, 17):
        tokens[:, place] = (3 * tokens[:, place - 1] + 7 * chance[:, place]) % 64
    return tokens


def last_losses(model: torch.nn.Module, opt: Any, rate: float, steps: int) -> float:
    """Train on ``language`` with a rate that falls to 0; return the mean of the last eighth of losses of all ranks."""
    import zcomm

    losses = []
    for step in range(steps):
        tokens = language(step, zcomm.rank())
        loss = loss_of(model, tokens[:, :-1], tokens[:, 1:])
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        opt.param_groups[0]["lr"] = rate * (1 - step / steps)
        losses.append(loss.detach())
    mean = torch.stack(losses[-steps // 8 :]).mean().reshape(1)
    zcomm.all_reduce(mean, "avg")
    return float(mean)


def groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices only, as people do."""
    return [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return a hash of the bits of all tensors."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def train(case: Case, swap: str, steps: int = STEPS, accum: int = 2) -> dict[str, Any]:
    """Train the small GPT; losses of every micro-step as hex, digest of the final weights."""
    import zcomm

    torch.set_num_threads(1)
    comm = zcomm.init(timeout=60)
    model = small_gpt(seed=3 + comm.rank)  # rank 0's weights must win
    adamw = torch.optim.AdamW(groups(model), lr=3e-3)
    opt = zcomm.ZeroOptimizer(model, adamw, clip_norm=0.5, grad_accum=accum, nvme_path=swap, **case.arguments())
    losses, norms = [], []
    for step in range(steps):
        for micro in range(accum):
            loss = loss_of(model, *batch(comm.rank, step * accum + micro))
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.item().hex())
        norms.append(float(opt.grad_norm).hex())
    weights = opt.full_state_dict()
    result = {"losses": losses, "norms": norms, "weights": digest(weights), "sizes": len(weights)}
    opt.close()
    return result


def train_all(cases: list[Case], swap: str, steps: int = STEPS) -> list[dict[str, Any]]:
    return [train(case, swap, steps) for case in cases]


def train_ddp(store: str, rank: int, world_size: int, steps: int = STEPS, accum: int = 2) -> dict[str, torch.Tensor]:
    """Run the same training by torch: DistributedDataParallel over Gloo, torch.optim.AdamW, clip_grad_norm_."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = torch.nn.parallel.DistributedDataParallel(small_gpt())
    opt = torch.optim.AdamW(groups(model.module), lr=3e-3)
    for step in range(steps):
        for micro in range(accum):
            (loss_of(model, *batch(rank, step * accum + micro)) / accum).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    dist.barrier()
    time.sleep(0.3)  # DDP's destructor joins Gloo's threads with the interpreter lock held, which they need to end
    dist.destroy_process_group()
    return {name: value.detach() for name, value in model.module.named_parameters()}


def train_float64(world_size: int, steps: int = STEPS, accum: int = 2) -> dict[str, torch.Tensor]:
    """One process, the whole batch of all ranks, float64."""
    model = small_gpt().double()
    opt = torch.optim.AdamW(groups(model), lr=3e-3)
    for step in range(steps):
        for micro in range(accum):
            for rank in range(world_size):
                x, y = batch(rank, step * accum + micro)
                loss = F.cross_entropy(model(x).view(-1, 256), y.reshape(-1))
                (loss / (accum * world_size)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
    return {name: value.detach() for name, value in model.named_parameters()}


def compare_with_torch(folder: str, case: Case) -> dict[str, float]:
    """Largest relative distance (in the norm of each tensor) of ZeroOptimizer's weights from DDP's and float64's."""
    import zcomm

    comm = zcomm.init(timeout=60)
    model = small_gpt()
    adamw = torch.optim.AdamW(groups(model), lr=3e-3)
    opt = zcomm.ZeroOptimizer(model, adamw, clip_norm=0.5, grad_accum=2, nvme_path=folder, **case.arguments())
    torch.set_num_threads(1)
    for number in range(2 * STEPS):
        loss_of(model, *batch(comm.rank, number)).backward()
        opt.step()
        opt.zero_grad()
    ours = opt.full_state_dict()
    opt.close()
    ddp = train_ddp(f"{folder}/ddp-store", comm.rank, comm.world_size)
    exact = train_float64(comm.world_size)

    def distance(other: dict[str, torch.Tensor]) -> float:
        return max(float((ours[n].double() - other[n].double()).norm() / other[n].double().norm()) for n in ours)

    return {"ddp": distance(ddp), "float64": distance(exact)}
