"""The engine's checkpoints in DeepSpeed's terms: tags in a directory, the file ``latest``, client state, counters."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcomm.engine.engine import Engine
    from zcomm.zero.checkpoint import SaveTask

_COUNTERS = ("global_steps", "micro_steps", "global_samples")
# A program in the folder of the checkpoints, as DeepSpeed writes it.
_ZERO_TO_FP32 = b"""from zcomm.compat.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
"""


def save(
    engine: Engine,
    directory: Path,
    tag: str | int | None,
    client_state: dict[str, Any],
    latest: bool,
    wait: bool,
    lean: bool,
) -> bool | SaveTask:
    """Save as Engine.save_checkpoint. lean: without frozen parameters."""
    from zcomm.zero import checkpoint
    from zcomm.zero.files import durable
    from zcomm.zero.registry import open_parts, train_of

    name = _one_tag(engine, "save_checkpoint", f"global_step{engine.global_steps}" if tag is None else tag)
    state: dict[str, Any] = {"engine": {key: getattr(engine, key) for key in _COUNTERS}, "client_state": client_state}
    if engine.training_dataloader is not None:
        state["data"] = engine.training_dataloader.state_dict()

    def point() -> None:
        durable.replace_file(directory / "zero_to_fp32.py", _ZERO_TO_FP32)
        if latest:
            durable.replace_file(directory / durable.LATEST, name.encode())

    parts, train = open_parts(engine._zero), train_of(engine._zero)
    extras = checkpoint.ExtraState(engine.lr_scheduler, state, root="")
    folder = (directory / name).absolute()
    task = checkpoint.save(parts, train, folder, extras, wait=wait, lean=lean, then=point)
    return True if wait else task


def _one_tag(engine: Engine, call: str, tag: str | int) -> str:
    """Return the tag of rank 0, compared with the others' as ``checkpoint.tag_validation`` asks. Collective.

    Raises: ValueError, on every rank.
    """
    from zcomm.zero.agree import all_values
    from zcomm.zero.registry import parts_of

    tags: list[str] = all_values(parts_of(engine._zero).comm, str(tag), f"{call}: tag")
    validation = engine._config.checkpoint.tag_validation
    if len(set(tags)) > 1 and validation != "Ignore":
        shown = ", ".join(f"{each!r} on rank {rank}" for rank, each in enumerate(tags[:8]))
        text = f"{call}: the ranks' tags differ ({shown}); a checkpoint is one folder for all ranks"
        if validation == "Fail":
            raise ValueError(f"{text}; give the same tag everywhere")
        if engine.global_rank == 0:
            logging.getLogger("zcomm").warning("%s, so the tag of rank 0 is taken", text)
    name = tags[0]
    if not name.isprintable() or name != name.strip() or "/" in name or name in ("", "latest", ".", ".."):
        raise ValueError(f"{call}: tag={name!r} must be a plain folder name, without blanks at its ends")
    return name


def load(
    engine: Engine, directory: Path, tag: str | int | None, strict: bool, optimizer: bool, schedule: bool, weights: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """Load as Engine.load_checkpoint. weights: nothing else."""
    from zcomm.zero import checkpoint
    from zcomm.zero.registry import open_parts, train_of

    folder = _latest(engine, directory) if tag is None else directory / _one_tag(engine, "load_checkpoint", tag)
    if folder is None:
        return None, None
    loader = engine.training_dataloader if not weights else None

    def inspect(state: Any) -> None:
        if _of_engine(state) and not weights:
            _check(state, folder, loader is not None)

    optimizer = optimizer and engine.optimizer is not None  # an engine without training accepts any weights
    state = checkpoint.load(
        open_parts(engine._zero),
        train_of(engine._zero),
        folder.absolute(),
        scheduler=engine.lr_scheduler if schedule else None,
        with_optimizer=optimizer,
        with_random=not weights,
        strict=strict,
        inspect=inspect,
    )
    engine._averages = None  # a partial accumulation is discarded
    engine._passes, engine._coalesced = 0, False
    if _of_engine(state) and not weights:
        for key in _COUNTERS:
            setattr(engine, key, int(state["engine"][key]))
        # Gradients are not saved, so the accumulation restarts, with its present length.
        engine.micro_steps -= engine.micro_steps % engine.gradient_accumulation_steps()
        engine._counted_from = engine.micro_steps
        if loader is not None and "data" in state:
            loader.load_state_dict(state["data"])
    else:
        engine._counted_from = engine.micro_steps
    return str(folder), state["client_state"] if _of_engine(state) else state


def _latest(engine: Engine, directory: Path) -> Path | None:
    """Return the folder that ``latest`` names, as rank 0 reads it; None: there is none. Collective."""
    from zcomm.zero.agree import ErrorHolder, agree, all_values, check_places
    from zcomm.zero.files import durable
    from zcomm.zero.registry import parts_of

    kept, found, comm = ErrorHolder(), None, parts_of(engine._zero).comm
    if comm.rank == 0:
        with kept.errors():
            found = durable.latest_in(directory)
    agree(comm, kept.error, f"loading {directory / durable.LATEST}")
    mine = [None if found is None else found.name, str(directory.absolute())]
    every = all_values(comm, mine, "tag of the latest checkpoint")
    name = every[0][0]
    if name is None:
        check_places("load_checkpoint()", [place for _, place in every])  # another rank's may have one
        return None
    return directory / str(name)


def _of_engine(state: Any) -> bool:
    """Return True if an engine saved ``state``, because ZeroOptimizer.save writes no counters of an engine."""
    return isinstance(state, dict) and "engine" in state


def _check(state: dict[str, Any], folder: Path, with_data: bool) -> None:
    """Check the state of an engine. Raises: ValueError naming folder and field of an invalid value."""
    wanted = {"engine": _COUNTERS, **({"data": ("epoch", "samples")} if with_data and "data" in state else {})}
    for name, fields in wanted.items():
        found = state[name] if isinstance(state[name], dict) else {}
        for field in fields:
            value = found.get(field)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{folder / 'manifest.json'}: {name}[{field!r}] is {value!r}; expected a whole number")
    if "client_state" not in state:
        raise ValueError(f"{folder / 'manifest.json'}: the engine's state has no 'client_state'")


def model_path(directory: Path, name: str) -> Path:
    """Return the path to write instead of DeepSpeed's file name, which is a pickle's.

    It is a safetensors file in the same folder, with the name that Hugging Face's readers expect.
    """
    path = directory / name
    if path.suffix not in (".bin", ".pt", ".pth"):
        return path
    return path.with_name("model.safetensors" if path.stem == "pytorch_model" else f"{path.stem}.safetensors")


def save_model(engine: Engine, directory: Path, name: str, wait: bool, lean: bool) -> bool | SaveTask:
    """Save as Engine.save_16bit_model."""
    from zcomm.zero.checkpoint import whole_model
    from zcomm.zero.registry import open_parts

    path = model_path(directory, name)
    if path.name != Path(name).name and engine.global_rank == 0:
        logging.getLogger("zcomm").warning(
            "save_16bit_model(save_filename=%r): the file is safetensors, never a pickle, so it is %s", name, path
        )
    parts = open_parts(engine._zero)
    parts.updates.drain("save_16bit_model()")
    parts.end_saving()
    with parts.looking():
        parts.saving = task = whole_model.save_model(parts, path, wait, lean)
    return True if wait else task
