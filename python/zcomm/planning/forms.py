"""Bytes by axis, memory and bubble of a step for a decoder that a mesh divides: data, pipe, tensor, sequence, experts.

Counts are of the rank that sends most, in one optimizer step, by the rules of profiling/traffic.py. They contain the
model's own bytes: gradients, weights, activations, heads and tokens. Norms, headers and meetings of ranks are not
counted: some KiB in a step.
Pure arithmetic. Source: ZeRO (arXiv:1910.02054), Megatron-LM (1909.08053, 2104.04473), Ulysses (2309.14509).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from zcomm.comm.mesh_layout import MeshLayout
from zcomm.hints import did_you_mean

DATA = ("replicate", "shard", "data", "expert_data", "sequence", "expert")  # gradients are summed over these
AXES = ("pipe", *DATA, "tensor")


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder and of its batch.

    heads, keys: of queries and of keys. tokens: of a sample. samples: of a micro-batch of one data rank.
    columns: layers of a block that tensor parallelism divides by columns: each sums a gradient. Two layers are divided
    by rows, and sum their outputs. whole_params: trained elements that all ranks along "tensor" have (embeddings,
    norms). experts: of a block with experts; top: of a token; expert_params: of all experts in all blocks.
    """

    layers: int
    width: int
    heads: int
    tokens: int
    samples: int = 1
    keys: int = 0
    columns: int = 5
    whole_params: int = 0
    experts: int = 0
    top: int = 2
    expert_params: int = 0

    @property
    def key_heads(self) -> int:
        return self.keys or self.heads


@dataclass(frozen=True)
class Run:
    """How a step runs. microbatches: of one pass through a pipeline. micro_steps: passes of a step.

    weight_nbytes, gradient_nbytes: of an element, the latter as it travels. shared: ranks of a data group have one copy
    of the weights, as the CPU ranks of a host do. stages_per_rank: of a pipeline. recomputes: backward runs blocks
    again (activation checkpoints), with their exchanges.
    """

    stage: int
    weight_nbytes: int
    gradient_nbytes: int
    microbatches: int = 1
    micro_steps: int = 1
    stages_per_rank: int = 1
    shared: bool = True
    recomputes: bool = False


@dataclass(frozen=True)
class AxisBytes:
    """The calls along some axes for one purpose, and the bytes that a rank sends in them. calls: 0: unknown."""

    axes: tuple[str, ...]
    purpose: str
    collective: str
    nbytes: float
    calls: int = 0


def several(sizes: Mapping[str, int], axes: Sequence[str]) -> tuple[str, ...]:
    """Return the axes of a mesh with several ranks, of ``axes``."""
    return tuple(axis for axis in sizes if axis in axes and sizes[axis] > 1)


def count(sizes: Mapping[str, int], axes: Sequence[str]) -> int:
    """Return the number of ranks along these axes."""
    return math.prod(sizes.get(axis, 1) for axis in axes)


def parse(text: str) -> dict[str, int]:
    """Return the sizes of a mesh such as "data=2,pipe=4", by the axes' names. Raises: ValueError."""
    names, sizes = [], []
    for part in text.split(","):
        name, equals, number = (word.strip() for word in part.partition("="))
        if not equals or not number.isdecimal():
            raise ValueError(f"{part!r} is not AXIS=RANKS, such as data=2,pipe=2")
        names.append(name)
        sizes.append(int(number))
    layout = MeshLayout.of(names, sizes, range(math.prod(sizes)))
    for axis in layout.axes:
        if axis not in AXES:
            raise ValueError(f"axis {axis!r} is not one of {', '.join(AXES)}{did_you_mean(axis, AXES)}")
    return dict(zip(layout.axes, layout.shape, strict=True))


def refusal(sizes: Mapping[str, int], shape: Shape | None, stage: int) -> str:
    """Return the reason for which a mesh cannot divide this decoder; "" if it can."""
    divided = several(sizes, ("pipe", "tensor", "sequence", "expert"))
    if shape is None:
        return f"{divided[0]}={sizes[divided[0]]} needs the model's sizes" if divided else ""
    pipe, tensor, sequence, expert = (sizes.get(axis, 1) for axis in ("pipe", "tensor", "sequence", "expert"))
    for wrong, text in (
        (stage == 3 and pipe * tensor > 1, f"stage 3 with {'pipe' if pipe > 1 else 'tensor'}: stages 0 to 2"),
        (pipe > shape.layers, f"pipe={pipe}: {shape.layers} layers are fewer than the stages"),
        (shape.heads % tensor, f"tensor={tensor}: {shape.heads} heads do not divide"),
        (shape.key_heads % tensor, f"tensor={tensor}: {shape.key_heads} key heads do not divide"),
        (sequence * tensor > shape.heads, f"sequence={sequence}: {shape.heads // tensor} heads on a rank are fewer"),
        (sequence > shape.tokens, f"sequence={sequence}: {shape.tokens} tokens are fewer"),
        (expert > 1 and not shape.experts, f"expert={expert}: the model has no experts"),
        (expert > 1 and shape.experts % expert, f"expert={expert}: {shape.experts} experts do not divide"),
    ):
        if wrong:
            return text
    return ""


