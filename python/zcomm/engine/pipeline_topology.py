"""Topologies of DeepSpeed's pipelines: ranks as a box with named axes (arithmetic), and a grid of process groups.

The last axis changes fastest, as in zcomm.ProcessMesh.
"""

from __future__ import annotations

import itertools
from collections import namedtuple
from collections.abc import Sequence
from typing import Any


class ProcessTopology:
    """Ranks by coordinates along ``axes`` of ``dims`` ranks each. ProcessCoord: the type of a coordinate."""

    def __init__(self, axes: Sequence[str], dims: Sequence[int]) -> None:
        self.axes, self.dims = list(axes), list(dims)
        kind: Any = namedtuple  # its fields are values here
        self.ProcessCoord: Any = kind("ProcessCoord", self.axes)
        places = itertools.product(*map(range, self.dims))
        self.mapping = {self.ProcessCoord(*place): rank for rank, place in enumerate(places)}

    def __str__(self) -> str:
        return str(self.mapping)

    def world_size(self) -> int:
        """Return the number of ranks."""
        return len(self.mapping)

    def get_axis_names(self) -> list[str]:
        """Return the axes, outermost first."""
        return self.axes

    def get_dim(self, axis: str) -> int:
        """Return the number of ranks along an axis; 0 for an unknown one."""
        return self.dims[self.axes.index(axis)] if axis in self.axes else 0

    def get_rank(self, **coord_kwargs: int) -> int:
        """Return the rank at a coordinate. Raises: ValueError if an axis is missing or unknown, or out of range."""
        if set(coord_kwargs) != set(self.axes):
            raise ValueError(f"get_rank() needs a place on each axis of {self.axes}; filter_match() takes some of them")
        coord = self.ProcessCoord(**coord_kwargs)
        if coord not in self.mapping:
            raise ValueError(f"get_rank(): {coord} is not in {dict(zip(self.axes, self.dims, strict=True))}")
        return self.mapping[coord]

    def get_coord(self, rank: int) -> Any:
        """Return the coordinate of a rank. Raises: ValueError for an unknown rank."""
        for coord, each in self.mapping.items():
            if each == rank:
                return coord
        raise ValueError(f"rank {rank} is not one of the {self.world_size()} of this topology")

    def get_rank_repr(
        self, rank: int, omit_axes: Sequence[str] = ("data", "pipe"), inner_sep: str = "_", outer_sep: str = "-"
    ) -> str:
        """Return a rank's coordinate as text, such as "model_00", without some axes."""
        coord = self.get_coord(rank)
        shown = [axis for axis in self.axes if axis not in omit_axes]
        return outer_sep.join(f"{axis}{inner_sep}{getattr(coord, axis):02d}" for axis in shown)

    def filter_match(self, **filter_kwargs: int) -> list[int]:
        """Return the ranks with these places on some axes."""
        wanted = filter_kwargs.items()
        return [rank for coord, rank in self.mapping.items() if all(getattr(coord, a) == n for a, n in wanted)]

    def get_axis_list(self, axis: str, idx: int) -> list[int]:
        """Return the ranks at place ``idx`` of an axis."""
        return self.filter_match(**{axis: idx})

    def get_axis_comm_lists(self, axis: str) -> list[list[int]]:
        """Return the groups of ranks that differ along an axis only; none for an unknown axis."""
        if axis not in self.axes:
            return []
        others = [other for other in self.axes if other != axis]
        places = itertools.product(*(range(self.get_dim(other)) for other in others))
        return [self.filter_match(**dict(zip(others, place, strict=True))) for place in places]


