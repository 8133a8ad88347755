#!/usr/bin/env python3
"""Tokens of a random Llama that does not fit into a limit on memory: streamed weights next to accelerate's offload.

  bench/inference.py --dir /mnt/nvme                          (1.15 billion parameters in bf16, a limit of 1.5 GiB)
  bench/inference.py --dir /mnt/nvme --layers 2 --width 256 --words 512 --limit 2G --tokens 4

Each variant is a process of its own: whole (the reference), streamed in bf16, int8 and int4, accelerate. The last has a
quarter of the model in memory. Their loading does not count. read: GB of a forward, and its ratio to the formula: all
blocks that are streamed, except one. rate: GB/s read, over the rate of the drive, which threads measure that read a
file of 256 MiB past the page cache. peak: VmHWM in MiB. #wrong counts tokens that differ, reads that differ from the
formula by a hundredth, and peaks above the limit. The reference of int8 and int4 is the same form in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness import launch
from harness.program import make_parser, parse_size
from harness.record import JsonLines, command_line, machine

_VARIANTS = ("whole", "bf16", "int8", "int4", "accelerate")
_FILE_NBYTES, _BLOCK_NBYTES, _THREADS = 256 << 20, 1 << 20, 4
_BATCH, _PROMPT = 2, 8


def make_model(folder: Path, layers: int, width: int, words: int) -> None:
    """Write a random Llama with tied embeddings in bf16, a part at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 256), "vocab_size": words}
    config = LlamaConfig(**sizes, **heads, tie_word_embeddings=True, eos_token_id=None, dtype="bfloat16")
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    draw, places, part = torch.Generator().manual_seed(0), dict[str, str](), dict[str, torch.Tensor]()
    named = list(model.named_parameters())
    for number, (name, param) in enumerate(named):
        value = torch.ones(param.shape) if param.dim() == 1 else torch.randn(param.shape, generator=draw) * 0.05
        part[name] = value.bfloat16()
        if sum(each.nbytes for each in part.values()) > 1 << 28 or number + 1 == len(named):
            file = f"model-{number:05d}.safetensors"
            save_file(part, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(part, file)
            part = {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config.save_pretrained(folder)


def drive_rate(folder: Path) -> float:
    """Return bytes per second of threads that read one file past the page cache."""
    import mmap

    path = folder / "raw"
    if not path.exists():
        path.write_bytes(os.urandom(_FILE_NBYTES))
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    number = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))

    def read(first: int) -> None:
        memory = mmap.mmap(-1, _BLOCK_NBYTES)
        for at in range(first * _BLOCK_NBYTES, _FILE_NBYTES, _THREADS * _BLOCK_NBYTES):
            os.preadv(number, [memory], at)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(_THREADS)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(number)
    return _FILE_NBYTES / (time.perf_counter() - start)


def run_variant(variant: str, folder: Path, limit: int, tokens: int, where: str) -> dict[str, Any]:
    """Generate in this process; return tokens, seconds, bytes read and the peak."""
    import torch
    from transformers import AutoModelForCausalLM

    from zcomm.inference import stream, streamed
    from zcomm.zero import MemoryLimit
    from zcomm.zero.memory.limit import peak_nbytes

    auto: Any = AutoModelForCausalLM
    if variant == "whole":
        model: Any = auto.from_pretrained(folder, dtype="auto").eval()
    elif variant == "accelerate":
        most = {"cpu": sum(file.stat().st_size for file in folder.glob("*.safetensors")) // 4}
        out = str(folder / "offload")
        model = auto.from_pretrained(folder, dtype="auto", device_map="auto", max_memory=most, offload_folder=out)
    else:
        form = None if variant == "bf16" else variant
        memory = None if where == "cpu" else MemoryLimit(limit)
        model = stream(folder, where, form, memory=memory)
    prompts = torch.randint(3, 500, (_BATCH, _PROMPT), generator=torch.Generator().manual_seed(1))
    more = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model.generate(prompts, max_new_tokens=2, **more)
    counters = streamed(model) if where == "nvme" else None
    before = counters.stats() if counters else {"read_nbytes": 0}
    start = time.perf_counter()
    found = model.generate(prompts, max_new_tokens=tokens, **more)
    seconds = time.perf_counter() - start
    result = {
        "tokens": found.tolist(),
        "seconds": seconds,
        "peak_nbytes": peak_nbytes(),
        "read_nbytes": 0,
        "formula": 1.0,
    }
    if counters:
        result["read_nbytes"] = (counters.stats()["read_nbytes"] - before["read_nbytes"]) / tokens
        result["formula"] = (1 + result["read_nbytes"]) / (1 + counters.pass_nbytes)
    return result


def measure(variant: str, folder: Path, arguments: argparse.Namespace, where: str) -> dict[str, Any]:
    """Run ``variant`` in a process."""
    words = [variant, str(folder), str(parse_size(arguments.limit)), str(arguments.tokens), where]
    command = [sys.executable, __file__, "--child", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout, check=False)
    if done.returncode:
        raise SystemExit(f"{variant}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(words: list[str]) -> int:
    if words[:1] == ["--child"]:
        variant, folder, limit, tokens, where = words[1:]
        print(json.dumps(run_variant(variant, Path(folder), int(limit), int(tokens), where)))
        return 0
    parser = make_parser("bench/inference.py", __doc__)
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="on the drive")
    for flag, default in (("--layers", 24), ("--width", 2048), ("--words", 32000), ("--tokens", 32)):
        add(flag, type=int, default=default, help=f"({default})")
    add("--limit", default="1536M", help="on the memory of a process (1536M)")
    add("--variants", default=",".join(_VARIANTS), help="by commas; whole comes first")
    add("--json", metavar="FILE", help="write machine and results as JSON lines")
    add("--timeout", type=float, default=1800.0, help="seconds of a variant (1800)")
    arguments = parser.parse_args(words)
    launch.use_project_python()
    lines, wrong = JsonLines(arguments.json), 0
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    print("# variant    tokens/s    read formula   rate    of   peak #wrong")
    with tempfile.TemporaryDirectory(prefix="zcomm-inference-", dir=arguments.dir.resolve()) as place:
        folder = Path(place)
        make_model(folder, arguments.layers, arguments.width, arguments.words)
        whole: Any = None
        for variant in arguments.variants.split(","):
            rate, streams = drive_rate(folder), variant in ("bf16", "int8", "int4")
            found = measure(variant, folder, arguments, "nvme" if streams else "none")
            want = measure(variant, folder, arguments, "cpu") if variant in ("int8", "int4") else whole or found
            whole = whole or found
            row = {"kind": "row", "variant": variant, "drive": rate, **found}
            row["wrong"] = sum(a != b for a, b in zip(found["tokens"], want["tokens"], strict=True))
            row["wrong"] += streams and abs(found["formula"] - 1) > 0.01
            row["wrong"] += streams and found["peak_nbytes"] > parse_size(arguments.limit)
            speed = _BATCH * arguments.tokens / found["seconds"]
            gbps = found["read_nbytes"] * arguments.tokens / found["seconds"] / 1e9
            print(
                f"  {variant:<10} {speed:8.2f} {found['read_nbytes'] / 1e9:7.3f} {found['formula']:7.3f} {gbps:6.2f} "
                f"{gbps * 1e9 / rate:5.2f} {found['peak_nbytes'] >> 20:6} {row['wrong']:6}",
                flush=True,
            )
            lines.write(row)
            wrong += row["wrong"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
