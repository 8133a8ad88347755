"""Pipeline: a sequential model cut into stages over the ranks of a mesh's axis "pipe".

torch.distributed.pipelining's schedules order the passes, pipeline_stage.py runs them, and pipeline_messages.py moves
activations and gradients. Here the model is cut, losses are weighted, gradients summed, and the ranks compared.

[Note: pipeline steps] All ranks of the mesh meet twice in a step. Before it they compare schedule, micro-batches and
samples. Behind the passes they exchange losses and errors. A rank with an error closes its messages, so that other
stages' receives end, too. All ranks then raise the first error, with its stage and micro-batch. If a rank has died, the
meetings end by its loss. A failed step has half of its gradients, so a pipeline runs no step after it.
[Note: tied weights] Stages that share a weight have equal copies. A hook keeps the gradients of micro-batches from the
weight. Behind the passes their sum over the stages enters by one more backward pass, the last one of the step for the
optimizer. So each copy makes the same update. Norms count the copy of the first stage.
Thread rule: the main thread, as ZeroOptimizer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from zcomm._core import PeerLost
from zcomm.comm import job
from zcomm.comm.communicator import Communicator
from zcomm.comm.mesh import ProcessMesh
from zcomm.parallel.pipeline_layers import LayerSpec, add_first_name, build_stage, cut_layers, ties_of
from zcomm.zero.agree import all_values
from zcomm.zero.groups.mesh_comms import is_expert
from zcomm.zero.layout.local_param import as_local, is_dtensor, whole_of
from zcomm.zero.optimizer import ZeroOptimizer
from zcomm.zero.registry import optimizers_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SCHEDULES = ("gpipe", "1f1b", "interleaved")
_SAME = ("data", "replicate", "shard", "expert_data", "sequence", "expert")  # along these axes stages are equal
_NO_ROWS, _LISTED = -1, 0  # in place of a number of samples: nothing given; a list of micro-batches
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class Bubble:
    """Share of a step in which ranks wait. measured: in the last step, over all ranks. formula: for equal stages."""

    measured: float
    formula: float

    def __str__(self) -> str:
        return f"bubble {self.measured:.3f} (formula {self.formula:.3f})"


class Pipeline:
    """Part of a pipeline that one rank has, made by ``pipeline``.

    module: the layers of this rank's stages, for an optimizer. stages: their numbers, of ``count``. bounds: stage i has
    the layers ``bounds[i]`` to ``bounds[i + 1]``. loss: may be replaced between steps.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        names: Sequence[str],
        mesh: ProcessMesh,
        microbatches: int,
        schedule: str,
        loss: Loss | None,
        cut: str | Sequence[int],
        stages_per_rank: int,
        checkpoint_every: int,
        seed: int | None = None,
        seed_with: Callable[[int], Any] = torch.manual_seed,
    ) -> None:
        self.mesh, self.microbatches, self.schedule, self.loss = mesh, microbatches, schedule, loss
        self._size = mesh.size("pipe")
        self._rank = mesh.ranks("pipe").index(mesh.world.rank)
        self.count = self._size * (stages_per_rank if schedule == "interleaved" and self._size > 1 else 1)
        self.stages = list(range(self._rank, self.count, self._size))
        self._steps = 0
        self._measured = math.nan
        self._scale = 1.0  # of the step's losses
        self._failed = ""
        self._tied_sums: dict[int, torch.Tensor] | None = None
        self.first_names: dict[str, nn.Parameter] = {}  # copies of other stages' weights, by name in the whole model
        self._kept: set[int] = set()  # tied weights with a hook, by id()
        with ExitStack() as undo:
            self._world = mesh.world.duplicate()
            undo.callback(self._world.close)
            seed = torch.initial_seed() % 2**31 if seed is None else seed
            self._together(lambda: self._build(layers, names, cut, checkpoint_every, seed, seed_with))
            self.called: list[Callable[..., Any]] = list(self.parts)  # run in place of the parts
            same = [axis for axis in mesh.axes if axis in _SAME]
            self._same = self._same_experts = mesh.split(*same, use="pipeline")
            undo.callback(self._same.close)
            if "expert" in same:
                self._same_experts = mesh.split(*(axis for axis in same if axis != "expert"), use="pipeline's experts")
                undo.callback(self._same_experts.close)
            self._replicas = mesh.size(*(axis for axis in same if axis != "sequence"))
            self._pipe = mesh.split("pipe", use="pipeline")
            undo.callback(self._pipe.close)
            self._ties = self._tie(layers, names, undo)
            for name, param in reversed(self.first_names.items()):
                add_first_name(self.module, name, param)
            self._send_first_weights()
            self._messages: Any = self._make_messages()
            self._runner: Any = None
            self._run_stages: list[Any] = []
            self._undo = undo.pop_all()

    # --- construction -----------------------------------------------------------------------------------------------

    def _build(
        self,
        layers: Sequence[Any],
        names: Sequence[str],
        cut: Any,
        every: int,
        seed: int,
        seed_with: Callable[[int], Any],
    ) -> list[Any]:
        """Cut and build this rank's layers. Returns: values that must be equal on all ranks."""
        if self.schedule == "interleaved" and self.microbatches % self._size:
            raise ValueError(
                f"schedule='interleaved' needs a multiple of {self._size} micro-batches, not {self.microbatches}"
            )
        self.bounds = cut_layers(layers, self.count, cut)
        self._check_ties(layers)
        tied: dict[str, nn.Module] = {}
        self.parts = [
            build_stage(layers, names, self.bounds[stage], self.bounds[stage + 1], seed, tied, every, seed_with)
            for stage in self.stages
        ]
        self.module: nn.Module = self.parts[0]
        if len(self.parts) > 1:
            self.module = nn.Module()
            for name, child in (pair for part in self.parts for pair in part.named_children()):
                self.module.add_module(name, child)
        specs = any(isinstance(layer, LayerSpec) for layer in layers)
        return [len(layers), self.bounds, self.microbatches, self.schedule, every, seed if specs else 0]

    def _check_ties(self, layers: Sequence[Any]) -> None:
        """Raise ValueError for a weight of several stages in parts: its sums would need the same parts."""
        for key, places in ties_of(layers).items():
            parts = [layers[number].get_parameter(name) for number, names in places.items() for name in names]
            if len({self.stage_of(number) for number in places}) > 1 and any(map(is_dtensor, parts)):
                raise ValueError(
                    f"{key} is shared by stages, and divided along the axis 'tensor': leave it out of the plan"
                )

    def _together(self, build: Callable[[], list[Any]]) -> None:
        """Run ``build`` on all ranks, and compare its results. Collective. Raises: ValueError, on all ranks."""
        error, found = "", None
        try:
            found = build()
        except Exception as cause:
            error = str(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}"
        every = all_values(self._world, [error, found], "building a pipeline")
        self._raise_first([text for text, _ in every])
        words = ("the number of layers", "bounds", "microbatches", "schedule", "checkpoint_every", "torch's seed")
        self._compare(words, [values for _, values in every])

    def _raise_first(self, texts: Sequence[str]) -> None:
        for rank, text in enumerate(texts):
            if text:
                raise ValueError(f"pipeline: {self.where(rank)}: {text}")

    def _compare(self, words: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Raise ValueError for the first value that differs from rank 0's. rows: of all ranks."""
        for rank, row in enumerate(rows):
            for word, value, first in zip(words, row, rows[0], strict=True):
                if value != first:
                    raise ValueError(
                        f"pipeline: {word} is {value} on {self.where(rank)}, but {first} on {self.where(0)}: give the "
                        "same on all ranks"
                    )

    def where(self, rank: int) -> str:
        """Name a rank of the mesh with its stages."""
        place = next(group.index(rank) for group in self.mesh.groups("pipe") if rank in group)
        return f"stage {' and '.join(map(str, range(place, self.count, self._size)))} (rank {rank})"

    def stage_of(self, layer: int) -> int:
        """Return the stage that has a layer."""
        return max(stage for stage in range(self.count) if self.bounds[stage] <= layer)

    def _tie(
        self, layers: Sequence[Any], names: Sequence[str], undo: ExitStack
    ) -> list[tuple[list[nn.Parameter], Communicator]]:
        """Find the weights that stages of several ranks share, and connect these ranks. Collective."""
        found = []
        for key, places in sorted(ties_of(layers).items()):
            ranks = list(dict.fromkeys(self.stage_of(number) % self._size for number in sorted(places)))
            if len(ranks) == 1:
                continue
            group = next(n for n, each in enumerate(self.mesh.groups("pipe")) if self._world.rank in each)
            shares = self._rank in ranks
            place = ranks.index(self._rank) if shares else 0
            comm = self._world.split(group if shares else None, place, name=f"stages that share {key}")
            if comm is None:
                continue
            undo.callback(comm.close)
            number, keys = next((n, each) for n, each in places.items() if self.stage_of(n) in self.stages)
            layer = next(part for part in self.parts if part.begin <= number < part.end).layer(number)
            keys = keys or [name for name, _ in layer.named_parameters()]
            first = min(places)
            params = [layer.get_parameter(key) for key in keys]
            if place > 0:
                keys = places[first] or keys
                self.first_names |= {f"{names[first]}.{key}": p for key, p in zip(keys, params, strict=True)}
                for tensor in (*params, *(() if places[first] else layer.buffers())):
                    tensor.ds_pipe_replicated = True  # DeepSpeed's mark of copies
            found.append((params, comm))
        return found

    def _keep_gradients(self) -> None:
        """Give tied weights that are trained now the hook of [Note: tied weights]."""

        def keeper(key: int) -> Callable[[torch.Tensor], torch.Tensor | None]:
            def keep(grad: torch.Tensor) -> torch.Tensor | None:
                sums = self._tied_sums
                if sums is None:
                    return None
                if key in sums:
                    sums[key] += grad
                else:
                    sums[key] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
                return grad.new_zeros(()).expand_as(grad)

            return keep

        for param in (param for params, _ in self._ties for param in params):
            if param.requires_grad and id(param) not in self._kept:
                param.register_hook(keeper(id(param)))
                self._kept.add(id(param))

    @torch.no_grad()
    def _send_first_weights(self) -> None:
        """Send a stage's first weights to its copies, and a tied weight from its first stage to the others."""
        for param, comm in ((param, comm) for params, comm in self._ties for param in params):
            comm.broadcast(param.data, root=0, name="tied weights")
        if self._same.world_size > 1:
            for tensor in (*self.module.parameters(), *self.module.buffers()):
                self._ranks_of(tensor).broadcast(as_local(tensor).data, root=0, name="first weights of a stage")

    def _ranks_of(self, tensor: torch.Tensor) -> Communicator:
        """Return the ranks with the same tensor of this stage."""
        return self._same_experts if is_expert(tensor) else self._same

    def _make_messages(self) -> Any:
        from zcomm.parallel.pipeline_messages import StageMessages

        return StageMessages(self._pipe)

    def _make_schedule(self, trains: bool) -> None:
        """Make the stages, and for training the schedule of ``microbatches``, unless they are made."""
        from torch.distributed import pipelining

        from zcomm.parallel.pipeline_stage import Stage

        last = min(self.stages)  # of its passes the last one is the rank's last
        stages = self._run_stages = self._run_stages or [
            Stage(part, n, self.count, self._size, self._messages, self._last_passes if n == last else self._passes)
            for n, part in zip(self.stages, self.called, strict=True)
        ]
        if not trains or (self._runner is not None and self._runner._n_microbatches == self.microbatches):
            return
        kinds: dict[str, Any] = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B}
        make = pipelining.ScheduleInterleaved1F1B if len(stages) > 1 else kinds.get(self.schedule, kinds["1f1b"])
        if self.microbatches < self.count and len(stages) == 1:
            make = pipelining.ScheduleGPipe  # with so few 1F1B runs all forwards first, too, but torch's refuses them
        given: Any = stages if len(stages) > 1 else stages[0]
        self._runner = make(given, self.microbatches, self._weighted, scale_grads=False)

    # --- a step -------------------------------------------------------------------------------------------------------

    @property
    def is_first(self) -> bool:
        """Return True if this rank has the first stage."""
        return self.stages[0] == 0

    @property
    def is_last(self) -> bool:
        """Return True if this rank has the last stage."""
        return self.stages[-1] == self.count - 1

    @property
    def waited_s(self) -> float:
        """Seconds in which this rank waited for messages of other stages in the last step."""
        return float(self._messages.waited_s)

    @property
    def bubble(self) -> Bubble:
        """The bubble of the last step, next to (P - 1) / (v M + P - 1): P ranks with v stages each, M micro-batches."""
        return Bubble(self._measured, (self._size - 1) / (len(self.stages) * self.microbatches + self._size - 1))

    def __repr__(self) -> str:
        return (
            f"<zcomm.parallel.Pipeline: {self.count} stages, {self.schedule}, {self.microbatches} micro-batches, "
            f"{self.bubble}; {self.where(self._world.rank)}>"
        )

    def step(self, inputs: Any = None, target: Any = None) -> torch.Tensor:
        """Run forward and backward passes of a batch; gradients belong to its mean loss. Collective.

        inputs: a tensor or a tuple of tensors, read by the first stage. target: the same, read by the last one. Other
        ranks may give None. Dimension 0 is cut into ``microbatches`` parts of equal size, or one sample more. Or both
        are lists of micro-batches. ``loss(output, target)`` is the mean of a micro-batch; micro-batches count by their
        samples, in lists equally.
        A ZeroOptimizer of the parameters reduces gradients over data ranks; without one ``p.grad`` is averaged here.
        Returns: the loss, a scalar, mean over micro-batches and data ranks, on all ranks.
        Raises, on all ranks: ValueError if ranks differ; RuntimeError naming stage and micro-batch of a failed pass;
        PeerLost; TimeoutError. After a failed pass no step is possible.
        """
        loss, _ = self.run(lambda: (inputs, target), trains=True)
        assert loss is not None
        return loss

    def eval(self, inputs: Any = None, target: Any = None) -> tuple[torch.Tensor | None, list[Any] | None]:
        """Run forward passes without gradients. Collective. Arguments and errors: as ``step``.

        Returns: the loss on all ranks (None without a target), and the micro-batches' outputs on the last stage's rank
        (None on others).
        """
        with torch.no_grad():
            return self.run(lambda: (inputs, target), trains=False)

    def run(
        self, read: Callable[[], tuple[Any, Any]], trains: bool, losses: bool = True
    ) -> tuple[torch.Tensor | None, list[Any] | None]:
        """Run a batch: ``step`` and ``eval``. read: returns inputs and target; its error is the error of all ranks.
        losses: False leaves the loss out. Collective."""
        if self._failed:
            raise RuntimeError(f"this pipeline has failed ({self._failed}): build it and its optimizer again")
        start, owners = time.perf_counter(), self._owners()
        args, targets, weights = self._prepare(read, trains, owners)
        self._make_schedule(trains)
        found_losses: list[torch.Tensor] = []
        error: Exception | None = None
        try:
            self._messages.begin(self._steps)
            for stage in self._run_stages:
                stage.begin(trains)
            if trains:
                self._tied_sums = {} if self._ties else None
                self._keep_gradients()
                with ExitStack() as context:
                    for owner in owners:
                        context.enter_context(owner.one_micro_step(scaled=True))
                    pairs = list(zip(targets, weights, strict=True))
                    self._runner._step_microbatches(args, [{}] * self.microbatches, pairs, found_losses)
            else:
                for number in range(self.microbatches):
                    output = self._forward(number, args[number])
                    if self.is_last and losses and (self.loss is None or targets[number] is not None):
                        found_losses.append(self._weighted(output, (targets[number], weights[number])))
            self._messages.finish()
        except Exception as cause:
            error = cause
            self._pipe.close()  # ends the receives of other stages
        totals = [loss.detach().double() / self._scale for loss in found_losses]
        found = self._meet(error, totals, time.perf_counter() - start)
        if trains:
            self._measured = float(found[:, 2].sum() / found[:, 3].sum())
            self._finish_gradients(owners)
        outputs = [output for stage in self._run_stages if stage.is_last for output in stage.output_chunks]
        for stage in self._run_stages:
            stage.clear_runtime_states()
        known = found[found[:, 4] > 0, 1]
        return known.mean() if known.numel() else None, outputs if self.is_last and not trains else None

    def _forward(self, number: int, args: tuple[Any, ...]) -> Any:
        """Run a micro-batch's forward passes of this rank's stages. Returns: the output of the last of them."""
        output = None
        for stage in self._run_stages:
            output = stage.forward_one_chunk(number, args)
            stage.get_fwd_send_ops(number)
        return output

    def _weighted(self, output: Any, pair: tuple[Any, float]) -> torch.Tensor:
        """Return the loss of a micro-batch times its weight and the loss scale. pair: target and weight."""
        target, weight = pair
        value = output if self.loss is None else self.loss(output, target)
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise TypeError(f"the loss must be a tensor of one element, got {value!r:.80}")
        value = value.reshape(()) if self._scale == 1 else value.reshape(()).float() * self._scale
        return value * weight

    # --- before the passes ------------------------------------------------------------------------------------------

    def _owners(self) -> list[ZeroOptimizer]:
        return cast("list[ZeroOptimizer]", optimizers_of(self.module.parameters()))

    def _prepare(
        self, read: Callable[[], tuple[Any, Any]], trains: bool, owners: Sequence[ZeroOptimizer]
    ) -> tuple[list[Any], list[Any], list[float]]:
        """Cut the batch, and compare the ranks. Collective. Returns: arguments, targets and weights of micro-batches.

        Raises: ValueError, the same on all ranks.
        """
        text, given, targets, rows = "", None, None, [_NO_ROWS, _NO_ROWS]
        count = self.microbatches
        try:
            for owner in owners:
                if owner.stage == 3:
                    raise ValueError("a pipeline's ZeroOptimizer has stage 0, 1 or 2, not 3")
                if owner.loss_scale != owners[0].loss_scale:
                    raise ValueError(
                        f"ZeroOptimizers of a stage have loss scales {owners[0].loss_scale:g} and {owner.loss_scale:g}"
                    )
            self._scale = owners[0].loss_scale if owners and trains else 1.0
            if trains and not torch.is_grad_enabled():
                raise ValueError("step() inside of torch.no_grad(): leave it, or call eval()")
            inputs, target = read()
            given, rows[0] = _cut("inputs", inputs, count)
            targets, rows[1] = _cut("target", target, count)
            if self.is_first and given is None:
                raise ValueError("the first stage needs inputs")
            if self.is_last and targets is None and trains and self.loss is not None:
                raise ValueError("the last stage needs a target")
        except Exception as cause:
            text = str(cause) if isinstance(cause, ValueError) else f"{type(cause).__name__}: {cause}"
        self._steps += 1
        own = torch.tensor([self._steps, int(trains), count, *rows, bool(text)])
        try:
            every = self._world.all_gather(own, name="beginning of a pipeline step")
            assert isinstance(every, torch.Tensor)
            found = every.view(self._world.world_size, -1).tolist()
            texts = all_values(self._world, text, "errors before a pipeline step") if any(r[-1] for r in found) else ()
        except Exception as ended:
            self._explain(ended, "before the passes")
            raise
        self._raise_first(texts)
        names = ("the number of steps", "training", "microbatches")
        self._compare(names, [[row[0], bool(row[1]), row[2]] for row in found])
        known = self._known_rows(found)
        sizes = [1] * count if known <= 0 else _sizes(known, count)
        weights = [size / sum(sizes) for size in sizes]
        args = [part if isinstance(part, tuple) else (part,) for part in given or ()] if self.is_first else [()] * count
        return args, targets if targets is not None else [None] * count, weights

    def _known_rows(self, found: Sequence[Sequence[int]]) -> int:
        """Return the samples of this pipeline's batch. Raises: ValueError, on all ranks, if stages gave different
        numbers."""
        own = _NO_ROWS
        for group in self.mesh.groups("pipe"):
            given = [(rank, rows) for rank in group for rows in found[rank][3:5] if rows != _NO_ROWS]
            for rank, rows in given:
                if rows != given[0][1]:
                    words = [f"{n} samples" if n else "a list of micro-batches" for n in (given[0][1], rows)]
                    raise ValueError(
                        f"pipeline: {words[0]} on {self.where(given[0][0])}, {words[1]} on {self.where(rank)}"
                    )
            if self._world.rank in group and given:
                own = given[0][1]
        return own

    def _passes(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the context of a backward pass; a later one reduces its gradients."""
        context = ExitStack()
        for owner in self._owners() if self._same.world_size > 1 or self._ties else ():
            context.enter_context(owner.no_sync())
        return context

    def _last_passes(self, is_last: bool) -> AbstractContextManager[Any]:
        """Return the same, for the stage with the rank's last pass. is_last: this is that pass."""
        return nullcontext() if is_last and self._tied_sums is None else self._passes(False)

    # --- behind the passes ------------------------------------------------------------------------------------------

    def _meet(self, error: Exception | None, losses: Sequence[torch.Tensor], seconds: float) -> torch.Tensor:
        """Exchange errors and losses. Collective.

        Returns: a row for each rank: failed, loss, seconds of waiting, seconds, has a loss.

        Raises: see [Note: pipeline steps].
        """
        place = self._messages.place
        total = float(torch.stack(list(losses)).sum()) if losses else 0.0
        own = [error is not None, total, self._messages.waited_s, seconds, bool(losses)]
        texts: list[Any] = []
        try:
            every = self._world.all_gather(torch.tensor(own, dtype=torch.float64), name="end of a pipeline step")
            assert isinstance(every, torch.Tensor)
            found = every.view(self._world.world_size, -1)
            if bool((found[:, 0] > 0).any()):
                told = None if error is None else [type(error).__name__, f"{place}: {error}"]
                texts = all_values(self._world, told, "errors of a pipeline step")
        except Exception as ended:
            self._explain(ended, f"at {place}")
            raise ended from error
        if texts:
            first = [(rank, told) for rank, told in enumerate(texts) if told is not None]
            rank, (kind, text) = min(first, key=lambda each: (each[1][0] == "PeerLost", each[0]))
            self._failed = f"step {self._steps}: {text}"
            text = f"pipeline step {self._steps}: rank {rank} failed, {kind} in {text}"
            raise (TimeoutError if kind == "TimeoutError" else RuntimeError)(text) from error
        return found

    def _explain(self, error: Exception, place: str) -> None:
        """Add step, stages and place to the error of a meeting, which ends this pipeline."""
        self._failed = f"step {self._steps}"
        lost = f"; lost: {self.where(error.group_rank)}" if isinstance(error, PeerLost) else ""
        _extend(error, f"(pipeline step {self._steps}: this rank is {self.where(self._world.rank)}, {place}{lost})")

    def _finish_gradients(self, owners: Sequence[ZeroOptimizer]) -> None:
        """Sum gradients of tied weights over their stages; average gradients that no ZeroOptimizer has. Collective."""
        sums, self._tied_sums = self._tied_sums, None
        if sums is not None:
            roots, totals = [], []
            for params, comm in self._ties:
                has = torch.tensor([id(param) in sums for param in params], dtype=torch.int32)
                comm.all_reduce(has, op="max", name="gradients of tied weights")
                for param in (param for param, some in zip(params, has.tolist(), strict=True) if some):
                    wide = torch.promote_types(param.dtype, torch.float32)
                    total = sums.get(id(param))
                    total = torch.zeros(param.shape, dtype=wide) if total is None else total.contiguous()
                    comm.all_reduce(total, name="gradients of tied weights")
                    if param.requires_grad:
                        roots.append(param)
                        totals.append(total.to(param.dtype))
            with ExitStack() as context:
                for owner in owners:
                    context.enter_context(owner.one_micro_step(joins=True, scaled=True))
                if roots:
                    torch.autograd.backward(roots, totals)
        if self._same.world_size == 1:
            return
        owned = {id(param) for owner in owners for group in owner.param_groups for param in group["params"]}
        free = [p for p in self.module.parameters() if p.requires_grad and id(p) not in owned]
        if not free:
            return
        has = torch.tensor([param.grad is not None for param in free], dtype=torch.int32)
        self._same.all_reduce(has, op="max", name="gradients of a stage")
        for param in (param for param, some in zip(free, has.tolist(), strict=True) if some):
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad.contiguous()
            grad = as_local(param.grad).data
            self._ranks_of(param).all_reduce(grad, name="gradients of a stage")
            grad /= self._replicas

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Clip ``p.grad`` of all stages to a common norm, as torch.nn.utils does. Collective over the pipeline.

        For optimizers of torch; a ZeroOptimizer has ``clip_norm=``. Returns: the earlier norm, each tied weight once.
        """
        params = [param for param in self.module.parameters() if param.grad is not None]
        counted = [cast(torch.Tensor, p.grad) for p in params if not getattr(p, "ds_pipe_replicated", False)]
        total = torch.zeros(1, dtype=torch.float64)
        for grad in counted:
            total += whole_of(grad.detach().double().square().sum())
        self._pipe.all_reduce(total, name="norm of a pipeline")
        norm = math.sqrt(float(total))
        if norm > max_norm:
            for param in params:
                cast(torch.Tensor, param.grad).mul_(max_norm / (norm + 1e-6))
        return norm

    def close(self) -> None:
        """Close the communicators; the module keeps its weights. Idempotent; not collective."""
        self._failed = self._failed or "closed"
        self._undo.close()


def _sizes(rows: int, count: int) -> list[int]:
    """Return the sizes of ``torch.tensor_split(rows, count)``."""
    return [rows // count + (number < rows % count) for number in range(count)]


def _cut(word: str, batch: Any, count: int) -> tuple[list[Any] | None, int]:
    """Return micro-batches and the number of samples, or _NO_ROWS, or _LISTED. Raises: ValueError."""
    if batch is None:
        return None, _NO_ROWS
    if isinstance(batch, list):
        if len(batch) != count:
            raise ValueError(f"{word} is a list of {len(batch)} micro-batches, but microbatches={count}")
        return batch, _LISTED
    tensors = batch if isinstance(batch, tuple) else (batch,)
    if not tensors or not all(isinstance(each, torch.Tensor) and each.dim() for each in tensors):
        raise ValueError(f"{word} must be a tensor, a tuple of tensors, or a list of micro-batches")
    rows = {each.shape[0] for each in tensors}
    if len(rows) > 1 or min(rows) < count:
        raise ValueError(
            f"{word} has {' and '.join(map(str, sorted(rows)))} samples: {count} micro-batches need {count}"
        )
    parts = list(zip(*(each.tensor_split(count) for each in tensors), strict=True))
    return (parts if isinstance(batch, tuple) else [part[0] for part in parts]), min(rows)


def _extend(error: BaseException, words: str) -> None:
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]} {words}", *error.args[1:])


def pipeline(
    model: nn.Sequential | Sequence[Any],
    mesh: ProcessMesh | DeviceMesh,
    microbatches: int,
    schedule: str = "1f1b",
    *,
    loss: Loss | None,
    cut: str | Sequence[int] = "parameters",
    stages_per_rank: int = 2,
    checkpoint_every: int = 0,
) -> Pipeline:
    """Cut a sequential model into stages over the mesh's axis "pipe", and return this rank's part. Collective.

    model: an nn.Sequential, or a list of modules, functions and LayerSpecs, the same on all ranks. The first data
    rank's weights are used; LayerSpecs are built on their own stage only, with a seed of their own.
    mesh: a ProcessMesh or torch's DeviceMesh of all ranks with an axis "pipe"; other axes have copies of the pipeline.
    schedule: "1f1b" (few activations in memory), "gpipe" (all forwards first), or "interleaved". The last one has
    ``stages_per_rank`` stages on each rank, a smaller bubble, and ``microbatches`` a multiple of the ranks.
    loss: called with the last output and the target of a micro-batch; None: the output is the loss.
    cut: "parameters" (equally many trained elements), "uniform" (equally many layers), "type:REGEX" (equally many
    layers of matching types), or the bounds of the stages.
    checkpoint_every: layers between activation checkpoints; backward runs the layers in between again. 0: none.
    Raises: ImportError for torch before 2.8; ValueError, the same on all ranks, if the arguments differ or do not fit.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < (2, 8):
        raise ImportError(f"zcomm.parallel.pipeline needs torch >= 2.8, and this is torch {torch.__version__}")
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule={schedule!r}; use {', '.join(map(repr, SCHEDULES))}")
    for word, value, least in (
        ("microbatches", microbatches, 1),
        ("stages_per_rank", stages_per_rank, 1),
        ("checkpoint_every", checkpoint_every, 0),
    ):
        if not isinstance(value, int) or not least <= value < 2**15:
            raise ValueError(f"{word}={value!r} must be a whole number from {least} to {2**15 - 1}")
    world = mesh.world if isinstance(mesh, ProcessMesh) else job.init()
    box = ProcessMesh.of(mesh, world)
    if "pipe" not in box.axes:
        raise ValueError(f"mesh={box.describe()} has no axis 'pipe'")
    names = [name for name, _ in model.named_children()] if isinstance(model, nn.Sequential) else []
    layers = list(model)
    names = names if len(names) == len(layers) else [str(number) for number in range(len(layers))]
    return Pipeline(layers, names, box, microbatches, schedule, loss, cut, stages_per_rank, checkpoint_every)
