"""Jobs of ranks in the tests of training on a (simulated) device: the same training on the CPU and on the device."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import torch

import simulated
import zcomm
from test_corners import Net, loss_of
from zero_jobs import digest

NAMED: dict[str, tuple[str, dict[str, Any]]] = {
    "lion": ("lion", {"lr": 1e-3}),
    "8bit": ("adamw", {"lr": 1e-2, "state_dtype": "8bit"}),
    "sgd": ("sgd", {"lr": 0.1}),
    "adagrad": ("adagrad", {"lr": 1e-2, "lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "lamb": ("lamb", {"lr": 1e-2, "weight_decay": 0.1}),
    "small": ("adam", {"lr": 1e-2, "state_dtype": torch.bfloat16}),
}


def _by_dimensions(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    """Return groups for Muon: matrices, and other parameters, which AdamW updates."""
    return [{"params": [p for p in params if (p.ndim == 2) == muon], "use_muon": muon} for muon in (True, False)]


_seeding = threading.Lock()  # ranks may be threads


def mixed_state(name: str, param: torch.nn.Parameter) -> str:
    return "nvme" if "embed" in name else "cpu" if "down" in name else "device"


def mixed_weights(name: str, param: torch.nn.Parameter) -> str:
    """With ``mixed_state``: every pair of tiers of state and weights, except (nvme, device) and (nvme, nvme)."""
    return "cpu" if "embed" in name or "blocks.0" in name else "nvme" if "blocks.2" in name else "device"


@dataclass(frozen=True)
class Job:
    """A training. The bits depend only on kind, precision, accum, clip and optimizer.

    plain: the training in RAM that has the same bits.
    """

    stage: int
    offload: str | None = "cpu"
    kind: str = "plain"
    precision: str = "fp32"
    accum: int = 1
    clip: float | None = None
    optimizer: str = "adamw"
    bucket_mb: float = 0.004
    overlap: bool = True
    prefetch: int = 1
    share_parameters: bool = True
    fraction: float = 1.0
    behind: bool = False
    resident: bool = False  # stage 3: parameters stay on the device
    mixed: bool = False  # stage 3: some parameters stay on the device
    max_bytes: int | None = None  # of a unit
    gradients: str | None = None
    update: str = "step"
    atomic: bool = False

    @property
    def plain(self) -> Job:
        return Job(1, None, self.kind, self.precision, self.accum, self.clip, self.optimizer)

    def place(self, behind: bool) -> zcomm.Offload:
        """offload "mixed": all three tiers. Stage 3 keeps its parameters in host memory unless another tier is set."""
        params: Any = (self.offload if self.offload in ("cpu", "nvme") else "cpu") if self.stage == 3 else None
        params = mixed_weights if self.mixed else None if self.resident else params
        tier: Any = mixed_state if self.offload == "mixed" else self.offload
        update: Any = "forward" if behind else self.update
        later: Any = {"gradients": self.gradients, "update": update, "atomic": self.atomic}
        return zcomm.Offload(tier, params, self.fraction, **later)

    def build(self, net: torch.nn.Module, folder: str, comm: zcomm.Communicator | None = None, mesh: Any = None) -> Any:
        """Make the optimizer. ``behind`` has an effect only on a device."""
        place = self.place(self.behind and simulated.playing())
        trained = [p for p in net.parameters() if p.requires_grad]
        chosen: Any = {
            "adamw": lambda: torch.optim.AdamW(trained, lr=1e-2),
            "momentum": lambda: torch.optim.SGD(trained, lr=0.1, momentum=0.9),
            "nesterov": lambda: torch.optim.SGD(trained, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
            "nadam": lambda: torch.optim.NAdam(trained, lr=1e-2),
            "asgd": lambda: torch.optim.ASGD(trained, lr=1e-1),
            "muon": lambda: zcomm.optim.Muon(_by_dimensions(trained), lr=1e-2),
        }.get(self.optimizer, lambda: NAMED[self.optimizer][0])()
        args = NAMED.get(self.optimizer, ("", {}))[1]
        scale = {"loss_scale": zcomm.zero.LossScale(initial_power=10)} if self.precision == "fp16" else {}
        return zcomm.ZeroOptimizer(
            net, chosen, stage=self.stage, offload=place, nvme_path=folder, precision=self.precision,
            clip_norm=self.clip, grad_accum=self.accum, bucket_mb=self.bucket_mb, overlap=self.overlap,
            prefetch=self.prefetch, share_parameters=self.share_parameters, comm=comm, mesh=mesh,
            units=zcomm.zero.Units(max_bytes=self.max_bytes), **scale, **args,
        )  # fmt: skip


def train(
    job: Job, folder: str, steps: int = 4, comm: zcomm.Communicator | None = None, mesh: Any = None
) -> dict[str, Any]:
    """Return losses, norms and the bits of weights and state after ``steps``. comm: None: the job's."""
    comm = comm or zcomm.init(timeout=60)
    zcomm.zero.layout.tiles.TILE_COUNT = 256 if job.optimizer == "8bit" else 192
    zcomm.zero.optim_state.nvme.SPAN_TILES, zcomm.zero.optim_state.nvme.WINDOWS = 2, 4  # more spans than windows
    with _seeding:
        torch.manual_seed(comm.rank)
        net = Net(job.kind)
    opt = job.build(net, folder, comm, mesh)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.7)
    losses, norms = [], []
    for number in range(steps * job.accum):
        loss = loss_of(net, comm.rank, number)
        opt.backward(loss)
        opt.step()
        opt.zero_grad()
        losses.append(loss.item().hex())
        if (number + 1) % job.accum == 0:
            norms.append(float(opt.grad_norm).hex())
            schedule.step()
    arrays = {f"{n}.{k}": v.reshape(-1) for n, e in opt.state_dict()["state"].items() for k, v in e.items()}
    result = {"losses": losses, "norms": norms, "bits": digest({**opt.full_state_dict(), **arrays})}
    opt.close()
    return result


def pairs(jobs: list[Job], folder: str, delay_s: float, steps: int = 4) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each job on the CPU, and on a device with late streams."""
    found, of_plain = [], {}
    for number, job in enumerate(jobs):
        if job.plain not in of_plain:
            simulated.stop()
            of_plain[job.plain] = train(job.plain, folder, steps)
        simulated.play(delay_s, seed=10 * number + zcomm.rank())
        found.append((of_plain[job.plain], train(job, folder, steps)))
    simulated.stop()
    return found
