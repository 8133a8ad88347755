"""The mesh in `zcomm plan --mesh`: memory of a rank, bytes and seconds by axis, the bubble, and the best mesh."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from zcomm.cli.plan_table import OFFLOADS, count_in_words, print_table, seconds, without_unknown
from zcomm.cli.sizes import nbytes, shown
from zcomm.launch.errors import UserError

if TYPE_CHECKING:
    from zcomm.cli.plan_parts import Planned
    from zcomm.planning.forms import AxisBytes, Run, Shape

_MOST_BUBBLE = 0.2  # of the best mesh, if there is one with less
_SHOWN = 6  # meshes of --mesh auto


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N,...",
        help="bytes and seconds by axis, memory and bubble for a mesh of data, pipe, tensor, sequence, expert; auto: "
        "the best mesh of --world ranks",
    )
    parser.add_argument(
        "--shape",
        metavar="NAME=N,...",
        help="with --mesh: sizes of a decoder: layers, width, heads, tokens (of a sample), and samples (of a "
        "micro-batch; default 1), keys (heads of keys), experts, top, expert_params",
    )
    parser.add_argument(
        "--microbatches", type=int, metavar="M", help="with --mesh: of a pipeline's pass (default: 4 for each stage)"
    )
    parser.add_argument(
        "--link", type=nbytes, metavar="SIZE", help="with --mesh: bytes per second of a rank's link, such as 10GB"
    )


@dataclass(frozen=True)
class Choice:
    """A mesh with a stage and an offload. tiers: bytes of one rank. lacks: memories that are too small. samples: of all
    ranks in a step."""

    sizes: Mapping[str, int]
    stage: int
    offload: str
    tiers: Mapping[str, int]
    lacks: tuple[str, ...]
    sent: Sequence[AxisBytes]
    bubble: float
    samples: int

    @property
    def nbytes(self) -> float:
        """Bytes that a rank sends in a step."""
        return sum(each.nbytes for each in self.sent)

    @property
    def per_sample(self) -> float:
        """Bytes that a rank sends for each sample of the step."""
        return self.nbytes / self.samples

    @property
    def mesh(self) -> str:
        sizes = {axis: size for axis, size in self.sizes.items() if size > 1} or {"data": 1}
        return ",".join(f"{axis}={size}" for axis, size in sizes.items())

    @property
    def order(self) -> tuple[bool, int, bool, float, float]:
        """The best choice fits with the least offload, has a small bubble, and sends the fewest bytes for a sample."""
        few = round(self.per_sample), self.bubble
        return bool(self.lacks), OFFLOADS.index(self.offload), self.bubble > _MOST_BUBBLE, *few

    def __str__(self) -> str:
        return f"mesh {self.mesh}, stage {self.stage}, offload {self.offload}"


def check(args: argparse.Namespace) -> None:
    """Check options that do not belong together. Raises: UserError."""
    if args.mesh is None:
        for name in ("shape", "microbatches", "link"):
            if getattr(args, name) is not None:
                raise UserError(f"--{name} {getattr(args, name)} needs --mesh")
        return
    if args.microbatches is not None and args.microbatches < 1:
        raise UserError(f"--microbatches {args.microbatches}: must be at least 1")
    for name in ("hosts", "timeline", "measured", "gpus"):
        if getattr(args, name) is not None:
            raise UserError(f"--mesh {args.mesh} is for ranks on CPUs; leave out --{name}")
    if args.mesh == "auto" and (args.world is None or len(args.world) != 1):
        raise UserError("--mesh auto needs --world N, one number of ranks")


def show(args: argparse.Namespace, planned: Planned, memory: int, free: int) -> None:
    """Print memory, bytes by axis and bubble of the mesh. memory, free: bytes of all ranks. Raises: UserError."""
    shape = _shape(args, planned)
    room = {"memory": memory, "drive": free}
    found = [
        choice
        for sizes in _meshes(args, shape)
        for stage, offload in itertools.product(args.stage, args.offload)
        if (choice := _choice(args, planned, sizes, shape, stage, offload, room)) is not None
    ]
    if not found:
        raise UserError(f"--mesh {args.mesh}: {_reason(args, shape)}")
    best = min(found, key=lambda choice: choice.order)
    head = f"{count_in_words(planned.count)} {args.precision} on {_ranks(best.sizes)} ranks: "
    if best.lacks:
        limits = " and ".join(f"{shown(size)} of {name}" for name, size in room.items())
        head += f"nothing fits {limits}; the smallest is "
        best = min(found, key=lambda choice: choice.tiers["device"] + choice.tiers["cpu"])
    print(f"{head}{'' if best.lacks else 'take '}{best}")
    rate = args.link or _measured_bps(_ranks(best.sizes))
    print(f"\n{planned.count} trained parameters, {args.precision}, {args.optimizer}; of one rank and step")
    print_table(without_unknown([_row(choice, rate) for choice in _few(args, found, best)]))
    print(f"\nbytes by axis with {best}, of the rank that sends most")
    print_table(without_unknown(_axis_rows(best, rate) or [{"axis": "none", "bytes": "0 B"}]))
    _notes(args, planned, best, rate)


# --- the choices ----------------------------------------------------------------------------------------------


def _meshes(args: argparse.Namespace, shape: Shape | None) -> list[dict[str, int]]:
    from zcomm.planning.forms import meshes, parse

    if args.mesh != "auto":
        try:
            return [parse(args.mesh)]
        except ValueError as error:
            raise UserError(f"--mesh {args.mesh}: {error}") from None
    axes = ["pipe", "data", *(["expert"] if shape and shape.experts else []), "sequence", "tensor"]
    return list(meshes(args.world[0], axes))


def _run(args: argparse.Namespace, sizes: Mapping[str, int], stage: int) -> Run:
    from zcomm.planning.forms import Run
    from zcomm.zero.options import as_precision

    kind, pipe = as_precision(args.precision), sizes.get("pipe", 1)
    microbatches = (args.microbatches or 4 * pipe) if pipe > 1 else 1
    passes = args.accum if pipe > 1 or args.microbatches is None else args.accum * args.microbatches
    return Run(stage, kind.param_nbytes, kind.communication_dtype.itemsize, microbatches, passes)


def _choice(
    args: argparse.Namespace,
    planned: Planned,
    sizes: dict[str, int],
    shape: Shape | None,
    stage: int,
    offload: str,
    room: Mapping[str, int],
) -> Choice | None:
    """Return the needs of a mesh; None if it cannot divide the model."""
    from zcomm.planning import estimate
    from zcomm.planning.forms import DATA, bubble, bytes_by_axis, count, local_params, refusal

    if refusal(sizes, shape, stage):
        return None
    run = _run(args, sizes, stage)
    local = local_params(sizes, shape, planned.count)
    ranks = count(sizes, DATA)
    tiers = dict.fromkeys(("device", "cpu", "nvme"), 0)
    for elements, among in ((local[0], ranks), (local[1], ranks // sizes.get("expert", 1))):
        if elements:
            needed = estimate(
                elements, stage, offload, among, args.precision, args.optimizer, accumulation=run.micro_steps
            )
            for tier in tiers:
                tiers[tier] += needed.tier(tier)
    tiers["device"] += _activations(args, planned, sizes, run)
    world = _ranks(sizes)
    needs = {"memory": world * (tiers["device"] + tiers["cpu"]), "drive": world * tiers["nvme"]}
    lacks = tuple(name for name, nbytes in room.items() if needs[name] > nbytes)
    waits = bubble(sizes.get("pipe", 1), run.microbatches)
    reading = count(sizes, [axis for axis in DATA if axis != "sequence"])
    samples = reading * run.microbatches * run.micro_steps * (1 if shape is None else shape.samples)
    return Choice(sizes, stage, offload, tiers, lacks, bytes_by_axis(sizes, shape, local, run), waits, samples)


def _activations(args: argparse.Namespace, planned: Planned, sizes: Mapping[str, int], run: Run) -> int:
    """Return the bytes of activations of the first stage, which keeps as many micro-batches as there are stages."""
    whole = planned.activations(planned.way) or 0
    pipe = sizes.get("pipe", 1)
    parts = pipe * sizes.get("tensor", 1) * sizes.get("sequence", 1)
    return -(-whole * min(pipe, run.microbatches) // parts)


def _reason(args: argparse.Namespace, shape: Shape | None) -> str:
    from zcomm.planning.forms import refusal

    sizes = _meshes(args, shape)[0]
    text = next(filter(None, (refusal(sizes, shape, stage) for stage in args.stage)), "no mesh divides this model")
    remedy = ": give --shape layers=,width=,heads=,tokens=" if shape is None else ""
    return f"{text}{remedy}"


def _ranks(sizes: Mapping[str, int]) -> int:
    from zcomm.planning.forms import count

    return count(sizes, list(sizes))


def _few(args: argparse.Namespace, found: list[Choice], best: Choice) -> list[Choice]:
    """Return the rows of the table: all cases of one mesh, or the best meshes."""
    if args.mesh != "auto":
        return found
    firsts: dict[str, Choice] = {}
    for choice in sorted(found, key=lambda choice: choice.order):
        firsts.setdefault(choice.mesh, choice)
    rows = list(firsts.values())[:_SHOWN]
    return rows if best in rows else [*rows, best]


# --- sizes of the model -----------------------------------------------------------------------------------------


def _shape(args: argparse.Namespace, planned: Planned) -> Shape | None:
    """Return the sizes of ``--shape``, or else of the model's config. Raises: UserError."""
    from zcomm.planning.forms import Shape

    if args.shape is None:
        return _shape_of_model(planned)
    known = {field.name for field in fields(Shape)} - {"whole_params", "columns"}
    given: dict[str, int] = {}
    for part in args.shape.split(","):
        name, _, text = part.partition("=")
        try:
            if name not in known:
                raise ValueError
            given[name] = int(float(text.lower().replace("b", "e9").replace("m", "e6")))
        except ValueError:
            raise UserError(f"--shape {args.shape}: {part!r} is not NAME=N of {', '.join(sorted(known))}") from None
    for name in ("layers", "width", "heads", "tokens"):
        if given.get(name, 0) < 1:
            raise UserError(f"--shape {args.shape}: {name}= is missing, or not above 0")
    if given.get("experts", 0) and not given.get("expert_params"):
        raise UserError(f"--shape {args.shape}: experts= needs expert_params=, the parameters of all experts")
    return Shape(**given)


