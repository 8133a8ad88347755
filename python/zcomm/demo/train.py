"""The demo's training on one rank: set up, train, evaluate, sample, and hand the results to rank 0's reporter.

Invariant: all ranks make the same calls in the same order, evaluation and sampling included (stage 3 gathers in them).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import os
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

import zcomm
from zcomm.demo import results
from zcomm.demo.forms import WholeModel, axis_rows, make_form, model_of
from zcomm.demo.options import DemoConfig
from zcomm.demo.phases import Clock, DriveRates, measure_drive
from zcomm.demo.place import CPU, Place, open_place
from zcomm.demo.progress import StepRecord, make_progress, print_head
from zcomm.demo.text import Text, load_text, unigram_entropy
from zcomm.launch.errors import UserError
from zcomm.planning import Estimate, estimate, saved_nbytes
from zcomm.planning.gpu_tiers import gpu_formula
from zcomm.profiling.traffic import Traffic
from zcomm.zero.options import as_offload, as_precision

PROMPT = b"def "
_WARMUP = 0.05  # part of the steps
_FINAL_LR = 0.05  # part of the peak
_WORKING_NBYTES = 64 << 20  # inside operators, and inside a recomputed block


def run(config: DemoConfig) -> None:
    """Train and report. Raises: UserError for errors with a remedy; PeerLost, TimeoutError, OSError."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(config.seed)
    try:
        text = load_text(config.data)
        if config.mesh is not None and config.mesh.get("tensor", 1) > 1:  # DTensor needs torch's groups
            importlib.import_module("zcomm.torch_backend")
            torch.distributed.init_process_group("zcomm")
        comm = zcomm.init()
        place = open_place(config.device, comm.local_rank)
        if min(len(text.train), len(text.validation)) < config.context + 1:
            raise UserError(f"{text.source}: validation has {len(text.validation)} bytes; lower --context")
        rates = drive_rates(config, comm)  # first, so that its buffer is freed before the optimizer allocates
        form = make_form(config, comm, place)
        entropy = unigram_entropy(text.train, text.validation)
        if comm.rank == 0 and not config.quiet:
            print_head(config, text, form.numel, entropy, rates, place.gpu)
        optimizer = make_optimizer(form.module, config, place, form.mesh)
    except (zcomm.PeerLost, TimeoutError):
        raise
    except OSError as error:
        raise UserError(error.strerror or str(error)) from error  # the core's text names path and bytes itself
    except (ValueError, NotImplementedError) as error:
        raise UserError(str(error)) from error
    try:
        with closing(optimizer):
            metrics = results.Metrics(config.directory) if comm.rank == 0 else None
            Training(config, comm.rank, text, entropy, form, optimizer, rates, metrics, place).run()
    finally:
        zcomm.shutdown()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def drive_rates(config: DemoConfig, comm: zcomm.Communicator) -> DriveRates | None:
    """Measure the speed of rank 0's drives while the other ranks wait. None on the others, without swap, and if the
    drives lack space."""
    rates = None
    if config.offload == "nvme" and comm.rank == 0:
        assert config.nvme_path is not None
        with contextlib.suppress(OSError):
            rates = measure_drive(config.nvme_path)
    comm.barrier()
    return rates


def memory_limit(config: DemoConfig, place: Place) -> zcomm.zero.MemoryLimit | None:
    """Return the limit of a rank, with room for the activations, which are counted on the meta device.

    With a GPU the limit is of host memory, and the activations are on the GPU.
    """
    if config.memory is None:
        return None
    if place.gpu:
        return zcomm.zero.MemoryLimit(config.memory, _WORKING_NBYTES)
    model, batch = _on_meta(config)
    return zcomm.zero.MemoryLimit(config.memory, saved_nbytes(model, batch, batch) + _WORKING_NBYTES)


def plan_of(config: DemoConfig, optimizer: zcomm.ZeroOptimizer) -> Estimate:
    """Return the plan of a CPU rank, from the third step on, with the options that a limit on memory has chosen."""
    model, batch = _on_meta(config)
    return estimate(
        model,
        config.stage,
        optimizer.offload,
        config.world_size,
        config.precision,
        bucket_mb=optimizer.bucket_mb,
        prefetch=optimizer.prefetch,
        accumulation=config.accum,
        units=optimizer.units,
        inputs=(batch, batch),
    )


def planned_nbytes(config: DemoConfig, optimizer: zcomm.ZeroOptimizer) -> dict[str, int]:
    """Return the bytes that ``plan_of`` reads and writes on the drive in a step."""
    planned = plan_of(config, optimizer)
    return {"read": planned.swap_read_nbytes, "written": planned.swap_written_nbytes}


