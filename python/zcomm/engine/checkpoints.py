"""The engine's checkpoints in DeepSpeed's terms: tags in a directory, the file ``latest``, client state, counters."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from zcomm.engine.engine import Engine
    from zcomm.zero.checkpoint import SaveTask

_LATEST = "latest"
_COUNTERS = ("global_steps", "micro_steps", "global_samples")


def save(
    engine: Engine,
    directory: Path,
    tag: str | int | None,
    client_state: dict[str, Any],
    latest: bool,
    wait: bool,
    lean: bool,
) -> bool | SaveTask:
    """See Engine.save_checkpoint. lean: without frozen parameters."""
    from zcomm.zero.checkpoint import durable  # here, so that the engine can be imported where the core is not built

    name = f"global_step{engine.global_steps}" if tag is None else str(tag)
    if not name or "/" in name or name in (_LATEST, ".", ".."):
        raise ValueError(f"save_checkpoint: tag={tag!r} must be a plain folder name")
    state: dict[str, Any] = {"engine": {key: getattr(engine, key) for key in _COUNTERS}, "client_state": client_state}
    if engine.training_dataloader is not None:
        state["data"] = engine.training_dataloader.state_dict()

    def point() -> None:
        if latest:
            durable.replace_file(directory / _LATEST, name.encode())

    task = engine.optimizer._save(directory / name, engine.lr_scheduler, state, wait, point, lean)
    return True if wait else task


def load(
    engine: Engine, directory: Path, tag: str | int | None, strict: bool, optimizer: bool, schedule: bool, weights: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """See Engine.load_checkpoint. weights: nothing else."""
    if tag is None:
        pointer = directory / _LATEST
        if not pointer.is_file():
            return None, None
        tag = pointer.read_text(encoding="utf-8").strip()
    folder = directory / str(tag)
    scheduler = engine.lr_scheduler if schedule else None
    state = engine.optimizer.load(folder, scheduler=scheduler, optimizer=optimizer, random=not weights, strict=strict)
    engine._averages = None  # an accumulation that had begun is gone
    of_engine = isinstance(state, dict) and "engine" in state  # ZeroOptimizer.save alone has no counters of an engine
    if of_engine and not weights:
        for key in _COUNTERS:
            setattr(engine, key, int(state["engine"][key]))
        if engine.training_dataloader is not None and "data" in state:
            engine.training_dataloader.load_state_dict(state["data"])
    return str(folder), state["client_state"] if of_engine else state


def save_model(engine: Engine, path: Path, wait: bool) -> bool | SaveTask:
    """See Engine.save_16bit_model."""
    from zcomm.zero.checkpoint import whole_model

    optimizer = engine.optimizer
    optimizer._breakage.check("save_16bit_model()")
    optimizer._end_saving()
    optimizer._saving = task = whole_model.save_model(optimizer._live, path, wait)
    return True if wait else task


def whole_model(engine: Engine) -> dict[str, torch.Tensor] | None:
    """Weights and buffers under all names of the model's state_dict, on rank 0. Collective."""
    found = engine.optimizer.full_state_dict()
    return found if engine.global_rank == 0 else None
