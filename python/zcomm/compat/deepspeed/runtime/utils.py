"""Small helpers that training scripts import, from ``deepspeed.runtime.utils`` and from modules of a few lines.

The rows of table.py say which module of DeepSpeed has which.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import reduce
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import nn

from zcomm.compat.deepspeed.accelerator import get_accelerator
from zcomm.compat.deepspeed.accelerator.cpu_accelerator import CpuAccelerator
from zcomm.compat.deepspeed.table import CONSTANTS
from zcomm.compat.deepspeed.utils.logging import log_dist
from zcomm.launch.cores import parse_range_list

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., object])

_CPU = torch.device("cpu")
_FILES = CONSTANTS["checkpoint.constants"]
_MODEL_PREFIX, _MODEL_SUFFIX = _FILES["MODEL_FILE_PREFIX"], _FILES["MODEL_FILE_SUFFIX"]


def is_model_parallel_parameter(p: torch.Tensor) -> bool:
    """Return True if ranks have different parts of ``p``: a DTensor, or a parameter with one of Megatron's marks."""
    if hasattr(p, "placements"):
        return any(not place.is_replicate() for place in p.placements)
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


class DummyOptim:
    """Stand-in for an optimizer of frozen parameters."""

    def __init__(self, params: Any) -> None:
        self.param_groups = [{"params": params}]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log memory of the device and of the host, on rank 0. force: False logs nothing."""
    if not force:
        return
    gib = 2**30
    accelerator = get_accelerator()
    host = CpuAccelerator()
    total, available = host.total_memory(), host.available_memory()
    log_dist(message, [0])
    log_dist(
        f"MA {accelerator.memory_allocated() / gib:.2f} GB  Max_MA {accelerator.max_memory_allocated() / gib:.2f} GB  "
        f"CA {accelerator.memory_reserved() / gib:.2f} GB  Max_CA {accelerator.max_memory_reserved() / gib:.2f} GB",
        [0],
    )
    used = total - available
    log_dist(f"CPU Virtual Memory: used = {used / gib:.2f} GB, percent = {100 * used / total:.1f}%", [0])
    accelerator.reset_peak_memory_stats()


def memory_status(msg: str, print_rank: int = -1, reset_max: bool = False) -> None:
    """Log the device's memory on rank ``print_rank`` (-1: on all)."""
    accelerator = get_accelerator()
    if reset_max:
        accelerator.reset_peak_memory_stats()
    gib = 2**30
    log_dist(
        f"{msg}: allocated {accelerator.memory_allocated() / gib:.4f} GB, "
        f"max {accelerator.max_memory_allocated() / gib:.4f} GB",
        [print_rank],
        logging.INFO,
    )


def empty_cache() -> None:
    """Free the device's unused memory."""
    get_accelerator().empty_cache()


def noop_decorator(func: T) -> T:
    """Return ``func``."""
    return func


class noop_context:
    """A context that does nothing."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *error: object) -> None:
        """Do nothing."""


def ensure_directory_exists(filename: str) -> None:
    """Create the folder of the file ``filename``."""
    os.makedirs(os.path.dirname(filename) or ".", exist_ok=True)


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's (if it is installed) and torch's generators."""
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(seed)


def copy_to_device(item: Any, device: torch.device | str, criterion_func: Callable[[torch.Tensor], bool]) -> Any:
    """Return ``item`` with copies on ``device`` of its tensors that ``criterion_func`` is true of."""
    return _each_tensor(item, lambda each: each.to(device) if criterion_func(each) else each)


def move_to_device(
    item: Any, device: torch.device | str, criterion_func: Callable[[torch.Tensor], bool] | None = None
) -> Any:
    """Move tensors in ``item``, in lists, tuples and dicts, to ``device``.

    Those that ``criterion_func`` is true of are moved in place, as in DeepSpeed: their ``data`` is. None: copies.
    """

    def move(each: torch.Tensor) -> torch.Tensor:
        if criterion_func is None:
            return each.to(device)
        if criterion_func(each):
            each.data = each.data.to(device)
        return each

    return _each_tensor(item, move)


