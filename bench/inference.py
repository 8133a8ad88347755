#!/usr/bin/env python3
"""Tokens of random models that do not fit into a limit on memory: streamed weights next to accelerate's offload.

  bench/inference.py --dir /mnt/nvme                          (3 billion parameters in bf16, a limit of 2 GiB)
  bench/inference.py --dir /mnt/nvme --layers 2 --width 256 --words 512 --experts 0 --tokens 4

Each variant is a process of its own: whole (the reference), streamed in bf16, int8 and int4, accelerate. Then a mixture
of experts, whole and streamed by routed experts. Their loading does not count. Once they have loaded, streams and
accelerate have RLIMIT_DATA at the limit (before that, private mappings of the model's files would count as data).
accelerate has half of the limit for weights. While it runs the page cache of its files is dropped all the time,
because a host of the limit's size has none.
tokens/s: of a batch. read: GB of a forward. formula: over the bytes that it must read (Streamed.pass_nbytes, and the
routed experts as the routes count them). rate: GB/s read. of: rate over fio's just before or after, whichever is more
(harness/drive.py). The drive of a virtual machine changes in seconds, so this may exceed 1. bound: seconds that reading
or computing takes at least, over the seconds taken. Computing is measured by the reference: the same form in host
memory.
peak: VmHWM of the whole life, in MiB. #wrong counts tokens that differ, reads that differ from the formula by a
hundredth, and peaks above the limit. The reference of int8 and int4 is the same form in host memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from harness import launch
from harness.drive import read_rate
from harness.program import make_parser, parse_size
from harness.record import JsonLines, command_line, machine

_VARIANTS = ("whole", "bf16", "int8", "int4", "accelerate", "experts whole", "experts")
_STREAMED = ("bf16", "int8", "int4", "experts")
_FILE_NBYTES, _FIO_S = 1 << 30, 3.0
_PROMPT, _SLOW_TOKENS = 8, 4  # accelerate's tokens: it needs minutes for more
_ACTIVATIONS = "384MiB"  # of cache, logits and hidden states
_CHOSEN = 4  # experts of a token


def make_model(folder: Path, layers: int, width: int, words: int, experts: int) -> None:
    """Write a random Llama, or a random Qwen3-MoE with ``experts``, with tied embeddings in bf16, a part at a time."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

    sizes = {"hidden_size": width, "intermediate_size": width * 11 // 4, "num_hidden_layers": layers}
    heads = {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 256), "head_dim": 64}
    more: dict[str, Any] = {"tie_word_embeddings": True, "eos_token_id": None, "dtype": "bfloat16", "vocab_size": words}
    kind: Any = LlamaConfig
    if experts:
        kind = Qwen3MoeConfig
        more |= {"moe_intermediate_size": width * 3 // 8, "num_experts": experts, "num_experts_per_tok": _CHOSEN}
    config = kind(**sizes, **heads, **more)
    with torch.device("meta"):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config)
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


