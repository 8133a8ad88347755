"""Fine-tuning of a decoder of Llama's architecture with its state, or its parameters too, off the GPU.

    python bench/finetune_llama.py --model 7b --offload cpu
    python bench/finetune_llama.py --model 7b --stage 3 --offload nvme --nvme-path /mnt/nvme --steps 50
    python bench/finetune_llama.py --weights ~/Llama-3.2-1B --data mytext.txt --save out
    zcomm run -n 2 bench/finetune_llama.py --model tiny --offload cpu        # without a GPU, too

bf16 with an exact fp32 master. Random weights, or --weights: a folder with config.json and *.safetensors. The text is
read as bytes, unless tokenizers is installed and tokenizer.json lies next to the weights. At the end it prints the cost
of offload in this run, and the share that compute hid; offloaded/figures.py has the formulas.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zcomm
from offloaded import figures
from offloaded.report import report
from zcomm.demo.llama import PRESETS, Llama, LlamaConfig, loss_of
from zcomm.demo.text import load_text
from zcomm.machine.gpu_specs import peak_flops

_REST = 0.9  # of the GPU's memory that training without offload may take to be tried
_WHOLE = 0.6  # of the GPU's memory: larger weights are never whole on the device
_WARMUP, _REFERENCE_STEPS = 2, 5
_TAKES_DEVICE = "device" in inspect.signature(zcomm.ZeroOptimizer).parameters


def transformers_llama(config: LlamaConfig, recompute: bool) -> nn.Module:
    """Build LlamaForCausalLM of Hugging Face's transformers from the same config. Raises: ImportError."""
    from transformers import LlamaConfig as TheirConfig
    from transformers import LlamaForCausalLM

    their: dict[str, Any] = {field.name: getattr(config, field.name) for field in fields(LlamaConfig)}
    model = LlamaForCausalLM(TheirConfig(**their, use_cache=False))
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", choices=PRESETS, default="1b", help="random weights of this size (1b)")
    model.add_argument("--weights", type=Path, metavar="DIR", help="config.json and *.safetensors")
    add("--code", choices=("own", "transformers", "auto"), default="auto", help="auto: transformers if it is installed")
    add("--offload", choices=("none", "cpu", "nvme"), default="cpu")
    add("--stage", type=int, choices=(0, 1, 2, 3), default=2, help="3: parameters are offloaded, too (2)")
    add("--nvme-path", metavar="DIR[,DIR]", help="where to swap, one directory per drive")
    add("--data", metavar="PATH", help="a text file, or a folder of them (default: Python's standard library)")
    add("--steps", type=int, default=20)
    add("--batch", type=int, help="sequences per rank and micro-step (4; tiny: 2)")
    add("--context", type=int, help="tokens per sequence (2048; tiny: 64)")
    add("--accum", type=int, default=1, help="micro-steps per step")
    add("--lr", type=float, default=2e-5)
    add("--clip", type=float, default=1.0)
    add("--recompute", choices=("on", "off", "auto"), default="auto", help="activation checkpointing (off for tiny)")
    add("--bucket-mb", type=float, default=25.0)
    add("--print-every", type=int, default=5)
    add("--device", choices=("cuda", "cpu", "auto"), default="auto")
    add("--peak-tflops", type=float, help="of the GPU in bf16, if its name is not known here")
    add("--no-reference", action="store_true", help="do not time steps without offload first")
    add("--save", type=Path, metavar="DIR", help="write a checkpoint at the end")
    add("--seed", type=int, default=1)
    arguments = parser.parse_args()
    small = arguments.model == "tiny" and arguments.weights is None
    arguments.batch = arguments.batch or (2 if small else 4)
    arguments.context = arguments.context or (64 if small else 2048)
    arguments.recompute = arguments.recompute == "on" or (arguments.recompute == "auto" and not small)
    if arguments.offload == "nvme" and not arguments.nvme_path:
        parser.error("--offload nvme needs --nvme-path, a directory on the drive")
    if min(arguments.steps, arguments.batch, arguments.context, arguments.accum, arguments.print_every) < 1:
        parser.error("--steps, --batch, --context, --accum and --print-every are at least 1")
    return arguments