def _on_meta(config: DemoConfig) -> tuple[nn.Module, Tensor]:
    """Return the model without memory, and a micro-batch's inputs, or targets."""
    with torch.device("meta"):
        model = model_of(config).to(as_precision(config.precision).dtype)
        return model, torch.zeros(config.batch, config.context, dtype=torch.int64)


def offload_of(config: DemoConfig) -> zcomm.zero.Offload | str | None:
    """Return the placement. Updates in backward need the sums of gradients on the drive."""
    if config.offload != "nvme" or config.stage < 3:
        return None if config.offload == "none" else config.offload
    update = cast(Any, config.update)  # checked
    return zcomm.zero.Offload("nvme", "nvme", gradients="nvme" if config.update == "backward" else None, update=update)


def make_optimizer(
    model: nn.Module, config: DemoConfig, place: Place = CPU, mesh: zcomm.ProcessMesh | None = None
) -> zcomm.ZeroOptimizer:
    """Make AdamW through ZeRO as the options ask."""
    return zcomm.ZeroOptimizer(
        model,
        "adamw",
        stage=config.stage,
        offload=offload_of(config),
        nvme_path=config.nvme_path,
        precision=config.precision,
        clip_norm=config.clip or None,
        grad_accum=config.accum,
        bucket_mb=config.bucket_mb,
        overlap=config.overlap,
        memory=memory_limit(config, place),
        device=place.device,
        mesh=mesh,
        lr=config.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
    )