def local_params(sizes: Mapping[str, int], shape: Shape | None, params: int) -> tuple[int, int]:
    """Return the trained elements of one rank before ZeRO divides them: all but experts, and of experts."""
    experts, whole = (0, 0) if shape is None else (shape.expert_params, shape.whole_params)
    dense = -(-(params - experts - whole) // sizes.get("tensor", 1)) + whole
    return -(-dense // sizes.get("pipe", 1)), -(-experts // count(sizes, ("pipe", "expert")))


def bubble(ranks: int, microbatches: int, stages_per_rank: int = 1) -> float:
    """Return the share of a step in which ranks of a pipeline wait: (P - 1) / (v M + P - 1)."""
    return (ranks - 1) / (stages_per_rank * microbatches + ranks - 1)


def bytes_by_axis(sizes: Mapping[str, int], shape: Shape | None, local: tuple[int, int], run: Run) -> list[AxisBytes]:
    """Return the bytes of a step by axes and purpose. sizes: of the mesh. local: elements of a rank (local_params)."""
    dense, experts = local
    if experts:
        run = replace(run, shared=False)  # ranks have copies
    found = list(_zero(several(sizes, DATA), count(sizes, DATA), dense, "", run))
    if experts:
        same = tuple(axis for axis in DATA if axis != "expert")
        found += _zero(several(sizes, same), count(sizes, same), experts, " of experts", run)
    if shape is not None:
        found += _activations(sizes, shape, run)
    return found


def _zero(axes: tuple[str, ...], ranks: int, elements: int, of: str, run: Run) -> Iterator[AxisBytes]:
    """Yield the bytes of gradients and weights that ``ranks`` divide."""
    if ranks == 1:
        return
    share = (ranks - 1) / ranks
    nbytes = share * elements * run.gradient_nbytes * run.micro_steps
    yield AxisBytes(axes, f"gradients{of}", "reduce_scatter", nbytes)
    gathers = 2 * run.micro_steps if run.stage == 3 else 1
    if run.stage == 0 or not run.shared:
        yield AxisBytes(axes, f"weights{of}", "all_gather", share * elements * run.weight_nbytes * gathers)


def _activations(sizes: Mapping[str, int], shape: Shape, run: Run) -> Iterator[AxisBytes]:
    pipe, tensor, sequence, expert = (sizes.get(axis, 1) for axis in ("pipe", "tensor", "sequence", "expert"))
    passes = run.microbatches * run.micro_steps
    layers, forwards = -(-shape.layers // pipe), 1 + run.recomputes
    tokens = shape.samples * -(-shape.tokens // sequence)
    act = tokens * shape.width * run.weight_nbytes  # the output of a layer
    if pipe > 1:
        messages = 2 * run.stages_per_rank - (pipe == 2)  # of the ranks in the middle, if there are any
        yield AxisBytes(("pipe",), "activations", "send", messages * passes * act, messages * passes)
    if tensor > 1:
        calls = layers * (2 + run.recomputes + shape.columns) * passes  # it ends before a block's last sum
        yield AxisBytes(("tensor",), "activations", "all_reduce", calls * act * 2 * (tensor - 1) / tensor, calls)
    if sequence > 1:
        heads = 2 * (1 + shape.key_heads / shape.heads)  # query, key, value and output
        calls = 2 * (forwards + 1) * layers * passes
        nbytes = calls / 2 * heads * act / tensor * (sequence - 1) / sequence
        yield AxisBytes(("sequence",), "heads", "all_to_all", nbytes, calls)
    if expert > 1:
        calls = 2 * (forwards + 1) * layers * passes
        yield AxisBytes(("expert",), "tokens", "all_to_all", calls * shape.top * act * (expert - 1) / expert, calls)


def meshes(world_size: int, axes: Sequence[str]) -> Iterator[dict[str, int]]:
    """Yield all meshes of ``world_size`` ranks with these axes, outermost first; the last axis changes fastest."""
    if not axes:
        if world_size == 1:
            yield {}
        return
    for size in (n for n in range(1, world_size + 1) if world_size % n == 0):
        for rest in meshes(world_size // size, axes[1:]):
            yield {axes[0]: size, **rest}
