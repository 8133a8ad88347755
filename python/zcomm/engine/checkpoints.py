"""The engine's checkpoints in DeepSpeed's terms: tags in a directory, the file ``latest``, client state, counters."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from zcomm.engine.facts import EngineFacts
from zcomm.engine.token_drop import LTD_STATE, RandomLTDScheduler
from zcomm.engine.words import speaks_of_the_engine

if TYPE_CHECKING:
    from zcomm.compression.schedule import Schedule
    from zcomm.data import Loader
    from zcomm.zero.checkpoint import SaveTask

_COUNTERS = ("global_steps", "micro_steps", "global_samples")
# A program in the folder of the checkpoints, as DeepSpeed writes it.
_ZERO_TO_FP32 = b"""from zcomm.compat.deepspeed.utils.zero_to_fp32 import main

if __name__ == "__main__":
    main()
"""


class EngineCheckpoints(EngineFacts):
    """The part of Engine that saves and loads. Engine has the attributes."""

    module: nn.Module
    lr_scheduler: Any
    training_dataloader: Loader | None
    random_ltd_scheduler: RandomLTDScheduler | None
    global_rank: int
    micro_steps: int
    _averages: bool | None
    _counted_from: int
    _coalesced: bool
    _passes: int
    _destroyed: bool
    compression_scheduler: Schedule | None

    @speaks_of_the_engine
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        wait: bool = True,
    ) -> bool | SaveTask:
        """Save folder ``save_dir/tag`` (``global_stepN``), and its name in the file ``latest``. All ranks call it.

        client_state: as in ZeroOptimizer.save; load_checkpoint returns it. wait: False writes while training continues,
        as ZeroOptimizer.save does. The result's ``wait()`` raises if it failed. ``latest`` is written last.
        exclude_frozen_parameters: leave out frozen parameters; load it with ``load_module_strict=False``.
        Returns: True, or the task. Raises: as ZeroOptimizer.save; ValueError for an empty save_dir.
        """
        self._check_alive("save_checkpoint")
        if not save_dir:  # Path("") would be the working directory
            raise ValueError(f"save_checkpoint(save_dir={save_dir!r}): give a folder")
        from zcomm.zero import checkpoint
        from zcomm.zero.files import durable
        from zcomm.zero.registry import open_parts, train_of

        directory = Path(save_dir)
        name = one_tag(self, "save_checkpoint", f"global_step{self.global_steps}" if tag is None else tag)
        state: dict[str, Any] = {
            "engine": {key: getattr(self, key) for key in _COUNTERS},
            "client_state": client_state or {},
        }
        loader = self._positioned_loader
        if loader is not None:
            state["data"] = loader.state_dict()
        if self.random_ltd_scheduler is not None:
            state["random_ltd"] = self.random_ltd_scheduler.state_dict()

        def point() -> None:
            durable.replace_file(directory / "zero_to_fp32.py", _ZERO_TO_FP32)
            if save_latest:
                durable.replace_file(directory / durable.LATEST, name.encode())

        parts, train = open_parts(self._zero), train_of(self._zero)
        extras = checkpoint.ExtraState(self.lr_scheduler, state, root="")
        folder = (directory / name).absolute()
        task = checkpoint.save(parts, train, folder, extras, wait=wait, lean=exclude_frozen_parameters, then=point)
        return True if wait else task

    @speaks_of_the_engine
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | int | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load ``load_dir/tag``, or the folder that ``latest`` names. All ranks call it.

        With ``checkpoint.load_universal`` the folder may also be a universal checkpoint of DeepSpeed, and
        ``latest_universal`` names it.
        Returns: the folder and the client state; (None, None) without a checkpoint. load_module_only: only weights, no
        counters.
        Raises: as ZeroOptimizer.load.
        """
        self._check_alive("load_checkpoint")
        if custom_load_fn is not None:
            raise NotImplementedError("custom_load_fn= is not available")
        from zcomm.zero import checkpoint
        from zcomm.zero.registry import open_parts, train_of

        directory, weights = Path(load_dir), load_module_only
        folder = latest_in(self, directory) if tag is None else directory / one_tag(self, "load_checkpoint", tag)
        if folder is None:
            return None, None
        loader = self._positioned_loader if not weights else None

        def inspect(state: Any) -> None:
            if _of_engine(state) and not weights:
                _check(state, folder, loader is not None)

        # An engine without training accepts any weights.
        optimizer = load_optimizer_states and not weights and self.optimizer is not None
        with readable(self, folder.absolute()) as place:
            state = checkpoint.load(
                open_parts(self._zero),
                train_of(self._zero),
                place,
                scheduler=self.lr_scheduler if load_lr_scheduler_states and not weights else None,
                with_optimizer=optimizer,
                with_random=not weights,
                strict=load_module_strict,
                inspect=inspect,
            )
        self._averages = None  # a partial accumulation is discarded
        self._passes, self._coalesced = 0, False
        if _of_engine(state) and not weights:
            for key in _COUNTERS:
                setattr(self, key, int(state["engine"][key]))
            # Gradients are not saved, so the accumulation restarts, with its present length.
            self.micro_steps -= self.micro_steps % self.gradient_accumulation_steps()
            self._counted_from = self.micro_steps
            if self.random_ltd_scheduler is not None and "random_ltd" in state:
                self.random_ltd_scheduler.load_state_dict(state["random_ltd"])
            if self.compression_scheduler is not None:
                self.compression_scheduler.at(self.global_steps - self.skipped_steps)
            if loader is not None and "data" in state:
                loader.load_state_dict(state["data"])
                self._position_loaded()
        else:
            self._counted_from = self.micro_steps
        return str(folder), state["client_state"] if _of_engine(state) else state

    @property
    def _positioned_loader(self) -> Loader | None:
        """The loader of ``initialize``: a checkpoint has its position. None for a loader of the program."""
        from zcomm.data import Loader

        return self.training_dataloader if isinstance(self.training_dataloader, Loader) else None

    def _position_loaded(self) -> None:
        """Continue at the position in the data that a checkpoint has set. A subclass that reads it has more to do."""

    @speaks_of_the_engine
    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        *,
        wait: bool = True,
    ) -> bool | SaveTask:
        """Write the whole model as one safetensors file (never a pickle), in the precision that it is trained in.

        save_filename: a name that ends in ".bin", ".pt" or ".pth", as pickles do, is replaced, and a warning is logged.
        "pytorch_model.bin" becomes "model.safetensors". exclude_frozen_parameters: leave out the parameters that are
        not trained. A model prepared for compression is written as a plain one, with the values of this step.
        All ranks call it. Rank 0 writes, piece by piece. wait: False copies a rank's shards of the weights,
        writes while training continues, and returns the task. The next save, load and destroy() wait for it.
        Raises: OSError, on every rank.
        """
        self._check_alive("save_16bit_model")
        from zcomm.compression.export import save_baked
        from zcomm.compression.preparing import is_prepared
        from zcomm.zero.checkpoint import whole_model
        from zcomm.zero.registry import open_parts

        path = model_path(Path(save_dir), save_filename)
        if path.name != Path(save_filename).name and self.global_rank == 0:
            logging.getLogger("zcomm").warning(
                "save_16bit_model(save_filename=%r): the file is safetensors, never a pickle, so it is %s",
                save_filename,
                path,
            )
        parts = open_parts(self._zero)
        parts.updates.drain("save_16bit_model()")
        parts.end_saving()
        if is_prepared(self.module):
            frozen = self._frozen_names() if exclude_frozen_parameters else []
            state = {name: value for name, value in self._zero.full_state_dict().items() if name not in frozen}
            parts.saving = task = save_baked(parts, state, path, wait)
            return True if wait else task
        with parts.looking():
            parts.saving = task = whole_model.save_model(parts, path, wait, exclude_frozen_parameters)
        return True if wait else task

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: stage 3 can gather whole weights. (Accelerate calls it.)"""
        return True

    @speaks_of_the_engine
    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the whole model's state dict on rank 0, None elsewhere. All ranks call it. (Accelerate's name.)"""
        self._check_alive("_zero3_consolidated_16bit_state_dict")
        from zcomm.compression.export import baked
        from zcomm.compression.preparing import is_prepared

        whole = self._zero.full_state_dict()
        frozen = self._frozen_names() if exclude_frozen_parameters else ()
        if self.global_rank != 0:
            return None
        for name in frozen:
            whole.pop(name, None)
        return baked(self.module, whole) if is_prepared(self.module) else whole

    def _frozen_names(self) -> list[str]:
        """Return the names in the module's state dict of parameters that need no gradient. All ranks call it."""
        from zcomm.zero.saved_names import state_tensors

        named = state_tensors(self.module)
        return [name for name, tensor in named if isinstance(tensor, nn.Parameter) and not tensor.requires_grad]

    def _check_alive(self, call: str) -> None:
        if self._destroyed:
            raise RuntimeError(f"{call}() after destroy(): this engine's optimizer is closed")


