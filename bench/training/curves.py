"""Training curves of the demo's GPT with encoded collectives, next to exact ones: the same data in the same order.

  bench/zero.py curves                                     (2 ranks, 800 steps, 3 seeds: some minutes)
  bench/zero.py curves --forms exact,d4g4 --seeds 1
  bench/zero.py curves --language                          (sentences of known entropy instead of text)

A run's result is the mean loss of its last steps on all ranks. The rate falls to a twentieth, so that this mean is
steady. Each form is compared with "exact" of the same seed.

* Text is learnt slowly: the loss still falls after 800 steps, and any small change moves it by hundredths. --twins 4
  trains each form four times, from first weights that differ in their ninth bit. It compares means, and prints their
  standard error.
* Rounding adds noise to gradients. Adam's second moment of elements with small gradients then grows, so that their
  steps shrink, as by a larger eps. With Adam's usual 1e-8 a larger eps or some noise trains better here. The
  default is about the size of int8's noise.
* With --language a token follows from the one before up to one bit, so ln 2 = 0.693 nats remain. A model of 48 channels
  comes near that, and differences of thousandths show.

Forms:
* exact: stage 2 without codecs; noise: the same, with random noise of the size of int8's rounding in the gradients
* int8, int4: gradients; int4r: rotated first
* w8g4: weights of stage 3 in int8, gradients in int4
* d8g4, d4g4: differences of weights in int8 or int4, rotated gradients in int4
* onebit: 1-bit Adam, which is AdamW for the first quarter of the steps
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from itertools import product
from typing import Any

from harness import launch
from harness.program import add_run_arguments, listed, make_parser
from harness.record import JsonLines, command_line, machine

FORMS: dict[str, dict[str, Any]] = {  # zcomm.Compression of each
    "exact": {},
    "noise": {},
    "int8": {"gradients": "int8"},
    "int4": {"gradients": "int4"},
    "int4r": {"gradients": "int4", "rotate": 32},
    "w8g4": {"weights": "int8", "gradients": "int4"},
    "d8g4": {"weights": "int8", "differences": True, "gradients": "int4", "rotate": 32},
    "d4g4": {"weights": "int4", "differences": True, "gradients": "int4", "rotate": 32},
    "onebit": {},
}
GOALS = {"int8": 0.01, "int4": 0.01, "d8g4": 0.02, "onebit": 0.02}  # nats per byte
BLOCK = 256  # elements with one scale, as codecs have
TWIN = 2**-9  # relative changes of the first weights of a twin: those of 8 significant bits
LAST = 50  # steps; their mean loss is a run's result
SHOWN = 10  # steps; means of so many losses are recorded
WARMUP, FINAL_RATE = 40, 0.05
WEIGHT_DECAY = 0.1


def parse_arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = make_parser("bench/zero.py curves", __doc__)
    add = parser.add_argument
    add("-np", dest="world_size", type=int, default=2, help="ranks (2)")
    add("--forms", default=",".join(FORMS), help="by commas")
    add("--steps", type=int, default=800)
    add("--seeds", type=int, default=3)
    add("--twins", type=int, default=1, help="runs of each form and seed, the others with changed first weights (1)")
    add("--layers", type=int, default=2)
    add("--heads", type=int, default=2)
    add("--width", type=int, default=64)
    add("--context", type=int, default=64, help="bytes of a sample (64)")
    add("--batch", type=int, default=32, help="samples per rank and step (32)")
    add("--language", action="store_true", help="sentences of a small language, by a model that suits it")
    add("--lr", type=float, default=4e-3)
    add("--beta2", type=float, default=0.95)
    add("--eps", type=float, default=3e-5, help="Adam's (3e-5): see above")
    add("--freeze", type=int, default=0, help="last averaged step of 1-bit Adam (0: a quarter of the steps)")
    add_run_arguments(parser, 14400.0)
    arguments = parser.parse_args(words)
    if arguments.language:
        arguments.layers, arguments.width, arguments.context, arguments.batch = 3, 48, 16, 8
        arguments.lr = 3e-3
    arguments.forms = listed(parser, "--forms", arguments.forms, tuple(FORMS))
    if arguments.forms[0] != "exact":
        parser.error("--forms: the first one must be exact, with which the others are compared")
    if arguments.steps < LAST:
        parser.error(f"--steps must be at least {LAST}")
    return arguments


def samples(arguments: argparse.Namespace, generator: Any, text: Any) -> Any:
    import torch

    starts = torch.randint(len(text) - arguments.context - 1, (arguments.batch,), generator=generator)
    return torch.stack([text[start : start + arguments.context + 1] for start in starts.tolist()]).long()


def sentences(arguments: argparse.Namespace, generator: Any) -> Any:
    import torch

    shape = (arguments.batch, arguments.context + 1)
    tokens, chance = (torch.randint(most, shape, generator=generator) for most in (64, 2))
    for place in range(1, shape[1]):
        tokens[:, place] = (3 * tokens[:, place - 1] + 7 * chance[:, place]) % 64
    return tokens


def add_noise(grad: Any, generator: Any) -> Any:
    """Return a gradient with noise of the size of int8's rounding: each block's largest value / 127 / sqrt(12)."""
    import torch

    blocks = torch.nn.functional.pad(grad.flatten(), (0, -grad.numel() % BLOCK)).view(-1, BLOCK)
    sizes = blocks.abs().amax(1, keepdim=True) / (127 * math.sqrt(12))
    return grad + (sizes * torch.randn(blocks.shape, generator=generator)).flatten()[: grad.numel()].view_as(grad)


def train(arguments: argparse.Namespace, comm: Any, form: str, seed: int, twin: int, text: Any) -> list[float]:
    """Train, and return the mean loss of all ranks in each step. Collective."""
    import torch

    import zcomm
    from zcomm.demo.model import GPT, ModelConfig

    model = GPT(ModelConfig(arguments.layers, arguments.heads, arguments.width, arguments.context, seed))
    noise, own_noise = torch.Generator().manual_seed(twin), torch.Generator().manual_seed(100 * twin + comm.rank)
    for param in model.parameters():
        if twin:
            param.data.mul_(1 + TWIN * torch.randn(param.shape, generator=noise))
        if form == "noise":
            param.register_hook(lambda grad: add_noise(grad, own_noise))
    options: dict[str, Any] = {"optimizer": "adamw", "stage": 3 if FORMS[form].get("weights") else 2}
    if form == "onebit":
        options = {"optimizer": "onebit_adam", "stage": 0, "freeze_step": arguments.freeze or arguments.steps // 4}
    elif FORMS[form]:
        options["compression"] = zcomm.Compression(**FORMS[form])
    optimizer = zcomm.ZeroOptimizer(
        model,
        lr=arguments.lr,
        betas=(0.9, arguments.beta2),
        eps=arguments.eps,
        weight_decay=WEIGHT_DECAY,
        clip_norm=1.0,
        share_parameters=False,
        **options,
    )
    generator, losses = torch.Generator().manual_seed(1000 * seed + comm.rank), torch.zeros(arguments.steps)
    for step in range(arguments.steps):
        batch = sentences(arguments, generator) if arguments.language else samples(arguments, generator, text)
        done = (step - WARMUP) / (arguments.steps - WARMUP)
        falling = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * done))
        optimizer.param_groups[0]["lr"] = arguments.lr * ((step + 1) / WARMUP if step < WARMUP else falling)
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach()
    optimizer.close()
    comm.all_reduce(losses, "avg")
    return [float(loss) for loss in losses]


def run_rank(arguments: argparse.Namespace) -> int:
    import torch

    import zcomm
    from zcomm.demo.text import load_text

    torch.set_num_threads(1)
    comm = zcomm.init()
    text = torch.from_numpy(load_text(None).train.copy())
    lines = JsonLines(arguments.json if comm.rank == 0 else None, arguments.append)
    lines.write({"kind": "machine", "command": command_line(), **machine()})
    last: dict[str, list[list[float]]] = {form: [[] for _ in range(arguments.seeds)] for form in arguments.forms}
    for twin, seed, form in product(range(arguments.twins), range(arguments.seeds), arguments.forms):
        losses = train(arguments, comm, form, seed + 1, twin, text)
        result = statistics.fmean(losses[-LAST:])
        last[form][seed].append(result)
        shown = [round(statistics.fmean(losses[at : at + SHOWN]), 4) for at in range(0, len(losses), SHOWN)]
        curve = {"kind": "curve", "form": form, "seed": seed + 1, "twin": twin, "last": result, "losses": shown}
        lines.write(curve)
        if comm.rank == 0:
            print(f"  seed {seed + 1}  twin {twin}  {form:<8} {result:.5f}", flush=True)
    if comm.rank == 0:
        report(last, lines)
    return 0


def report(last: dict[str, list[list[float]]], lines: JsonLines) -> None:
    """Print and record each form's differences from exact collectives: of the means over twins of each seed, and of all
    runs. The spread of twins gives their standard error. last: of each form, by seed and twin."""
    exact = last["exact"]
    for form, values in last.items():
        apart = [statistics.fmean(mine) - statistics.fmean(other) for mine, other in zip(values, exact, strict=True)]
        mean, goal = statistics.fmean(apart), GOALS.get(form)
        line = f"{form:<8} loss minus exact: {', '.join(f'{value:+.4f}' for value in apart)}"
        error = spread = None
        if len(exact[0]) > 1:
            spread = math.sqrt(statistics.fmean(map(statistics.variance, values)))
            other = math.sqrt(statistics.fmean(map(statistics.variance, exact)))
            error = math.hypot(spread, other) / math.sqrt(len(exact) * len(exact[0]))
            line += f"; mean {mean:+.4f}, standard error {error:.4f}, spread of twins {spread:.4f}"
        if goal is not None:
            line += f"; goal {goal}: {'yes' if max(map(abs, apart)) <= goal else 'no'}"
        print(line)
        more = {"differences": apart, "goal": goal, "standard_error": error, "spread": spread}
        lines.write({"kind": "difference", "form": form, "last": values, **more})
    means = [statistics.fmean(values) for values in exact]
    print(f"spread of exact over seeds: {max(means) - min(means):.4f}")


def main(words: Sequence[str]) -> int:
    arguments = parse_arguments(words)
    launch.use_project_python()
    if launch.is_rank():
        launch.leave(run_rank(arguments))
    return launch.start_ranks(arguments.world_size, arguments.timeout)
