"""Forms of a demo run: the model whole on each rank, divided over a mesh, or in the stages of a pipeline.

A form has the module of this rank for the optimizer, and runs passes and evaluations. Ranks along an axis other than
"data" read the same samples. Invariant: all ranks of a mesh call the same methods in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

import zcomm
from zcomm.demo.model import loss_of, make_model
from zcomm.demo.options import DemoConfig
from zcomm.parallel.heads import cut
from zcomm.planning import forms as planned
from zcomm.planning.forms import AxisBytes, Run, Shape
from zcomm.profiling.traffic import Traffic, axes_of
from zcomm.zero.agree import all_values
from zcomm.zero.options import as_precision

if TYPE_CHECKING:
    from zcomm.demo.phases import Clock
    from zcomm.demo.place import Place

AxisRow = dict[str, Any]  # axes, ranks, calls, nbytes (measured), planned


class WholeModel:
    """The model on each rank. data_rank, data_size: of the ranks that read different samples."""

    mesh: zcomm.ProcessMesh | None = None

    def __init__(self, config: DemoConfig, module: nn.Module, comm: zcomm.Communicator) -> None:
        self.config, self.module = config, module
        self.numel = sum(parameter.numel() for parameter in module.parameters())
        self.data_rank, self.data_size = comm.rank, comm.world_size
        self.waited_s = 0.0  # of the last passes, for stages
        self.bubble: dict[str, float] | None = None  # of the last passes: measured, formula

    def passes(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        """Run forward and backward passes of a micro-step; return the loss."""
        with clock.phase("forward"):
            loss = self.loss(inputs, targets)
        with clock.phase("backward"):
            loss.backward()
        return loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of this data rank's samples."""
        return cast(Tensor, self.module(inputs, targets))

    def last_logits(self, tokens: Tensor) -> Tensor:
        """Return the logits behind the last token, [batch, 256] fp32 on the host, on all ranks."""
        return cast(Tensor, self.module(tokens)[:, -1]).float().cpu()