def one_tag(engine: EngineCheckpoints, call: str, tag: str | int) -> str:
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


@contextmanager
def readable(engine: EngineCheckpoints, folder: Path) -> Iterator[Path]:
    """Give ``folder``, or for a universal checkpoint a folder next to it with its content, until the end. Collective.

    Raises: OSError, ValueError, NotImplementedError, on every rank.
    """
    from zcomm.zero.agree import ErrorHolder, agree, all_values
    from zcomm.zero.registry import parts_of

    if not engine._config.checkpoint.load_universal:
        yield folder
        return
    from zcomm.convert.from_deepspeed import convert
    from zcomm.convert.universal import is_universal

    comm, kept, made = parts_of(engine._zero).comm, ErrorHolder(), None
    try:
        with comm.no_deadline():  # rank 0 may read for long
            if comm.rank == 0:
                with kept.errors():
                    if is_universal(folder) and not (folder / "manifest.json").is_file():
                        made = tempfile.mkdtemp(prefix=f".{folder.name}.zcomm-", dir=folder.parent)
                        convert(folder, Path(made) / "checkpoint")
            agree(comm, kept.error, f"loading the universal checkpoint {folder}")
            name = all_values(comm, made and Path(made).name, "universal checkpoint")[0]
        yield folder.parent / str(name) / "checkpoint" if name else folder
    finally:
        if made is not None:  # a load has ended on all ranks, also one that raised
            shutil.rmtree(made, ignore_errors=True)


