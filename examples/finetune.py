"""Fine-tune a causal language model of Hugging Face on a text file, and write checkpoints.

    python examples/finetune.py Llama-3.2-1B notes.txt                               # on a GPU, if there is one
    python examples/finetune.py Llama-3.2-1B notes.txt --memory 8GiB --out /mnt/nvme/tuned
    zcomm run -n 2 examples/finetune.py Llama-3.2-1B notes.txt                       # each rank has other samples

The model's folder is as `save_pretrained` writes it, with the tokenizer. The same command again resumes from
OUT/checkpoint, which `from_pretrained` reads, too. With --memory, weights and optimizer state are on the drive of OUT;
with a GPU, as far as they exceed the limit. Needs: pip install transformers
"""

from __future__ import annotations

import argparse
import itertools
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import zcomm
from zcomm.data import Loader

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", type=Path, help="folder with config.json, tokenizer and weights")
parser.add_argument("text", type=Path, help="text file to train on")
parser.add_argument("--out", type=Path, default=Path("tuned"), help="folder for the checkpoint (tuned)")
parser.add_argument("--memory", metavar="SIZE", help="the most host memory that a rank may hold, such as 8GiB")
parser.add_argument("--random", action="store_true", help="begin with random weights: the folder needs none")
parser.add_argument("--steps", type=int, default=100, help="optimizer steps, with those of the checkpoint (100)")
parser.add_argument("--batch", type=int, default=4, help="sequences per step and rank (4)")
parser.add_argument("--context", type=int, default=512, help="tokens per sequence (512)")
parser.add_argument("--lr", type=float, default=2e-5, help="learning rate (2e-5)")
args = parser.parse_args()
if not (args.model / "config.json").is_file():
    parser.error(f"{args.model}: not a folder with a config.json, as save_pretrained writes it")
comm = zcomm.init()  # rank and world size come from the launcher; without one, a world of one rank
device = torch.device("cuda", comm.local_rank) if torch.cuda.is_available() else torch.device("cpu")

tokenizer = AutoTokenizer.from_pretrained(args.model)
tokens = torch.tensor(tokenizer(args.text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
samples = tokens[: len(tokens) // args.context * args.context].view(-1, args.context)
if len(samples) < args.batch * comm.world_size:
    parser.error(f"{args.text}: {len(tokens)} tokens; {comm.world_size} x {args.batch} x {args.context} need more text")
loader = Loader(samples, args.batch, rank=comm.rank, world_size=comm.world_size, drop_last=True)  # shuffles

with zcomm.zero.Init():  # weights have no memory until ZeroOptimizer places them
    if args.random:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model), dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16)
for buffer in model.buffers():  # ZeroOptimizer places only the weights
    buffer.data = buffer.data.to(device)
model.train()
options = {"stage": 2, "offload": "cpu"}
if args.memory:
    limit = zcomm.zero.MemoryLimit(args.memory, activations=0 if device.type == "cuda" else None)
    options = {"stage": 3, "offload": "nvme", "nvme_path": args.out, "memory": limit}
    recompute = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    recompute({"use_reentrant": False})  # older versions of transformers have the second name
opt = zcomm.ZeroOptimizer(model, "adamw", lr=args.lr, precision="bf16", clip_norm=1.0, device=device, **options)

checkpoint = args.out / "checkpoint"
state = opt.load(checkpoint) if checkpoint.exists() else {"step": 0, "epoch": 0, "samples": 0}
loader.load_state_dict(state)  # a resumed run goes on within its epoch
epochs = itertools.chain.from_iterable(itertools.repeat(loader))  # each in another order
for step, x in zip(range(state["step"] + 1, args.steps + 1), epochs, strict=False):
    begin, x = time.perf_counter(), x.to(device)
    loss = model(input_ids=x, labels=x, use_cache=False).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    mean = torch.tensor([loss.item()])
    comm.all_reduce(mean, "avg")
    rate = comm.world_size * x.numel() / (time.perf_counter() - begin)
    if comm.rank == 0:
        print(f"step {step}: loss {mean.item():.4f}, {rate:.0f} tokens/s", flush=True)
    if step % 50 == 0 or step == args.steps:
        opt.save(checkpoint, client_state={"step": step, **loader.state_dict()})
