"""Replacements for functions of torch.distributed that refuse backends by name or by device.

``monitored_barrier`` serves Gloo only, ``split_group`` accelerators only; the replacements serve zcomm's groups, and
hand all others on. If torchcomms is in use, torch asks ``new_comm`` for every backend; it does not know "zcomm".
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from zcomm.torch_backend.group import ProcessGroup
from zcomm.torch_backend.options import NAME


def install() -> None:
    """Replace them."""
    _serve_monitored_barrier()
    _serve_split_group()
    _refuse_torchcomms()


def _serve_monitored_barrier() -> None:
    original = c10d.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(
        group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        mine = group
        if group is None and dist.is_initialized():
            mine = dist.group.WORLD
        if not isinstance(mine, ProcessGroup):
            original(group, timeout, wait_all_ranks)
            return
        if timeout is not None and not isinstance(timeout, timedelta):
            warnings.warn(f"monitored_barrier: timeout={timeout} taken as seconds; pass a timedelta", stacklevel=2)
        mine.monitored_barrier(timeout, wait_all_ranks)

    c10d.monitored_barrier = monitored_barrier
    dist.monitored_barrier = monitored_barrier


def _serve_split_group() -> None:
    original: Any = c10d.split_group

    @functools.wraps(original)
    def split_group(
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        pg_options: Any = None,
        group_desc: str | None = None,
        backend: str | None = None,
    ) -> Any:
        parent = parent_pg or (dist.group.WORLD if dist.is_initialized() else None)
        if not isinstance(parent, ProcessGroup):
            more = {} if backend is None else {"backend": backend}  # of torch 2.13
            return original(parent_pg, split_ranks, timeout, pg_options, group_desc, **more)
        return _split(parent, split_ranks, timeout, pg_options, group_desc, backend)

    c10d.split_group = split_group
    dist.split_group = split_group
    device_mesh.split_group = split_group


def _split(
    parent: ProcessGroup,
    split_ranks: Sequence[Sequence[int]] | None,
    timeout: timedelta | None,
    options: Any,
    description: str | None,
    backend: str | None,
) -> ProcessGroup | None:
    """Split ``parent`` as ``torch.distributed.split_group`` does, and enter the part in torch's tables.

    The parent may be on the CPU, and need have no device. Raises: ValueError, the same on all ranks; as
    ``ProcessGroup.split_group``.
    """
    if not split_ranks or not all(split_ranks):
        raise ValueError(f"split_group: split_ranks={split_ranks}: expected lists of ranks of the parent group")
    lists = [[int(rank) for rank in ranks] for ranks in split_ranks]
    every = [rank for ranks in lists for rank in ranks]
    if twice := sorted({rank for rank in every if every.count(rank) > 1}):
        raise ValueError(f"split_group: split_ranks={lists}: rank {twice[0]} is in two parts, or twice in one")
    if backend is not None and {each.rpartition(":")[2] for each in str(backend).lower().split(",")} != {NAME}:
        raise ValueError(f"split_group: backend={backend!r}: a part has the backend of its parent, {NAME!r}")
    world: Any = c10d._world
    if parent not in world.pg_group_ranks:
        raise ValueError("split_group: torch.distributed does not know the parent group: was it destroyed?")
    if timeout is None:
        timeout = options._timeout if options is not None else c10d._get_default_timeout(c10d.Backend(NAME))
    mine = next((ranks for ranks in lists if parent.rank() in ranks), lists[0])
    part = parent.split_group(mine, timeout, options, group_desc=description)
    if part is None:
        return None
    name: Any = part.getGroupName()
    tag = f"ptd:{name}"
    global_ranks = {inside: outside for outside, inside in world.pg_group_ranks[parent].items()}
    world.pg_map[part] = (world.pg_map[parent][0], part.get_group_store())
    world.pg_names[part] = name
    world.pg_backend_config[part] = world.pg_backend_config[parent]
    world.pg_group_ranks[part] = {global_ranks[rank]: place for place, rank in enumerate(mine)}
    world.tags_to_pg.setdefault(tag, []).append(part)
    world.pg_to_tag[part] = tag
    c10d._register_process_group(name, part)
    return part


def _refuse_torchcomms() -> None:
    original = getattr(c10d, "new_comm", None)  # torch has it if torchcomms is installed
    if original is None:
        return

    @functools.wraps(original)
    def new_comm(backend: str, *arguments: Any, **options: Any) -> Any:
        if str(backend).lower() == NAME:
            raise RuntimeError(
                'init_process_group("zcomm"): torch asks torchcomms for every backend, and it has no "zcomm"; unset '
                "TORCH_DISTRIBUTED_USE_TORCHCOMMS, or set torch.distributed.config.use_torchcomms = False"
            )
        return original(backend, *arguments, **options)

    c10d.new_comm = new_comm