class PipeDataParallelTopology(ProcessTopology):
    """Axes "pipe" and "data"."""

    def __init__(self, num_pp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data"], [num_pp, num_dp])


class PipeModelDataParallelTopology(ProcessTopology):
    """Axes "pipe", "data" and "model"."""

    def __init__(self, num_pp: int, num_mp: int, num_dp: int) -> None:
        super().__init__(["pipe", "data", "model"], [num_pp, num_dp, num_mp])


def _prime_factors(N: int) -> list[int]:
    """Return the prime factors of a positive number in order. Raises: ValueError."""
    if N < 1:
        raise ValueError(f"{N} is not positive")
    found, factor = [], 2
    while N > 1:
        while N % factor == 0:
            found.append(factor)
            N //= factor
        factor += 1
    return found


class PipelineParallelGrid:
    """The groups of a topology as torch's process groups; an ``mpu``. Collective over all ranks.

    dp_group, pp_group: ranks of this rank's groups along "data" and "pipe". Without a topology the ranks' prime factors
    go to "pipe" and "data" in turn.
    """

    def __init__(self, topology: ProcessTopology | None = None, process_group: Any = None) -> None:
        import torch.distributed as dist

        self.global_rank, self.world_size = dist.get_rank(), dist.get_world_size()
        if topology is None:
            sizes = [1, 1]
            for number, prime in enumerate(_prime_factors(self.world_size)):
                sizes[number % 2] *= prime
            topology = PipeDataParallelTopology(*sizes)
        self._topo = topology
        sizes_of = {axis: max(topology.get_dim(axis), 1) for axis in ("data", "pipe", "model")}
        self.data_parallel_size, self.pipe_parallel_size = sizes_of["data"], sizes_of["pipe"]
        self.model_parallel_size = self.slice_parallel_size = sizes_of["model"]
        if not self._is_grid_valid():
            raise ValueError(
                f"{topology} has {topology.world_size()} places, but the world has {self.world_size} ranks"
            )
        self.stage_id, self.data_parallel_id = self.get_stage_id(), self.get_data_parallel_id()
        self.is_first_stage = self.stage_id == 0
        self.is_last_stage = self.stage_id == self.pipe_parallel_size - 1
        self.dp_groups = topology.get_axis_comm_lists("data")
        self.pipe_groups = topology.get_axis_comm_lists("pipe")
        replicas = [sorted(topology.get_axis_list("data", place)) for place in range(self.data_parallel_size)]
        self.dp_group, self.dp_proc_group = self._joined(self.dp_groups)
        self.pp_group, self.pp_proc_group = self._joined(self.pipe_groups)
        model, self.ds_model_proc_group = self._joined(replicas)
        self.ds_model_world_size, self.ds_model_rank = len(model), model.index(self.global_rank)
        slices = topology.get_axis_comm_lists("model") or [[rank] for rank in range(self.world_size)]
        self.slice_group, self.slice_proc_group = self._joined(slices)
        self.p2p_groups = [
            [group[place], group[(place + 1) % len(group)]]
            for rank in range(self.world_size)
            for group in self.pipe_groups
            for place in range(len(group))
            if group[place] == rank
        ]

    def _joined(self, groups: Sequence[Sequence[int]]) -> tuple[list[int], Any]:
        """Make the process groups of all lists; return this rank's list and group."""
        import torch.distributed as dist

        mine: tuple[list[int], Any] = [], None
        for ranks in groups:
            group = dist.new_group(ranks=list(ranks))
            if self.global_rank in ranks:
                mine = list(ranks), group
        return mine

    def _is_grid_valid(self) -> bool:
        return self._topo.world_size() == self.world_size

    def topology(self) -> ProcessTopology:
        """Return the topology."""
        return self._topo

    def stage_to_global(self, stage_id: int, **kwargs: int) -> int:
        """Return the rank of a stage at this rank's other places, of which ``kwargs`` replace some."""
        return self._topo.get_rank(**{**self._topo.get_coord(self.global_rank)._asdict(), **kwargs, "pipe": stage_id})

    def get_global_rank(self) -> int:
        """Return this rank's number in the job."""
        return self.global_rank

    def get_stage_id(self) -> int:
        """Return this rank's stage."""
        return int(getattr(self._topo.get_coord(self.global_rank), "pipe", 0))

    def get_data_parallel_id(self) -> int:
        """Return this rank's place along "data"."""
        return int(getattr(self._topo.get_coord(self.global_rank), "data", 0))

    get_pipe_parallel_rank = get_pipeline_model_parallel_rank = get_stage_id
    get_data_parallel_rank = get_data_parallel_id

    def get_pipe_parallel_world_size(self) -> int:
        """Return the number of stages."""
        return self.pipe_parallel_size

    get_pipeline_model_parallel_world_size = get_pipe_parallel_world_size

    def get_pipe_parallel_group(self) -> Any:
        """Return the process group of this rank's pipeline."""
        return self.pp_proc_group

    def get_data_parallel_world_size(self) -> int:
        """Return the number of ranks along "data"."""
        return self.data_parallel_size

    def get_data_parallel_group(self) -> Any:
        """Return the process group of the ranks with this rank's stage."""
        return self.dp_proc_group

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks with this rank's stage."""
        return self.dp_group

    def get_model_parallel_rank(self) -> int:
        """Return this rank's number among the ranks of one whole model."""
        return self.ds_model_rank

    def get_model_parallel_world_size(self) -> int:
        """Return the number of ranks of one whole model."""
        return self.ds_model_world_size

    def get_model_parallel_group(self) -> Any:
        """Return the process group of one whole model."""
        return self.ds_model_proc_group

    def get_slice_parallel_rank(self) -> int:
        """Return this rank's place along "model"."""
        return int(getattr(self._topo.get_coord(self.global_rank), "model", 0))

    get_tensor_model_parallel_rank = get_slice_parallel_rank

    def get_slice_parallel_world_size(self) -> int:
        """Return the number of ranks along "model"."""
        return self.slice_parallel_size

    get_tensor_model_parallel_world_size = get_slice_parallel_world_size

    def get_slice_parallel_group(self) -> Any:
        """Return the process group along "model"."""
        return self.slice_proc_group