def formula_of(numel: int, config: DemoConfig, place: Place) -> dict[str, dict[str, int]]:
    """Return ZeRO's formula of a rank, by tier and purpose."""
    offload = None if config.offload == "none" else config.offload
    if config.mesh is not None:
        sizes = config.mesh
        parts = sizes.get("pipe", 1) * sizes.get("tensor", 1)
        numel, ranks = numel // parts, config.world_size // parts
        return zcomm.zero.memory_formula(numel, ranks, config.stage, config.precision, offload)
    if place.gpu:
        where, world_size = as_offload(offload, config.stage), config.world_size
        return gpu_formula(numel, config.stage, where, world_size, config.precision, accumulation=config.accum)
    return zcomm.zero.memory_formula(numel, config.world_size, config.stage, config.precision, offload)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: linear warmup, then a cosine down to a small part of the peak. step: 0-based."""
    warmup = max(1, round(_WARMUP * steps))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return peak * (_FINAL_LR + (1.0 - _FINAL_LR) * 0.5 * (1.0 + math.cos(math.pi * done)))


def peak_nbytes() -> int:
    """Return the largest resident memory that this process ever had, bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def windows(text: np.ndarray, starts: np.ndarray, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return inputs and targets, each int64 [len(starts), context] on the device, from the bytes at `starts`."""
    both = np.stack([text[start : start + context + 1] for start in starts]).astype(np.int64)
    tensor = torch.from_numpy(both).to(device)
    return tensor[:, :-1], tensor[:, 1:]


@dataclass
class Training:
    """One rank's run. entropy: of the text, unigram. rates: of the drive; metrics: both on rank 0."""

    config: DemoConfig
    rank: int
    text: Text
    entropy: float
    form: WholeModel
    optimizer: zcomm.ZeroOptimizer
    rates: DriveRates | None
    metrics: results.Metrics | None
    place: Place

    def run(self) -> None:
        """Train, evaluate and sample; rank 0 writes and prints."""
        config = self.config
        entropy = self.entropy
        progress = make_progress(config, self.rates, active=self.rank == 0)
        self.log("config", dataclasses.asdict(config))
        started, traffic = time.perf_counter(), None
        every = max(1, config.steps // config.evaluations) if config.evaluations else config.steps
        with progress:
            for step in range(1, config.steps + 1):
                if step == config.steps and self.form.mesh is not None:
                    with Traffic(self.form.mesh) as traffic:
                        record = self.step(step)
                else:
                    record = self.step(step)
                progress.step(record)
                progress.tiers(self.optimizer.memory(), peak_nbytes(), self.place.peak_nbytes())
                self.log("step", dataclasses.asdict(record))
                if step % every == 0 and step < config.steps:
                    loss = self.evaluate(max(1, config.windows // 4))
                    progress.validation(step, loss)
                    self.log("validation", {"step": step, "loss": loss})
        train_s = time.perf_counter() - started
        axes = None
        if traffic is not None and self.form.mesh is not None:
            axes = axis_rows(config, self.form.mesh, traffic, self.form.numel)
        loss = self.evaluate(config.windows)
        self.log("validation", {"step": config.steps, "loss": loss})
        sample = self.generate(PROMPT, config.sample_nbytes)
        if self.metrics is not None:
            memory = self.optimizer.memory()
            summary = results.Summary(
                validation_loss=loss,
                unigram_entropy=entropy,
                train_s=train_s,
                numel=self.form.numel,
                source=self.text.source,
                train_nbytes=len(self.text.train),
                validation_nbytes=len(self.text.validation),
                memory=memory,
                formula=formula_of(self.form.numel, config, self.place),
                stats=self.optimizer.stats(),
                peak_nbytes=peak_nbytes(),
                rates=None if self.rates is None else dataclasses.asdict(self.rates),
                planned=None if self.place.gpu or config.mesh else planned_nbytes(config, self.optimizer),
                sample=sample.decode("utf-8", "replace"),
                gpu=self.place.gpu,
                gpu_peak_nbytes=self.place.peak_nbytes(),
                axes=axes,
            )
            self.log("summary", dataclasses.asdict(summary))
            results.finish(config, summary, self.metrics)
        zcomm.barrier()  # no rank leaves while rank 0 still writes: a failure there fails all ranks

    def step(self, step: int) -> StepRecord:
        """Make one optimizer step: `accum` micro-steps. step: 1-based."""
        config = self.config
        before, clock = self.optimizer.stats(), Clock(self.optimizer.stats, self.place.wait)
        started = time.perf_counter()
        lr = learning_rate(step - 1, config.steps, config.lr)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        summed, waited_s = torch.zeros(1, device=self.place.device), 0.0
        for micro in range(config.accum):
            rng = np.random.default_rng([config.seed, self.form.data_rank, step, micro])
            starts = rng.integers(0, len(self.text.train) - config.context, config.batch)
            loss = self.form.passes(*windows(self.text.train, starts, config.context, self.place.device), clock)
            waited_s += self.form.waited_s
            with clock.phase("step"):
                self.optimizer.step()
                self.optimizer.zero_grad()
            summed += loss.detach().float() / config.accum
        total = summed.cpu()  # ranks meet on the host
        agreed = time.perf_counter()
        zcomm.all_reduce(total, op="avg")
        ended = time.perf_counter()
        after = self.optimizer.stats()
        comm_s = after["comm_s"] - before["comm_s"] + ended - agreed + waited_s
        swap_s = after["swap_s"] - before["swap_s"]
        if not math.isfinite(total.item()):
            raise UserError(f"the loss is {total.item()} at step {step}: lower --lr (now {config.lr})", exit_code=1)
        zcomm.log(loss=total, step=step)
        return StepRecord(
            step=step,
            loss=total.item(),
            lr=lr,
            grad_norm=self.optimizer.grad_norm or 0.0,
            tokens_per_s=config.tokens_per_step / (ended - started),
            step_s=ended - started,
            compute_s=max(0.0, ended - started - comm_s - swap_s),
            comm_s=comm_s,
            swap_s=swap_s,
            phases=clock.phases,
            bubble=self.form.bubble,
        )

    @torch.no_grad()
    def evaluate(self, count: int) -> float:
        """Return the mean loss in nats per byte over `count` evenly spaced windows of the validation text.

        The ranks share the windows.
        """
        config = self.config
        data_rank, data_size = self.form.data_rank, self.form.data_size
        per_rank = max(1, count // data_size)
        last = len(self.text.validation) - config.context - 1
        starts = np.linspace(0, last, per_rank * data_size).astype(np.int64)[data_rank::data_size]
        self.form.module.eval()
        total = torch.zeros(1, dtype=torch.float64)
        for begin in range(0, per_rank, config.batch):
            part = starts[begin : begin + config.batch]
            loss = self.form.loss(*windows(self.text.validation, part, config.context, self.place.device))
            total += loss.double().cpu() * len(part) / per_rank
        self.form.module.train()
        zcomm.all_reduce(total, op="avg")
        return float(total.item())

    @torch.no_grad()
    def generate(self, prompt: bytes, count: int, temperature: float = 0.7) -> bytes:
        """Return `prompt` and `count` bytes after it; the same on every rank."""
        generator = torch.Generator().manual_seed(self.config.seed)
        self.form.module.eval()
        tokens = torch.tensor([list(prompt)], dtype=torch.int64)
        for _ in range(count):
            logits = self.form.last_logits(tokens[:, -self.config.context :].to(self.place.device))
            chosen = torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
            tokens = torch.cat((tokens, chosen), dim=1)
        self.form.module.train()
        return bytes(tokens[0].tolist())

    def log(self, kind: str, content: dict[str, object]) -> None:
        """Write a line of metrics.jsonl, on rank 0."""
        if self.metrics is not None:
            self.metrics.write(kind, content)