def latest_in(engine: EngineCheckpoints, directory: Path) -> Path | None:
    """Return the folder that ``latest`` names, as rank 0 reads it; None: there is none. Collective.

    Raises: ValueError if ``checkpoint.load_universal`` is set and ``latest_universal`` is missing.
    """
    from zcomm.zero.agree import ErrorHolder, agree, all_values, check_places
    from zcomm.zero.files import durable
    from zcomm.zero.registry import parts_of

    kept, found, comm = ErrorHolder(), None, parts_of(engine._zero).comm
    universal = engine._config.checkpoint.load_universal
    pointer = f"{durable.LATEST}_universal" if universal else durable.LATEST
    if comm.rank == 0:
        with kept.errors():
            found = durable.latest_in(directory, pointer)
            if found is None and universal:
                raise ValueError(
                    f'{directory / pointer} is missing, which "checkpoint.load_universal": true reads; ds_to_universal '
                    "writes it, a tag needs none, and checkpoints of zcomm load at any world size without that key"
                )
    agree(comm, kept.error, f"loading {directory / pointer}")
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
    wanted: dict[str, tuple[str, ...]] = {"engine": _COUNTERS}
    if with_data and "data" in state:
        wanted["data"] = ("epoch", "samples")
    if "random_ltd" in state:
        wanted["random_ltd"] = LTD_STATE
    for name, fields in wanted.items():
        found = state[name] if isinstance(state[name], dict) else {}
        for field in fields:
            value = found.get(field)
            if not isinstance(value, int) or value < (-1 if field == "current_steps" else 0):
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