class DividedModel(WholeModel):
    """A model with layers or sequences divided along "tensor" and "sequence"."""

    def __init__(self, config: DemoConfig, comm: zcomm.Communicator) -> None:
        assert config.mesh is not None
        self.mesh: zcomm.ProcessMesh = zcomm.ProcessMesh(comm, **config.mesh)
        self._sequence = config.mesh.get("sequence", 1)
        super().__init__(config, _divided(config, self.mesh), comm)
        self._model: Any = self.module  # also of layers that other stages have
        at = dict(zip(self.mesh.axes, self.mesh.coordinate, strict=True))
        self.data_rank, self.data_size = at.get("data", 0), config.mesh.get("data", 1)
        last = {axis: (self.mesh.size(axis) - 1 if axis in ("pipe", "sequence") else 0) for axis in self.mesh.axes}
        self._is_root = at == last  # has the logits of the last token

    def _own(self, tokens: Tensor) -> Tensor:
        """Return this rank's part of [batch, tokens]. The model then has these positions."""
        if self._sequence == 1:
            return tokens
        self._model.part = cut(tokens.shape[1], self._sequence)[self.mesh.coordinate[self.mesh.axes.index("sequence")]]
        return tokens[:, self._model.part].contiguous()

    def _mean(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss over the tokens of all parts."""
        mean = loss_of(logits, targets)
        if self._sequence == 1:
            return mean
        return zcomm.parallel.mean_over_sequence(mean * targets.numel(), targets.numel(), self.mesh)

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._mean(self.module(self._own(inputs)), self._own(targets))

    def last_logits(self, tokens: Tensor) -> Tensor:
        return self._from_root(self._logits(tokens))

    def _logits(self, tokens: Tensor) -> Tensor | None:
        """Return the logits of this rank's part of the tokens; None on other ranks than the last stage's."""
        return cast(Tensor, self.module(self._own(tokens)))

    def _from_root(self, logits: Tensor | None) -> Tensor:
        """Return the logits of the last token on all ranks. Collective."""
        comm = self.mesh.world
        roots = all_values(comm, self._is_root, "rank of the last token")
        found = torch.empty(1, 256) if logits is None else logits[:, -1].float().contiguous()
        comm.broadcast(found, root=roots.index(True), name="logits")
        return found


class PipedModel(DividedModel):
    """A model in stages along "pipe", also with "tensor" and "sequence"."""

    def __init__(self, config: DemoConfig, comm: zcomm.Communicator) -> None:
        super().__init__(config, comm)
        every = 1 if config.model == "llama" else 0
        layers = self._model.layers()
        self.pipe = zcomm.parallel.pipeline(
            layers, self.mesh, config.passes_at_once, loss=self._mean, cut="parameters", checkpoint_every=every
        )
        self.module = self.pipe.module

    def passes(self, inputs: Tensor, targets: Tensor, clock: Clock) -> Tensor:
        with clock.phase("passes"):
            loss = self.pipe.step(self._own(inputs), self._own(targets))
        self.waited_s = self.pipe.waited_s
        self.bubble = {"measured": self.pipe.bubble.measured, "formula": self.pipe.bubble.formula}
        return loss

    def loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss, _ = self._eval(self._own(inputs), self._own(targets))
        assert loss is not None
        return loss

    def _logits(self, tokens: Tensor) -> Tensor | None:
        _, outputs = self._eval(self._own(tokens), None)
        return None if outputs is None else torch.cat(outputs)

    def _eval(self, inputs: Tensor, targets: Tensor | None) -> tuple[Tensor | None, list[Any] | None]:
        """Run forward passes of any number of samples."""
        self.pipe.microbatches = min(self.config.passes_at_once, inputs.shape[0])
        found = self.pipe.eval(inputs, targets)
        self.pipe.microbatches = self.config.passes_at_once
        return found


def make_form(config: DemoConfig, comm: zcomm.Communicator, place: Place) -> WholeModel:
    """Build this rank's model. Collective over the ranks of a mesh. Raises: ValueError, NotImplementedError."""
    if config.mesh is not None:
        return (PipedModel if config.pipes else DividedModel)(config, comm)
    return WholeModel(config, _whole(config, place), comm)


def model_of(config: DemoConfig, **parts: Any) -> nn.Module:
    """Build the whole model on torch's default device. parts: of sequences, see ByteLlama."""
    return make_model(config.model, config.layers, config.heads, config.width, config.context, config.seed, **parts)


def _whole(config: DemoConfig, place: Place) -> nn.Module:
    """Build the model on its device; one of Llama's shape in stage 3 has no memory until ZeroOptimizer shards it."""
    if config.model == "llama" and config.stage < 3:
        with place.device:
            return model_of(config)
    with zcomm.zero.Init(enabled=config.model == "llama"):  # never whole
        model = model_of(config)
    return model.to(place.device)


def _divided(config: DemoConfig, mesh: zcomm.ProcessMesh) -> nn.Module:
    parts: dict[str, Any] = {}
    if "sequence" in mesh.axes and mesh.size("sequence") > 1:
        parts["attend"] = zcomm.parallel.ulysses(nn.functional.scaled_dot_product_attention, mesh)
    model = model_of(config, **parts)
    if "tensor" in mesh.axes and mesh.size("tensor") > 1:
        zcomm.parallel.tensor(model, mesh)
    return model


# --- bytes by axis --------------------------------------------------------------------------------------------------


def shape_of(config: DemoConfig) -> Shape:
    """Return the sizes of a run's model and of its micro-batch."""
    samples = -(-config.batch // config.passes_at_once) if config.pipes else config.batch
    whole = (2 * 256 + 2 * config.layers + 1) * config.width  # embeddings, head, norms
    return Shape(config.layers, config.width, config.heads, config.context, samples, whole_params=whole)


def planned_bytes(config: DemoConfig, numel: int) -> list[AxisBytes]:
    """Return the planned bytes of a step of the rank that sends most, by axes."""
    assert config.mesh is not None
    shape, item = shape_of(config), as_precision(config.precision).dtype.itemsize
    microbatches, recomputes = config.passes_at_once if config.pipes else 1, config.model == "llama"
    run = Run(config.stage, item, item, microbatches, config.accum, recomputes=recomputes)
    return planned.bytes_by_axis(config.mesh, shape, planned.local_params(config.mesh, shape, numel), run)


def axis_rows(config: DemoConfig, mesh: zcomm.ProcessMesh, traffic: Traffic, numel: int) -> list[AxisRow]:
    """Return the bytes of a step by axes: measured, of the rank that sends most, and planned. Collective."""
    every = axes_of(mesh)
    own = traffic.by_axes()
    counts = torch.zeros(len(every), 2, dtype=torch.float64)
    for number, axes in enumerate(every):
        if axes in own:
            counts[number] = torch.tensor([own[axes].calls, own[axes].nbytes])
    mesh.world.all_reduce(counts, op="max", name="bytes by axis")
    plan = planned_bytes(config, numel)
    rows = []
    for axes, (calls, nbytes) in zip(every, counts.tolist(), strict=True):
        wanted = sum(each.nbytes for each in plan if each.axes == axes)
        if calls:
            rows.append(
                {
                    "axes": " x ".join(axes),
                    "ranks": mesh.size(*axes),
                    "calls": int(calls),
                    "nbytes": nbytes,
                    "planned": wanted,
                }
            )
    return rows
