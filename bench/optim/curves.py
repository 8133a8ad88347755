"""Training curves of the demo's GPT with CPUAdam's state in fp32, bf16 and 8 bits: the same data in the same order.

  bench/adam.py curves --json curves.jsonl --png curves.png     (240 steps, 2 seeds: some minutes)

The noise is what another seed changes. fp32 is trained with each seed, the small states with each seed as well. A
state's difference from fp32 is printed beside the spread of the fp32 runs.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from harness import launch
from harness.program import make_parser
from harness.record import JsonLines, command_line, machine

STATES = {"fp32": "float32", "bf16": "bfloat16", "8bit": "uint8"}
LAST = 20  # steps; their mean loss is a run's result


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/adam.py curves", __doc__)
    add = parser.add_argument
    add("--steps", type=int, default=240)
    add("--seeds", type=int, default=2)
    add("--layers", type=int, default=4)
    add("--width", type=int, default=96)
    add("--context", type=int, default=64)
    add("--batch", type=int, default=4)
    add("--lr", type=float, default=2e-3)
    add("--json", metavar="FILE")
    add("--png", metavar="FILE")
    return parser.parse_args(words)


def train(arguments: argparse.Namespace, state: str, seed: int, text: Any) -> list[float]:
    """Train, and return the loss of each step."""
    import torch

    from zcomm.demo.model import GPT, ModelConfig
    from zcomm.optim import CPUAdam

    model = GPT(ModelConfig(arguments.layers, 4, arguments.width, arguments.context, seed))
    optimizer = CPUAdam(
        model.parameters(), lr=arguments.lr, weight_decay=0.1, state_dtype=getattr(torch, STATES[state])
    )
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for step in range(arguments.steps):
        starts = torch.randint(len(text) - arguments.context - 1, (arguments.batch,), generator=generator)
        batch = torch.stack([text[start : start + arguments.context + 1] for start in starts.tolist()]).long()
        optimizer.param_groups[0]["lr"] = arguments.lr * min(1.0, (step + 1) / 20)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def draw(runs: dict[str, list[list[float]]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    window = 10
    for state, curves in runs.items():
        mean = [statistics.mean(values) for values in zip(*curves, strict=True)]
        smooth = [statistics.mean(mean[max(0, i - window + 1) : i + 1]) for i in range(len(mean))]
        axes.plot(range(1, len(mean) + 1), smooth, label=f"{state} state", linewidth=1.2)
    exact = list(zip(*runs["fp32"], strict=True))
    low, high = ([pick(values) for values in exact] for pick in (min, max))
    axes.fill_between(range(1, len(low) + 1), low, high, alpha=0.15, label="fp32, all seeds")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"Demo GPT, CPUAdam, mean of {len(exact[0])} seeds, smoothed over {window} steps")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    import torch

    from zcomm.demo.text import load_text

    text = torch.from_numpy(load_text(None).train.copy())
    runs = {state: [train(arguments, state, seed, text) for seed in range(1, arguments.seeds + 1)] for state in STATES}
    last = {state: [statistics.mean(curve[-LAST:]) for curve in curves] for state, curves in runs.items()}
    spread = max(last["fp32"]) - min(last["fp32"])
    lines = JsonLines(arguments.json)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    for state, values in last.items():
        apart = statistics.mean(mine - exact for mine, exact in zip(values, last["fp32"], strict=True))
        shown = ", ".join(f"{value:.4f}" for value in values)
        print(f"{state:>5} state: loss of the last {LAST} steps {shown}; mean difference from fp32 {apart:+.4f}")
        curves = [[round(value, 5) for value in curve] for curve in runs[state]]
        lines.write({"kind": "curve", "state": state, "last": values, "difference": apart, "losses": curves})
    print(f"spread of fp32 over seeds: {spread:.4f}")
    lines.write({"kind": "spread", "fp32": spread})
    if arguments.png:
        draw(runs, arguments.png)
    return 0