_CONFIG = {
    "layers": ("num_hidden_layers", "n_layer", "layers"),
    "width": ("hidden_size", "n_embd", "width"),
    "heads": ("num_attention_heads", "n_head", "heads"),
    "keys": ("num_key_value_heads",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top": ("num_experts_per_tok",),
}


def _shape_of_model(planned: Planned) -> Shape | None:
    """Return the sizes in the config of a model that came with the inputs of a micro-batch; None if one is missing."""
    from zcomm.planning.forms import Shape

    model: Any = planned.model
    config = getattr(model, "config", None)
    if config is None or planned.batches is None:
        return None
    found = {}
    for name, keys in _CONFIG.items():
        value = next((each for each in (getattr(config, key, None) for key in keys) if isinstance(each, int)), None)
        if value is not None:
            found[name] = value
    samples = planned.batches.samples
    if not {"layers", "width", "heads"} <= found.keys() or not samples or not planned.batches.tokens:
        return None
    trained = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    experts = sum(param.numel() for name, param in trained if ".experts." in name)
    whole = sum(param.numel() for name, param in trained if param.dim() < 2 or param.shape[0] > 8 * found["width"])
    return Shape(**found, tokens=planned.batches.tokens, samples=samples, expert_params=experts, whole_params=whole)


# --- text -------------------------------------------------------------------------------------------------------


def _measured_bps(world: int) -> float | None:
    from zcomm.machine import speeds

    known = speeds.load(world)
    return None if known is None else known.reduce_bps


def _row(choice: Choice, rate: float | None) -> dict[str, str]:
    return {
        "mesh": choice.mesh,
        "stage": str(choice.stage),
        "offload": choice.offload,
        **{tier: shown(size) for tier, size in choice.tiers.items()},
        "sent": shown(choice.nbytes),
        "per sample": shown(choice.per_sample),
        "time": seconds(choice.nbytes / rate if rate else None),
        "bubble": f"{choice.bubble:.3f}" if choice.sizes.get("pipe", 1) > 1 else "-",
        "fits": f"no: {', '.join(choice.lacks)}" if choice.lacks else "yes",
    }


def _axis_rows(choice: Choice, rate: float | None) -> list[dict[str, str]]:
    return [
        {
            "axis": " x ".join(each.axes),
            "ranks": str(_ranks({axis: choice.sizes[axis] for axis in each.axes})),
            "of": each.purpose,
            "collective": each.collective,
            "calls": str(each.calls) if each.calls else "-",
            "bytes": shown(each.nbytes),
            "time": seconds(each.nbytes / rate if rate else None),
        }
        for each in choice.sent
    ]


def _notes(args: argparse.Namespace, planned: Planned, best: Choice, rate: float | None) -> None:
    pipe = best.sizes.get("pipe", 1)
    if pipe > 1:
        count = _run(args, best.sizes, best.stage).microbatches
        print(f"bubble: (P - 1) / (M + P - 1) = {best.bubble:.3f} with P={pipe} stages, M={count} micro-batches")
    if rate is None:
        print("time is not known here: give --link, or measure this machine with zcomm doctor --calibrate")
    else:
        print(f"time: the bytes at {rate / 1e9:.3g} GB/s, one axis after the other, if nothing hides them")
    if args.mesh == "auto":
        print(
            f"best: fits with the least offload, has a bubble below {_MOST_BUBBLE}, then the fewest bytes for a sample"
        )
    if planned.activations(planned.way) is None:
        print("without activations (--activations, or --model with the inputs of a micro-batch)")
    print("ZeRO's formula: without padding, slots and windows; norms and headers of messages are not counted")