class Job:
    """Data that does not change during the run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.comm = zcomm.init()
        wanted = arguments.device
        if wanted == "cuda" and not torch.cuda.is_available():
            sys.exit("--device cuda: torch sees no CUDA device here")
        self.device = torch.device("cpu")
        if wanted != "cpu" and torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", "0"))
            self.device = torch.device("cuda", local % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        self.config = LlamaConfig.load(arguments.weights) if arguments.weights else PRESETS[arguments.model]
        self.code = self._code()
        self.numel = self.config.numel()
        self.name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.peak = arguments.peak_tflops * 1e12 if arguments.peak_tflops else peak_flops(self.name)
        self.words = read_words(arguments, self.config.vocab_size)
        self.tokens = arguments.batch * arguments.context * arguments.accum  # per rank and step
        self.flops_per_token = self.config.flops_per_token(arguments.context)

    def _code(self) -> str:
        if self.arguments.code != "auto":
            return str(self.arguments.code)
        from importlib.util import find_spec

        return "transformers" if find_spec("transformers") else "own"

    def say(self, text: str = "") -> None:
        if self.comm.rank == 0:
            print(text, flush=True)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def deferred(self) -> bool:
        """Return True if the model is built without memory: ZeroOptimizer then allocates it, shard by shard."""
        if self.device.type == "cpu":
            return self.arguments.weights is not None
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return self.arguments.stage == 3 and 2 * self.numel > _WHOLE * memory and _TAKES_DEVICE

    def make_model(self) -> nn.Module:
        """Make the model with the same weights on every rank, in bf16, on the device unless deferred()."""
        make: Callable[[LlamaConfig, bool], nn.Module] = Llama if self.code == "own" else transformers_llama
        torch.manual_seed(self.arguments.seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            if self.deferred():
                with zcomm.zero.Init():
                    model = make(self.config, self.arguments.recompute)
            else:
                with self.device:
                    model = make(self.config, self.arguments.recompute)
        finally:
            torch.set_default_dtype(before)
        if self.arguments.weights:
            zcomm.zero.load_weights(model, self.arguments.weights)
        return model.train()

    def batch(self, step: int, micro: int) -> Tensor:
        """Return the tokens [batch, context + 1] of this rank."""
        a = self.arguments
        generator = torch.Generator().manual_seed(((a.seed * 1000003 + self.comm.rank) * 1000003 + step) * 64 + micro)
        starts = torch.randint(len(self.words) - a.context, (a.batch,), generator=generator)
        found = torch.stack([self.words[start : start + a.context + 1] for start in starts.tolist()]).long()
        return found.to(self.device, non_blocking=True)


def read_words(arguments: argparse.Namespace, vocab_size: int) -> Tensor:
    """Return the token numbers of the text, int32. Raises: ValueError for less text than one sequence."""
    text = load_text(arguments.data).train
    tokenizer = arguments.weights / "tokenizer.json" if arguments.weights else None
    if tokenizer is not None and tokenizer.exists():
        from tokenizers import Tokenizer  # it comes with transformers

        encoded = Tokenizer.from_file(str(tokenizer)).encode(text.tobytes().decode("utf-8", "replace")).ids
        words = torch.tensor(encoded, dtype=torch.int32)
    else:
        words = torch.from_numpy(text.astype("int32"))
    if int(words.max()) >= vocab_size or len(words) <= arguments.context + 1:
        raise ValueError(
            f"{len(words)} tokens up to {int(words.max())}; context {arguments.context}, words {vocab_size}"
        )
    return words


def time_steps(job: Job, step: Callable[[int], object], count: int, warmup: int = _WARMUP) -> float:
    """Measure the seconds of one step, over `count` in a row without a wait for the GPU in between."""
    for number in range(warmup):
        step(number)
    job.synchronize()
    job.comm.barrier()
    begin = time.perf_counter()
    for number in range(count):
        step(number)
    job.synchronize()
    return (time.perf_counter() - begin) / count


def compute_alone(job: Job) -> float | None:
    """Measure forward and backward, dropping each gradient once accumulated; None if the model is built deferred."""
    model = job.make_model()
    if any(parameter.is_meta for parameter in model.parameters()):
        return None

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    hooks = [parameter.register_post_accumulate_grad_hook(drop) for parameter in model.parameters()]

    def step(number: int) -> None:
        for micro in range(job.arguments.accum):
            loss_of(model, job.batch(number, micro)).backward()

    taken = time_steps(job, step, _REFERENCE_STEPS)
    for hook in hooks:
        hook.remove()
    return taken


def without_offload(job: Job) -> tuple[float | None, str]:
    """Measure the seconds of a step without offload. Returns: them and the optimizer, or None and the reason."""
    needs = 16 * job.numel // job.comm.world_size
    if job.device.type == "cuda" and needs > _REST * torch.cuda.get_device_properties(job.device).total_memory:
        return None, f"does not fit: {figures.shown(needs)} of weights, gradients and state"
    optimizer: torch.optim.Optimizer | None = None
    try:
        model, name = job.make_model(), "ZeroOptimizer"
        try:
            optimizer = make_optimizer(job, model, None)
        except (NotImplementedError, ValueError) as error:
            if job.comm.world_size > 1:
                return None, f"ZeroOptimizer: {error}"
            del model
            release(job)
            model = job.make_model()
            optimizer = torch.optim.AdamW(model.parameters(), lr=job.arguments.lr, fused=True)
            name = f"torch's fused AdamW in bf16; ZeroOptimizer: {error}"
        return time_steps(job, training_step(job, model, optimizer), _REFERENCE_STEPS), name
    except (torch.cuda.OutOfMemoryError, zcomm.CudaError) as error:
        if isinstance(error, zcomm.CudaError) and "out of memory" not in str(error):
            raise
        return None, "does not fit: out of device memory"
    finally:
        if isinstance(optimizer, zcomm.ZeroOptimizer):
            optimizer.close()


def make_optimizer(job: Job, model: nn.Module, offload: str | None) -> zcomm.ZeroOptimizer:
    a = job.arguments
    return zcomm.ZeroOptimizer(
        model,
        "adamw",
        lr=a.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        stage=a.stage,
        offload=offload,
        nvme_path=a.nvme_path.split(",") if offload == "nvme" else None,
        precision="bf16",
        clip_norm=a.clip or None,
        grad_accum=a.accum,
        bucket_mb=a.bucket_mb,
        **({"device": job.device} if job.deferred() and job.device.type == "cuda" else {}),
    )


def training_step(job: Job, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[int], Tensor]:
    """Return the training step: a function of the step's number that returns the mean loss of its micro-steps."""

    def step(number: int) -> Tensor:
        total = torch.zeros((), device=job.device)
        for micro in range(job.arguments.accum):
            loss = loss_of(model, job.batch(number, micro))
            loss.backward()
            if isinstance(optimizer, zcomm.ZeroOptimizer) or micro == job.arguments.accum - 1:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / job.arguments.accum
        return total

    return step


