"""PipelineModule: DeepSpeed's class of a sequential model in stages, over zcomm.parallel.

``initialize`` makes a PipelineEngine of it (pipeline_engine.py). A rank has the layers of its own stage, as children
with the layer's number as name, or in ``tied_modules`` by key. Making one is collective over all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcomm.parallel.pipeline_layers import LayerSpec, TiedLayerSpec, add_first_name

if TYPE_CHECKING:
    from zcomm.comm.mesh import ProcessMesh
    from zcomm.parallel.pipelining import Pipeline

_AXES = {"model": "tensor"}  # DeepSpeed's names


class PipelineError(Exception):
    """Error of a pipeline that is used in a way that it does not have."""


class PipelineModule(nn.Module):
    """The stage of this rank of a sequential model.

    layers: modules, functions, LayerSpecs and TiedLayerSpecs. num_stages, or topology (PipeDataParallelTopology).
    loss_fn: called with outputs and labels of a micro-batch; None: the last layer returns the loss.
    partition_method: "parameters", "uniform" or "type:REGEX". activation_checkpoint_interval: layers between
    activation checkpoints; 0: none. seed_layers: LayerSpecs are built with base_seed plus their number, by seed_fn if
    given; otherwise with torch's seed plus it. dynamic_shape: without effect, shapes may always change.
    activation_checkpoint_func, checkpointable_layers: checkpoints are torch's, without reentrance, of all layers.
    Raises: RuntimeError without num_stages and topology, or if they do not fit the ranks; ValueError as pipeline.
    """

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: Any = None,
        loss_fn: Callable[..., Any] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Any = None,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
    ) -> None:
        from zcomm.comm import job
        from zcomm.parallel.pipelining import Pipeline

        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("PipelineModule needs num_stages= or topology=")
        comm = job.init()
        self.global_rank, self.world_size = comm.rank, comm.world_size
        self.local_rank = int(os.environ.get("LOCAL_RANK", comm.local_rank))
        mesh = self._mesh(num_stages, topology)
        self.mesh, self.num_stages = mesh, mesh.size("pipe")
        self.stage_id = mesh.ranks("pipe").index(comm.rank)
        self.loss_fn, self.seed_layers, self.seed_fn, self.base_seed = loss_fn, seed_layers, seed_fn, base_seed
        self.checkpointable_layers, self.dynamic_shape = checkpointable_layers, dynamic_shape
        self.activation_checkpoint_func = activation_checkpoint_func
        self._layer_specs = list(layers)
        names = [str(number) for number in range(len(self._layer_specs))]
        pipe = Pipeline(
            self._layer_specs,
            names,
            mesh,
            microbatches=1,
            schedule="1f1b",
            loss=loss_fn,
            cut=partition_method,
            stages_per_rank=1,
            checkpoint_every=activation_checkpoint_interval,
            seed=base_seed if seed_layers else None,
            seed_with=seed_fn or torch.manual_seed,
        )
        self._pipe, self._part = [pipe], [pipe.parts[0]]  # in lists: no children, or they would be there twice
        self.parts = pipe.bounds
        self._local_start, self._local_stop = self._part[0].begin, self._part[0].end
        self.forward_funcs = self._part[0].calls
        self.tied_modules = nn.ModuleDict()
        for number in range(self._local_start, self._local_stop):
            spec = self._layer_specs[number]
            if isinstance(spec, TiedLayerSpec):
                self.tied_modules[spec.key] = self._part[0].layer(number)
            elif isinstance(spec, (LayerSpec, nn.Module)):
                self.add_module(str(number), self._part[0].layer(number))
        for name, param in reversed(pipe.first_names.items()):
            if not isinstance(self._layer_specs[int(name.partition(".")[0])], TiedLayerSpec):
                add_first_name(self, name, param)
        pipe.called = [self]  # so that hooks of this module run
        self._grid: Any = None
        self._topology = topology

    def _mesh(self, num_stages: int | None, topology: Any) -> ProcessMesh:
        from zcomm.comm.mesh import ProcessMesh

        if topology is not None:
            names = [_AXES.get(str(axis), str(axis)) for axis in topology.get_axis_names()]
            return ProcessMesh(**dict(zip(names, map(int, topology.dims), strict=True)))
        if not num_stages or self.world_size % num_stages:
            raise RuntimeError(f"num_stages={num_stages} does not divide the {self.world_size} ranks")
        return ProcessMesh(pipe=num_stages, data=self.world_size // num_stages)

    @property
    def pipeline(self) -> Pipeline:
        """The pipeline that runs this stage."""
        return self._pipe[0]

    def forward(self, *inputs: Any) -> Any:
        """Run this stage's layers."""
        return self._part[0](*inputs)

    # --- DeepSpeed's accessors ---------------------------------------------------------------------------------------

    @property
    def activation_checkpoint_interval(self) -> int:
        """Layers between two activation checkpoints; 0: none."""
        return self._part[0].every

    @activation_checkpoint_interval.setter
    def activation_checkpoint_interval(self, interval: int) -> None:
        self._part[0].every = interval

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set the layers between two activation checkpoints; 0: none."""
        self.activation_checkpoint_interval = interval

    def topology(self) -> Any:
        """Return the topology: as given, or of "pipe" and "data"."""
        if self._topology is None:
            from zcomm.engine.pipeline_topology import PipeDataParallelTopology

            self._topology = PipeDataParallelTopology(self.num_stages, self.world_size // self.num_stages)
        return self._topology

    def num_pipeline_stages(self) -> int:
        """Return the number of stages."""
        return self.num_stages

    def get_additional_losses(self) -> None:
        """Return None: a subclass may return losses by name for the engine's caller."""

    def allreduce_tied_weight_gradients(self) -> None:
        """Do nothing: a step sums gradients of tied weights."""
