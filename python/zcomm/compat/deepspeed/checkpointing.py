"""DeepSpeed's activation checkpointing: torch's, with inputs in host memory where ``configure`` asks for it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils import checkpoint as torch_checkpoint

from zcomm.compat.deepspeed.accelerator import get_accelerator
from zcomm.compat.deepspeed.utils.groups import check_mpu
from zcomm.config import load
from zcomm.memory.activations import offload_activations

_configured = False
_offload: offload_activations | None = None


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Set DeepSpeed's arguments. Only ``checkpoint_in_cpu``, or the configuration's ``cpu_checkpointing``, has effect.

    Raises: NotImplementedError for mpu_ with model-parallel ranks; ValueError from the configuration.
    """
    global _configured, _offload
    check_mpu(mpu_, "checkpointing.configure(mpu_=)")
    if checkpoint_in_cpu is None and deepspeed_config is not None:
        checkpoint_in_cpu = load(deepspeed_config).activation_checkpointing.cpu_checkpointing
    reset()
    _configured = True
    _offload = offload_activations(min_nbytes=0) if checkpoint_in_cpu else None


def is_configured() -> bool:
    return _configured


def reset() -> None:
    """Free buffers, and reset ``configure``."""
    global _configured, _offload
    if _offload is not None:
        _offload.close()
    _configured, _offload = False, None


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` without saving its activations; backward runs it again.

    The second run draws the random numbers of the first one, the tracker's too.
    """
    return _run(function, args, kwargs, reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``function`` as ``checkpoint`` does, by torch's way that needs no argument with a gradient."""
    return _run(function, args, kwargs, reentrant=False)


def _run(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], reentrant: bool) -> Any:
    run = _replaying(functools.partial(function, **kwargs))
    with contextlib.nullcontext() if _offload is None else _offload:
        return torch_checkpoint.checkpoint(run, *args, use_reentrant=reentrant)


# --- random numbers under names ---------------------------------------------------------------------------------------

MODEL_PARALLEL = "model-parallel-rng"


class CudaRNGStatesTracker:
    """Random number generators of the accelerator by name: each ``fork`` continues the previous one's sequence."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return a copy of the states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Go on from ``states``."""
        self.states_ = dict(states)

    def add(self, name: str, seed: int) -> None:
        """Start generator ``name`` at ``seed``. Raises: Exception if the name or the seed is in use."""
        if seed in self.seeds_:
            raise Exception(f"seed {seed} already exists")
        if name in self.states_:
            raise Exception(f"cuda rng state {name} already exists")
        accelerator = get_accelerator()
        self.seeds_.add(seed)
        before = accelerator.get_rng_state()
        accelerator.manual_seed(seed)
        self.states_[name] = accelerator.get_rng_state()
        accelerator.set_rng_state(before)

    @contextlib.contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw from generator ``name`` inside the block. Raises: Exception if there is none."""
        if name not in self.states_:
            raise Exception(f"cuda rng state {name} is not added")
        accelerator = get_accelerator()
        before = accelerator.get_rng_state()
        accelerator.set_rng_state(self.states_[name])
        try:
            yield
        finally:
            self.states_[name] = accelerator.get_rng_state()
            accelerator.set_rng_state(before)


_tracker = CudaRNGStatesTracker()


def get_cuda_rng_tracker() -> CudaRNGStatesTracker:
    """Return the tracker of this process. (The name is DeepSpeed's: on the CPU it is the CPU's.)"""
    return _tracker


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the accelerator with ``seed``, and the tracker's generator of model parallelism with ``seed`` + 2718.

    Every rank is rank 0 of a model-parallel group of one.
    """
    _tracker.reset()
    get_accelerator().manual_seed(seed)
    _tracker.add(MODEL_PARALLEL, seed + 2718)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed


def _replaying(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` with the tracker's states of now in all but its first run."""
    if not _tracker.states_:
        return function
    states, ran = _tracker.get_states(), False

    def run(*args: Any) -> Any:
        nonlocal ran
        if not ran:
            ran = True
            return function(*args)
        now = _tracker.get_states()
        _tracker.set_states(states)
        try:
            return function(*args)
        finally:
            _tracker.set_states(now)

    return run


# --- functions for ranks that share a layer -------------------------------------------------------------------------


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Refuse True. Raises: NotImplementedError: no ranks share a layer, so that activations cannot be split."""
    if partition_activation:
        raise NotImplementedError(
            "partition_activations_in_checkpoint(True) is not available: there is no model parallelism; "
            "checkpointing.configure(checkpoint_in_cpu=True) moves activations to the host"
        )


def set_num_layers(nlayers: int) -> None:
    """Do nothing: buffers of activations grow as they are needed."""
