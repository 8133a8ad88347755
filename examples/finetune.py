"""Fine-tune a causal language model of Hugging Face on a text file: one process, one GPU or the CPU.

    python examples/finetune.py Llama-3.2-1B notes.txt
    python examples/finetune.py Llama-3.2-1B notes.txt --memory 8GiB --swap /mnt/nvme

The model's folder is one of `save_pretrained`: config.json, *.safetensors, the tokenizer. Without weights the model is
random, without a tokenizer the text is read as bytes. The same command again resumes from tuned/checkpoint, a folder
that `from_pretrained` reads, too. --memory limits the memory of the process, not of the GPU. Weights and optimizer
state are then on the drive; with a GPU, as far as they exceed the limit. Needs: pip install transformers
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import zcomm


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", type=Path, help="folder with config.json")
    add("text", type=Path, help="text file to train on")
    add("--out", type=Path, default=Path("tuned"), help="folder for the checkpoint (tuned)")
    add("--memory", metavar="SIZE", help="the most memory that the process may hold, such as 8GiB")
    add("--swap", type=Path, metavar="DIR", help="folder on a local drive, used with --memory (OUT/swap)")
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--lr", type=float, default=2e-5, help="learning rate (2e-5)")
    add("--steps", type=int, default=100, help="optimizer steps, with those of the checkpoint (100)")
    add("--batch", type=int, default=4, help="sequences per step (4)")
    add("--context", type=int, default=512, help="tokens per sequence (512)")
    add("--save-every", type=int, default=50, help="steps between two checkpoints (50)")
    args = parser.parse_args()
    if min(args.steps, args.batch, args.context, args.save_every) < 1:
        fail("--steps, --batch, --context and --save-every are at least 1")
    if args.device == "cuda" and not torch.cuda.is_available():
        fail("--device cuda: torch finds no CUDA device; leave --device out to train on the CPU")
    if not (args.model / "config.json").is_file():
        fail(f"{args.model}: not a folder with a config.json, as save_pretrained writes it")
    if not args.text.is_file() or not args.text.stat().st_size:
        fail(f"{args.text}: no such file, or an empty one")
    return args


def fail(message: object) -> NoReturn:
    print(f"finetune.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def read_tokens(args: argparse.Namespace, vocab_size: int) -> torch.Tensor:
    """Return the tokens of the text, int64."""
    if any(args.model.glob("tokenizer*")):
        text = args.text.read_text(encoding="utf-8", errors="replace")
        tokens = torch.tensor(AutoTokenizer.from_pretrained(args.model)(text, verbose=False)["input_ids"])
    else:
        tokens = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
    if len(tokens) < args.batch * args.context:
        fail(f"{args.text}: {len(tokens)} tokens; a batch of {args.batch} x {args.context} needs more text")
    if int(tokens.max()) >= vocab_size:
        fail(f"{args.model}: the model has {vocab_size} words, the text has token {int(tokens.max())}")
    return tokens


def make_optimizer(args: argparse.Namespace, model: torch.nn.Module) -> zcomm.ZeroOptimizer:
    """Choose the places of weights and state. Raises: ValueError for a limit that is invalid or too small."""
    on_gpu = args.device == "cuda"
    options: dict[str, Any] = {"stage": 2, "offload": "cpu" if on_gpu else None}
    if args.memory:
        swap = args.swap or args.out / "swap"
        swap.mkdir(parents=True, exist_ok=True)
        limit = zcomm.zero.MemoryLimit(args.memory, 0 if on_gpu else None)  # a GPU holds the activations
        options = {"stage": 3, "offload": "nvme", "nvme_path": swap, "memory": limit}
    return zcomm.ZeroOptimizer(
        model, "adamw", lr=args.lr, precision="bf16", clip_norm=1.0, device=args.device, **options
    )


def main() -> None:
    args = parse_arguments()
    config = AutoConfig.from_pretrained(args.model)
    tokens = read_tokens(args, config.vocab_size)
    torch.manual_seed(0)
    with zcomm.zero.Init():  # weights have no memory until ZeroOptimizer places them
        if any(file.suffix in (".safetensors", ".bin") for file in args.model.iterdir()):
            model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
        else:
            print(f"{args.model} has no weights: training begins with random ones")
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for buffer in model.buffers():  # ZeroOptimizer places the weights
        buffer.data = buffer.data.to(args.device)
    model.train()
    if args.memory:
        recompute = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        recompute({"use_reentrant": False})  # the first name is of new versions of transformers
    checkpoint, done = args.out / "checkpoint", 0
    try:
        opt = make_optimizer(args, model)
        if checkpoint.exists():
            done = opt.load(checkpoint)["step"]
            print(f"resumed from {checkpoint} at step {done}")
    except (OSError, ValueError, NotImplementedError) as error:  # each names value and remedy
        fail(error)

    for step in range(done + 1, args.steps + 1):
        begin = time.perf_counter()
        generator = torch.Generator().manual_seed(step)  # a resumed run has the same batches
        starts = torch.randint(len(tokens) - args.context + 1, (args.batch,), generator=generator)
        x = torch.stack([tokens[start : start + args.context] for start in starts.tolist()]).to(args.device)
        loss = model(input_ids=x, labels=x, use_cache=False).loss
        loss.backward()
        opt.step()
        opt.zero_grad()
        value = loss.item()  # waits for the GPU
        print(f"step {step}: loss {value:.4f}, {x.numel() / (time.perf_counter() - begin):.0f} tokens/s", flush=True)
        if step % args.save_every == 0 or step == args.steps:
            opt.save(checkpoint, client_state={"step": step})
    print(f"peak memory of the process {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")
    if args.device == "cuda":
        print(f"peak memory of torch on the GPU {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
    opt.close()


if __name__ == "__main__":
    main()