class Uncached(threading.Thread):
    """Drops the page cache of the files in ``folder`` until ``end``."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self._folder, self._over = folder, threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.2):
            for path in self._folder.rglob("*"):
                if path.is_file() and path.name != "raw":
                    number = os.open(path, os.O_RDONLY)
                    os.posix_fadvise(number, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(number)

    def end(self) -> None:
        self._over.set()
        self.join()


def run_variant(variant: str, folder: Path, limit: int, tokens: int, batch: int, where: str) -> dict[str, Any]:
    """Generate in this process; return tokens, seconds, bytes read and the peak."""
    import torch
    from transformers import AutoModelForCausalLM

    from zcomm.inference import stream, streamed
    from zcomm.zero import MemoryLimit
    from zcomm.zero.memory.limit import peak_nbytes

    auto: Any = AutoModelForCausalLM
    if variant in ("whole", "experts whole"):
        model: Any = auto.from_pretrained(folder, dtype="auto").eval()
        if variant == "experts whole":
            model.set_experts_implementation("eager")  # as streamed
    elif variant == "accelerate":
        most = {"cpu": limit // 2}  # the other half holds libraries, a layer, and its copies
        out = str(folder / "offload")
        model = auto.from_pretrained(folder, dtype="auto", device_map="auto", max_memory=most, offload_folder=out)
    else:
        form: Any = variant if variant in ("int8", "int4") else None
        memory = None if where == "cpu" else MemoryLimit(limit, activations=_ACTIVATIONS)
        model = stream(folder, where, form, memory=memory)
    if where != "cpu":
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    prompts = torch.randint(3, 500, (batch, _PROMPT), generator=torch.Generator().manual_seed(1))
    more = {"attention_mask": torch.ones_like(prompts), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    if variant != "accelerate":
        model.generate(prompts, max_new_tokens=2, **more)
    counters = streamed(model) if where == "nvme" else None
    before = counters.stats() if counters else {}
    start = time.perf_counter()
    found = model.generate(prompts, max_new_tokens=tokens, **more)
    seconds = time.perf_counter() - start
    result = {"tokens": found[:, _PROMPT:].tolist(), "seconds": seconds / tokens, "peak_nbytes": peak_nbytes()}
    result |= {"read_nbytes": 0, "formula": 1.0, "waited": 0.0}
    if counters:
        after = {name: (value - before[name]) / tokens for name, value in counters.stats().items()}
        result["read_nbytes"], result["waited"] = after["read_nbytes"], after["waited_s"] * tokens / seconds
        result["formula"] = (1 + after["read_nbytes"]) / (1 + counters.pass_nbytes + after["routed_nbytes"])
    return result


def measure(variant: str, folder: Path, arguments: argparse.Namespace, where: str) -> dict[str, Any]:
    """Run ``variant`` in a process."""
    tokens = min(_SLOW_TOKENS, arguments.tokens) if variant == "accelerate" else arguments.tokens
    words = [variant, str(folder), str(parse_size(arguments.limit)), str(tokens), str(arguments.batch), where]
    command = [sys.executable, __file__, "--child", *words]
    uncached = Uncached(folder) if variant == "accelerate" else None
    if uncached:
        uncached.start()
    done = subprocess.run(command, capture_output=True, text=True, timeout=arguments.timeout, check=False)
    if uncached:
        uncached.end()
    if done.returncode:
        raise SystemExit(f"{variant}: {done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def count_wrong(found: dict[str, Any], want: dict[str, Any], variant: str, limit: int) -> int:
    """Count tokens that differ, and figures out of their range."""
    wrong = 0
    for mine, theirs in zip(found["tokens"], want["tokens"], strict=True):
        wrong += sum(a != b for a, b in zip(mine, theirs, strict=False))
    if variant in _STREAMED:
        wrong += (abs(found["formula"] - 1) > 0.01) + (found["peak_nbytes"] > limit)
    return wrong


def main(words: list[str]) -> int:
    if words[:1] == ["--child"]:
        variant, folder, limit, tokens, batch, where = words[1:]
        print(json.dumps(run_variant(variant, Path(folder), int(limit), int(tokens), int(batch), where)))
        return 0
    parser = make_parser("bench/inference.py", __doc__)
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="on the drive")
    numbers = {"--layers": 29, "--width": 3072, "--words": 32000, "--experts": 32, "--tokens": 32, "--batch": 2}
    for flag, default in numbers.items():
        add(flag, type=int, default=default, help=f"({default})")
    add("--limit", default="2G", help="on the memory of a process (2G)")
    add("--variants", default=",".join(_VARIANTS), help="by commas; references come first")
    add("--json", metavar="FILE", help="write machine and results as JSON lines")
    add("--timeout", type=float, default=1800.0, help="seconds of a variant (1800)")
    arguments = parser.parse_args(words)
    launch.use_project_python()
    lines, wrong, limit = JsonLines(arguments.json), 0, parse_size(arguments.limit)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    print("# variant        tokens/s    read formula   rate    of  bound waited   peak #wrong")
    with tempfile.TemporaryDirectory(prefix="zcomm-inference-", dir=arguments.dir.resolve()) as place:
        wants: dict[Path, dict[str, Any]] = {}
        for variant in arguments.variants.split(","):
            folder = Path(place, "experts" if variant.startswith("experts") else "dense")
            if variant.startswith("experts") and not arguments.experts:
                continue
            if not folder.exists():
                folder.mkdir()
                experts = arguments.experts if folder.name == "experts" else 0
                layers = max(1, arguments.layers // 6) if experts else arguments.layers
                make_model(folder, layers, arguments.width, arguments.words, experts)
            streams = variant in _STREAMED
            rate = read_rate(Path(place, "raw"), _FILE_NBYTES, _FIO_S)
            found = measure(variant, folder, arguments, "nvme" if streams else "none" if "acc" in variant else "cpu")
            rate = max(rate, read_rate(Path(place, "raw"), _FILE_NBYTES, _FIO_S))
            want = measure(variant, folder, arguments, "cpu") if variant in ("int8", "int4") else None
            want = want or wants.setdefault(folder, found)
            row = {"kind": "row", "variant": variant, "batch": arguments.batch, "drive": rate, **found}
            row |= {"computing": want["seconds"], "wrong": count_wrong(found, want, variant, limit)}
            gbps, bound = found["read_nbytes"] / found["seconds"] / 1e9, found["read_nbytes"] / rate
            row |= {"gbps": gbps, "of": gbps * 1e9 / rate, "bound": max(bound, want["seconds"]) / found["seconds"]}
            row["tokens_per_s"] = arguments.batch / found["seconds"]
            print(
                f"  {variant:<13} {row['tokens_per_s']:9.2f} {found['read_nbytes'] / 1e9:7.3f} {found['formula']:7.3f} "
                f"{gbps:6.2f} {row['of']:5.2f} {row['bound']:6.2f} {found['waited']:6.2f} "
                f"{found['peak_nbytes'] >> 20:6} {row['wrong']:6}",
                flush=True,
            )
            lines.write(row)
            wrong += row["wrong"]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