def _each_tensor(item: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(item, torch.Tensor):
        return change(item)
    if isinstance(item, list):
        return [_each_tensor(each, change) for each in item]
    if isinstance(item, tuple):
        return tuple(_each_tensor(each, change) for each in item)
    if isinstance(item, dict):
        return {key: _each_tensor(each, change) for key, each in item.items()}
    return item


def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> torch.Tensor:
    """Clip gradients as torch's function does. Raises: NotImplementedError for mpu."""
    if mpu is not None:
        raise NotImplementedError("clip_grad_norm_(mpu=) is not available: ranks form one data-parallel group")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the L2 norm of norms."""
    return float(sum(norm**2.0 for norm in norm_list) ** 0.5)


def get_only_unique_item(items: Iterable[T]) -> T:
    """Return the one value that all items have. Raises: RuntimeError."""
    found = set(items)
    if len(found) != 1:
        raise RuntimeError(f"expected there to be only one unique element in {found}")
    return found.pop()


def call_to_str(base: str, *args: Any, **kwargs: Any) -> str:
    """Return a call as text: "base(1, name='x')"."""
    shown = [*(repr(arg) for arg in args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return f"{base}({', '.join(shown)})"


def get_tensor_bytes(item: Any) -> int:
    """Return the bytes of a tensor, or of the tensors of a list, tuple or dict."""
    if isinstance(item, torch.Tensor):
        return item.numel() * item.element_size()
    if isinstance(item, dict):
        return sum(map(get_tensor_bytes, item.values()))
    return sum(map(get_tensor_bytes, item)) if isinstance(item, (list, tuple)) else 0


def prefix_sum_inc(weights: Sequence[float]) -> list[float]:
    """Return the sums of the first one, two, ... weights."""
    return list(accumulate(weights))


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """Return the bounds of ``num_parts`` parts of ``num_items``, the larger ones first."""
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    size, larger = divmod(num_items, num_parts)
    return [part * size + min(part, larger) for part in range(num_parts + 1)]


def filter_empty_parameters(params: Iterable[Any]) -> list[Any]:
    """Return parameters, or groups of them, without empty parameters."""
    found: list[Any] = []
    for each in params:
        if isinstance(each, dict):
            own = [each["params"]] if isinstance(each["params"], torch.Tensor) else each["params"]
            found.append({**each, "params": [param for param in own if param.numel() > 0]})
        elif each.numel() > 0:
            found.append(each)
    return found


def required_torch_version(min_version: Any = None, max_version: Any = None) -> bool:
    """Return True if torch's version is in these bounds, both of which are optional."""
    here = _numbers(torch.__version__)
    return (min_version is None or here >= _numbers(min_version)) and (
        max_version is None or here[: len(_numbers(max_version))] <= _numbers(max_version)
    )


def _numbers(version: Any) -> tuple[int, ...]:
    digits = str(version).partition("+")[0].split(".")
    return tuple(int("".join(filter(str.isdigit, part)) or 0) for part in digits[:3] if part[:1].isdigit())


# --- checkpoint.utils: names of DeepSpeed's files, and copies without the buffers around them -------------------------


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of a model's file in a checkpoint of DeepSpeed's."""
    return os.path.join(base_folder, f"{_MODEL_PREFIX}{mp_rank_str}{_MODEL_SUFFIX}")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of a rank's optimizer file in a checkpoint of DeepSpeed's."""
    ranks = f"{_FILES['ZERO_FILE_PREFIX']}{dp_rank}_{_MODEL_PREFIX}{mp_rank:02d}"
    return os.path.join(base_folder, ranks + _FILES["OPTIM_FILE_SUFFIX"])


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of a layer's file in a checkpoint of DeepSpeed's pipelines."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}{_MODEL_SUFFIX}")


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = _CPU) -> Any:
    """Copy ``item`` with its tensors, in lists, tuples and dicts, as detached copies on ``device``.

    A view of a flat buffer would be saved with the whole buffer; a copy is as large as it looks.
    Raises: RuntimeError for weights of stage 3 that are not gathered.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().to(device, copy=True)
    if isinstance(item, list):
        return [clone_tensors_for_torch_save(value, device) for value in item]
    if isinstance(item, tuple):
        return tuple(clone_tensors_for_torch_save(value, device) for value in item)
    if isinstance(item, dict):
        return type(item)({key: clone_tensors_for_torch_save(value, device) for key, value in item.items()})
    return item


# --- runtime.dataloader -----------------------------------------------------------------------------------------------


class RepeatingLoader:
    """Iterator over ``loader`` that starts again at its end.

    Raises: StopIteration if the loader yields nothing at all.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