def train(job: Job, model: nn.Module, optimizer: zcomm.ZeroOptimizer) -> tuple[list[float], float, float]:
    """Run all steps and print a line now and then.

    Returns: seconds per step of each line but the first, and swap seconds and bytes per step.
    """
    a, step = job.arguments, training_step(job, model, optimizer)
    taken, begin, done, before = [], time.perf_counter(), 0, optimizer.stats()
    for number in range(1, a.steps + 1):
        loss = step(number)
        if number % a.print_every and number != a.steps:
            continue
        mean = loss.float().cpu().reshape(1)  # waits for the device
        job.comm.all_reduce(mean, "avg")
        now = time.perf_counter()
        seconds = (now - begin) / (number - done)
        rate = job.tokens / seconds
        used = figures.mfu(job.flops_per_token, rate, job.peak)
        words = "" if used is None else f", MFU {100 * used:.1f} %"
        world = job.comm.world_size
        job.say(f"step {number}: loss {mean.item():.4f}, {seconds:.3f} s, {world * rate:.0f} tokens/s{words}")
        if done or number == a.steps:
            taken.append(seconds)
        begin, done = time.perf_counter(), number
    after = optimizer.stats()
    moved = after["swap_read_nbytes"] + after["swap_written_nbytes"]
    moved -= before["swap_read_nbytes"] + before["swap_written_nbytes"]
    swap_s = sum(after[key] - before[key] for key in ("swap_read_s", "swap_write_s"))
    return taken, swap_s / a.steps, moved / a.steps


def main() -> int:
    arguments = parse_arguments()
    job = Job(arguments)
    world = job.comm.world_size
    job.say(
        f"{job.numel / 1e6:.1f}M parameters ({job.code} code), bf16, stage {arguments.stage}, offload "
        f"{arguments.offload}, {world} rank{'s' if world > 1 else ''} on {job.name}; {arguments.accum} x "
        f"{arguments.batch} x {arguments.context} tokens per rank and step"
    )
    compute, none, name = None, None, "not asked for"
    offloads = arguments.offload != "none"
    if not arguments.no_reference:
        compute = compute_alone(job)
        release(job)
        if offloads:
            none, name = without_offload(job)
            release(job)
    host = figures.measure_host(job.device, job.numel)
    model = job.make_model()
    optimizer = make_optimizer(job, model, arguments.offload if offloads else None)
    taken, swap_s, moved = train(job, model, optimizer)
    times = figures.Times(statistics.median(taken), compute, none, swap_s)
    report(job, optimizer, times, name, host, moved)
    if arguments.save:
        optimizer.save(arguments.save)
        job.say(f"saved to {arguments.save}")
    optimizer.close()
    zcomm.shutdown()
    return 0


def release(job: Job) -> None:
    """Free cached memory of the previous phase and reset the peak counter."""
    gc.collect()
    if job.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(job.device)


if __name__ == "__main__":
    sys.exit(main())