# --- runtime.compiler: torch.compile's switches -----------------------------------------------------------------------


def is_compile_supported() -> bool:
    """Return True: every torch that zcomm runs with has torch.compile."""
    return True


def is_compiling() -> bool:
    """Return True inside of a compilation."""
    return torch.compiler.is_compiling()


def disable(func: Function) -> Function:
    """Return ``func``, excluded from torch.compile."""
    return torch.compiler.disable(func)  # type: ignore[no-any-return]


# --- compression.helper: modules by their dotted names ----------------------------------------------------------------


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """Return the module of a dotted name ("layers.0.attention"). Raises: AttributeError."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: Any) -> None:
    """Set the module of a dotted name. Raises: AttributeError if the name's owner does not exist."""
    owner, _, last = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, last, module)


# --- utils.init_on_device ---------------------------------------------------------------------------------------------


class OnDevice:
    """``with OnDevice(dtype, device="meta"): model = Model()`` creates tensors on meta, floating ones in ``dtype``.

    A device that the program names itself wins. It is torch's own ``torch.device`` context and default dtype.
    Raises: TypeError for a dtype that is not a floating one. Not for several threads at once.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str = "meta", enabled: bool = True) -> None:
        self.dtype, self.device, self.enabled = dtype, device, enabled
        self._inside: ExitStack | None = None

    def __enter__(self) -> None:
        if self.enabled:
            before = torch.get_default_dtype()
            torch.set_default_dtype(self.dtype)
            self._inside = ExitStack()
            self._inside.callback(torch.set_default_dtype, before)
            self._inside.enter_context(torch.device(self.device))

    def __exit__(self, *error: Any) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.close()


# --- utils.numa: lists of cores, and the command that binds a process to some of them ---------------------------------


def get_numa_cores() -> list[list[int]]:
    """Return the cores of each NUMA node; one list of all cores if Linux lists no nodes."""
    nodes = []
    for index in range(1024):
        place = f"/sys/devices/system/node/node{index}/cpulist"
        if not os.path.exists(place):
            break
        with open(place) as lines:
            text = lines.read().strip()
        nodes.append(parse_range_list(text) if text else [])
    return nodes or [list(range(os.cpu_count() or 1))]


def check_for_numactl_pkg() -> bool:
    """Return True if the program numactl is installed."""
    return shutil.which("numactl") is not None


def get_numactl_cmd(bind_core_list: str | None, num_local_procs: int, local_rank: int) -> tuple[int, list[str]]:
    """Return the number of cores of rank ``local_rank``, and the numactl command that binds it to them.

    Raises: ValueError for fewer cores than ranks; FileNotFoundError without the program numactl.
    """
    allowed = sorted(os.sched_getaffinity(0)) if bind_core_list is None else parse_range_list(bind_core_list)
    count = len(allowed) // num_local_procs
    if count < 1:
        raise ValueError(f"{len(allowed)} cores do not suffice for {num_local_procs} ranks on this host")
    if not check_for_numactl_pkg():
        raise FileNotFoundError("numactl is not installed: install it, or leave out the binding to cores")
    mine = allowed[count * local_rank : count * (local_rank + 1)]
    return count, ["numactl", "-C", ",".join(map(str, mine))]
