"""Loading: every rank reads only the elements that it keeps, from a save of any world size, stage, tier or precision.

First all checksums are compared (each rank a share of the tensors). Then everything is checked against the model, the
optimizer, the schedule and the generators. Nothing changes before all ranks agree. Collective.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import itertools
import math
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zcomm.optim.fused import STATE_BLOCK
from zcomm.zero.agree import ErrorHolder, agree, agreed, all_values, check_places
from zcomm.zero.checkpoint import extra_state, rng_state
from zcomm.zero.checkpoint.json_values import from_json
from zcomm.zero.checkpoint.manifest import NAME, Manifest
from zcomm.zero.checkpoint.manifest_reader import open_checkpoint
from zcomm.zero.checkpoint.model_tensors import ModelTensors, model_tensors
from zcomm.zero.checkpoint.whole_names import names_of_all, rows_of
from zcomm.zero.files import durable
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.tensor_file import Entry, check, read_into, read_part, read_whole
from zcomm.zero.format_names import format_names
from zcomm.zero.layout.cut import Cut
from zcomm.zero.layout.local_param import as_local, cut_of
from zcomm.zero.layout.sections import NoModel
from zcomm.zero.layout.tiles import decoded
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.remedy import with_remedy
from zcomm.zero.rules.counters import reset_counters
from zcomm.zero.saved_names import matched, other_paths
from zcomm.zero.tensors import shard_io


def load(
    parts: Parts,
    train: TrainState,
    final: Path,
    *,
    scheduler: Any,
    with_optimizer: bool,
    with_random: bool,
    strict: bool,
    inspect: Callable[[Any], None] = lambda client_state: None,
) -> Any:
    """See ZeroOptimizer.load. inspect: raises, before any change, if the client state is not the caller's."""
    parts.check_one_model("load()")
    parts.end_saving()
    parts.updates.begin_load(whole=with_optimizer)
    with with_remedy("load()", train), parts.comm.no_deadline(), contextlib.ExitStack() as stack:
        kept, found = ErrorHolder(), None
        places = all_values(parts.comm, str(final), "folder to load")
        ours = _Ours(parts, final)  # on all ranks, before a folder can fail: see model_tensors
        with kept.errors():
            parts.store.synchronize()  # before all agree to continue
            folder, manifest = open_checkpoint(durable.find(final))
            stack.enter_context(folder)
            found = _Found(parts, train, folder, manifest, ours, scheduler, with_optimizer, with_random, strict)
            inspect(found.client_state)
            progress = _Progress(parts, train, scheduler)
        _agree_on_one(parts, kept, found, final, places)
        assert found is not None
        with kept.errors():
            found.set_progress()
        try:
            agree(parts.comm, kept.error, f"loading {final}")
        except BaseException:
            progress.restore()
            raise
        with torch.no_grad(), train.poison.watch():
            _change(parts, train, folder, found, with_optimizer)
        parts.reducer.zero()
        parts.updates.loaded(whole=with_optimizer)
        found.set_random()
        train.forget_passes()
        return found.client_state


class _Ours:
    """The model's tensors, and the names of all ranks' tensors. Collective."""

    def __init__(self, parts: Parts, final: Path) -> None:
        self.rows = rows_of(parts)
        self.tensors, extra = agreed(
            parts.comm, f"loading {final}", lambda: (model_tensors(parts), extra_state.extra_names(parts.model))
        )
        own = {
            "rest": [name for name, _ in self.tensors.every],
            "aliases": self.tensors.aliases,
            "extra": extra,
            "frozen": self.tensors.frozen,
        }
        paths: dict[str, dict[str, Any]] = {"paths": {**other_paths(parts.model)}}
        found = names_of_all(parts, {kind: dict.fromkeys(names) for kind, names in own.items()} | paths)
        self.aliases, self.extra, self.frozen = (list(found[key]) for key in ("aliases", "extra", "frozen"))
        self.names = [*(row.name for row in self.rows), *found["rest"], *self.aliases, *self.extra]
        self._paths = {path: str(held.value) for path, held in found["paths"].items()}

    def name(self, manifest: Manifest) -> Manifest:
        """Return the manifest with this model's names for tensors saved under another wrapping of the model."""
        return manifest.renamed(matched(manifest.names(), self.names, self._paths))


class _Found:
    """A checkpoint that has been compared with its checksums, with the model and with the optimizer.

    Raises: OSError (FileNotFoundError, EIO), ValueError. Changes nothing.
    """

    def __init__(
        self,
        parts: Parts,
        train: TrainState,
        folder: Folder,
        manifest: Manifest,
        ours: _Ours,
        scheduler: Any,
        with_optimizer: bool,
        with_random: bool,
        strict: bool,
    ) -> None:
        parts.join()
        self._parts, self._train, self._with_optimizer = parts, train, with_optimizer
        _verify(parts, folder, manifest)
        self.tensors = ours.tensors
        self.manifest = manifest = ours.name(manifest)
        if with_optimizer and _is_of(manifest, train):
            saved = [self._plain(each["options"], {}, folder, "groups") for each in manifest.groups]
            groups = [{**old, **new} for old, new in zip(train.param_groups, saved, strict=False)]
            parts.grow_state(train.rule, groups, {key.partition("/")[0] for key in manifest.optimizer})
        _check(parts, train, manifest, ours, with_optimizer, strict)
        self._scheduler = scheduler if manifest.scheduler is not None else None
        values = {name: read_whole(folder, name, entry) for name, entry in manifest.values.items()}
        self.client_state = self._plain(manifest.client_state, values, folder, "client_state")
        self._schedule = self._plain(manifest.scheduler, values, folder, "scheduler")
        self.extra = extra_state.restored(manifest.extra or {}, values, str(folder.path / NAME))
        self._options = [self._plain(each["options"], {}, folder, "groups") for each in manifest.groups]
        if with_optimizer:
            for group, options in zip(train.param_groups, self._options, strict=True):
                _check_options(train, group, options, folder)
            _check_scalars(train, manifest, folder, [options.get("step", 0) for options in self._options])
        self.set_random: Callable[[], None] = lambda: None
        if with_random and len(manifest.rank_files) == parts.comm.world_size:  # converted checkpoints have no files
            name = manifest.rank_files[parts.comm.rank]
            self.set_random = rng_state.parse(_compared(folder, manifest, name), parts.device, str(folder.path / name))

    @staticmethod
    def _plain(value: Any, values: dict[str, torch.Tensor], folder: Folder, field: str) -> Any:
        try:
            return from_json(value, values)
        except ValueError as error:
            raise ValueError(f"{folder.path / NAME}: {field}: {error}") from error

    def set_progress(self) -> None:
        """Set options, counters, loss scale and the schedule's state from the checkpoint."""
        if self._with_optimizer:
            train, counters = self._train, self.manifest.counters
            for group, saved in zip(train.param_groups, self._options, strict=True):
                reset_counters(group)
                group.update(saved)
            train.rule.set_progress(self.manifest.progress)
            train.counters.set_state(counters.get("cohorts", []), self._parts.names)
            train.step_count, train.skipped_steps = int(counters["step_count"]), int(counters["skipped_steps"])
            if "loss_scale" in counters:
                train.scaler.set_state(counters["loss_scale"], train.step_count)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._schedule)


class _Progress:
    """A copy of options, counters, loss scale and the schedule's state, in case the load fails on another rank."""

    def __init__(self, parts: Parts, train: TrainState, scheduler: Any) -> None:
        self._names, self._train, self._scheduler = parts.names, train, scheduler
        self._groups = [dict(group) for group in train.param_groups]
        self._rule = train.rule.progress()
        self._cohorts = train.counters.state(parts.names)
        self._counts = train.step_count, train.skipped_steps
        self._scale = train.scaler.state()
        self._schedule = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None

    def restore(self) -> None:
        """Restore them."""
        train = self._train
        for group, before in zip(train.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)
        if self._rule is not None:
            train.rule.set_progress(self._rule)
        train.counters.set_state(self._cohorts, self._names)
        train.step_count, train.skipped_steps = self._counts
        train.scaler.set_state(self._scale, train.step_count)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._schedule)


def _agree_on_one(parts: Parts, kept: ErrorHolder, found: _Found | None, final: Path, places: list[str]) -> None:
    """Raise on every rank if one has an error, or if ranks see different checkpoints. Collective.

    places: the ranks' paths, which may differ for copies of one checkpoint.
    """
    try:
        agree(parts.comm, kept.error, f"loading {final}")
    except (OSError, ValueError):
        check_places("load()", places)
        raise
    assert found is not None
    sums = all_values(parts.comm, found.manifest.crc32, "which checkpoint is loaded")
    others = [rank for rank, each in enumerate(sums) if each != sums[0]]
    if others:
        check_places("load()", places)
        which = f"ranks {format_names([str(rank) for rank in others])} see another checkpoint than rank 0"
        why = "the folder is not one that all share, or a save replaced it meanwhile; load it again"
        raise OSError(errno.ESTALE, f"loading a checkpoint: {which}: {why}", str(final))


def _change(parts: Parts, train: TrainState, folder: Folder, found: _Found, with_optimizer: bool) -> None:
    """Load weights and state from the checkpoint, on all ranks."""
    parts.join()

    def change() -> None:
        if train.poison.error is not None:
            parts.store.renew()
            parts.state.renew()
        _read_tensors(parts, folder, found.manifest, found.tensors, with_optimizer)

    def restore() -> None:
        _restore_added(parts, folder, found.manifest)
        extra_state.restore(parts.model, found.extra, parts.comm.rank == 0)

    agreed(parts.comm, f"loading {folder.path}", change)
    parts.store.publish()
    parts.comm.barrier(name="checkpoint is loaded")
    agreed(parts.comm, f"extra state of {folder.path}", restore)  # last, because it may read the weights


def _verify(parts: Parts, folder: Folder, manifest: Manifest) -> None:
    """Compare this rank's share of the checksums. Raises: OSError (EIO)."""
    wrong = manifest.missing_files(folder)
    if wrong:
        raise OSError(errno.EIO, f"the checkpoint is not whole: {'; '.join(wrong)}")
    rank, world_size = parts.comm.rank, parts.comm.world_size
    complaints = itertools.chain(
        (check(folder, name, entry) for name, entry in manifest.entries()[rank::world_size]),
        (manifest.check_file(folder, name) for name in list(manifest.checksums)[rank::world_size]),
    )
    for complaint in filter(None, complaints):
        raise OSError(errno.EIO, complaint)


def _compared(folder: Folder, manifest: Manifest, name: str) -> bytes:
    """Read the content of a file, and compare it with its checksum if the checkpoint has one."""
    data = folder.read(name)
    if name in manifest.checksums and zlib.crc32(data) != manifest.checksums[name]:
        raise OSError(errno.EIO, f"{folder.path / name}: its bytes changed")
    return data


def _check_options(train: TrainState, group: dict[str, Any], saved: dict[str, Any], folder: Folder) -> None:
    """Raise ValueError for saved options of ``group`` that the optimizer cannot have."""
    where = f"{folder.path / NAME}: groups"
    if "params" in saved:
        raise ValueError(f"{where}: options have 'params'; parameters belong next to the options")
    steps, lr = saved.get("step", 0), saved.get("lr", 0.0)
    if type(steps) is not int or steps < 0:
        raise ValueError(f"{where}: step={steps!r}; expected a whole number of at least 0")
    if isinstance(lr, (int, float)) and not math.isfinite(lr):
        raise ValueError(f"{where}: lr={lr!r}; expected a finite number")
    try:
        train.rule.check_fixed(group, saved)
        train.rule.check({**group, **saved})
    except (ValueError, TypeError, LookupError, NotImplementedError) as error:
        raise ValueError(f"{where}: {error}") from error


def _check_scalars(train: TrainState, manifest: Manifest, folder: Folder, steps: list[int]) -> None:
    """Raise ValueError if the saved progress or counters do not belong to this rule. steps: counts of the groups."""
    try:
        train.rule.check_progress(manifest.progress)
        for number, taken in enumerate(steps):
            if train.rule.counted and taken and not (manifest.progress and manifest.progress[number]):
                raise LookupError(f"{taken} steps without {', '.join(train.rule.counted)} of {train.rule.name}")
        for cohort in manifest.counters.get("cohorts", []):
            train.rule.scalars_of(cohort["scalars"])
            if train.rule.counted and cohort["counters"].get("step") and not cohort["scalars"]:
                raise LookupError(f"a cohort without {', '.join(train.rule.counted)} of {train.rule.name}")
    except (ValueError, TypeError, LookupError) as error:
        raise ValueError(f"{folder.path / NAME}: progress or counters.cohorts: {error!r}") from error


def _check(
    parts: Parts, train: TrainState, manifest: Manifest, ours: _Ours, with_optimizer: bool, strict: bool
) -> None:
    wanted = {name: tuple(cut.shape) for name, cut in zip(parts.names, parts.cuts, strict=True)}
    wanted.update({name: tuple(cut_of(tensor).shape) for name, tensor in ours.tensors.others})
    known = {**manifest.weights, **{a: manifest.weights[n] for a, n in manifest.aliases.items()}}
    needed = wanted if strict else parts.names[: parts.geometry.trained_count]
    missing = [name for name in needed if name not in known]
    shapes = [f"{n}: {known[n].shape} there, {s} here" for n, s in wanted.items() if n in known and known[n].shape != s]
    here = {*ours.names, *manifest.added}  # tensors added by hooks go to the model's own hooks
    unexpected = [name for name in known if name not in here] if strict else []
    if strict and not isinstance(parts.model, NoModel):
        unexpected += [name for name in manifest.extra or () if name not in ours.extra]
    lean = bool(missing) and all(name in ours.frozen for name in missing)
    advice = " (all of them frozen: strict=False, load_module_strict=False of an engine, leaves them as they are)"
    lines = [
        *([f"not in the checkpoint: {format_names(missing)}{advice if lean else ''}"] if missing else []),
        *([f"not in the model: {format_names(unexpected)}"] if unexpected else []),
        *([f"other shapes: {format_names(shapes)}"] if shapes else []),
    ]
    if lines:
        raise ValueError(f"the checkpoint is of another model; {'; '.join(lines)}")
    if with_optimizer:
        _check_optimizer(parts, train, manifest, ours)


def _check_optimizer(parts: Parts, train: TrainState, manifest: Manifest, own: _Ours) -> None:
    lacking = [
        f"{key}/{name}"
        for name in parts.names[: parts.geometry.trained_count]
        for key in parts.state.form.arrays
        if f"{key}/{manifest.aliases.get(name, name)}" not in manifest.optimizer
    ]
    if lacking and train.rule.begun({}):
        raise ValueError(
            f"the checkpoint has the state of {manifest.optimizer_name}, which lacks {format_names(lacking)} of "
            f"{train.rule.name}; load only the weights with optimizer=False"
        )
    wrong = list(_other_forms(parts, manifest))
    if wrong:
        raise ValueError(f"the checkpoint's optimizer state has other shapes or dtypes: {format_names(wrong)}")
    if not _is_of(manifest, train):
        raise ValueError(  # the arrays may fit by chance, but options such as lr would be loaded, too
            f"the checkpoint has the state of {manifest.optimizer_name}, this optimizer is {train.rule.name}; load "
            "only the weights with optimizer=False"
        )
    ours = [{row.name for row in own.rows if row.group == number} for number in range(len(train.param_groups))]
    theirs = [set(group["params"]) for group in manifest.groups]
    if len(ours) != len(theirs) or [s ^ t for s, t in zip(ours, theirs, strict=True) if s != t]:
        raise ValueError(
            f"the checkpoint's param groups have {[len(t) for t in theirs]} parameters, this optimizer's "
            f"{[len(s) for s in ours]}, or others of them; build it with the same groups, or load with optimizer=False"
        )


def _is_of(manifest: Manifest, train: TrainState) -> bool:
    """Return True if the checkpoint may have this optimizer's state. A converted checkpoint may not name its rule."""
    theirs, ours = (name.replace("adamw", "adam") for name in (manifest.optimizer_name, train.rule.name))
    return theirs == ours or " " in theirs


def _other_forms(parts: Parts, manifest: Manifest) -> Iterator[str]:
    """Name the entries of optimizer state with another dtype or shape than ``save`` writes."""
    arrays = parts.state.form.arrays
    for index, name in enumerate(parts.names[: parts.geometry.trained_count]):
        saved, shape = manifest.aliases.get(name, name), tuple(parts.cuts[index].shape)
        coded = f"scales/{saved}" in manifest.optimizer
        blocks = -(-math.prod(shape) // STATE_BLOCK), len(arrays)
        for key in ("master", "scales", *arrays):
            entry = manifest.optimizer.get(f"{key}/{saved}")
            if entry is None:
                continue
            wanted = blocks if key == "scales" else shape
            codes = coded and key in arrays
            kind = entry.torch_dtype
            if entry.shape != wanted or (kind != torch.uint8 if codes else not kind.is_floating_point):
                expected = f"{'U8' if codes else 'F32'} {list(wanted)}"
                yield f"{key}/{saved} is {entry.dtype} {list(entry.shape)}, not {expected}"


def _read_tensors(
    parts: Parts, folder: Folder, manifest: Manifest, tensors: ModelTensors, with_optimizer: bool
) -> None:
    for bucket in parts.geometry.every:
        reads = {}
        for index in bucket.params:
            saved = manifest.aliases.get(parts.names[index], parts.names[index])
            if parts.geometry.is_frozen(index):
                entry = manifest.weights.get(saved)
                if entry is not None:
                    reads[index] = shard_io.Reads(_reader(folder, entry, parts.cuts[index]))
                continue
            exact = _reader(
                folder, manifest.optimizer.get(f"master/{saved}", manifest.weights[saved]), parts.cuts[index]
            )
            of_param = {
                key: manifest.optimizer[f"{key}/{saved}"]
                for key in ("scales", *parts.state.form.arrays)
                if with_optimizer and f"{key}/{saved}" in manifest.optimizer
            }
            lacking = [key for key in parts.state.form.arrays if with_optimizer and key not in of_param]
            reads[index] = _reads(parts, exact, folder, of_param, lacking, parts.cuts[index])
        shard_io.set_bucket(parts, bucket, reads)
    for name, tensor in tensors.others:
        entry = manifest.weights.get(manifest.aliases.get(name, name))
        if entry is not None and cut_of(tensor).count > 1:
            as_local(tensor).data.copy_(cut_of(tensor).part_of(read_part(folder, entry).view(entry.shape)))
        elif entry is not None:
            read_into(folder, entry, tensor.data)


def _restore_added(parts: Parts, folder: Folder, manifest: Manifest) -> None:
    """Pass tensors that the model's hooks of state_dict() had added to its hooks of load_state_dict()."""
    added = {name: read_whole(folder, name, manifest.weights[name]) for name in manifest.added}
    if added:
        state = OrderedDict(added)
        state._metadata = getattr(parts.model.state_dict(keep_vars=True), "_metadata", None)  # type: ignore[attr-defined]
        parts.model.load_state_dict(state, strict=False)


def _reader(folder: Folder, entry: Entry, cut: Cut) -> Any:
    return lambda part: cut.read(part, lambda begin, end: read_part(folder, entry, begin, end)).to(torch.float32)


def _reads(
    parts: Parts, master: Any, folder: Folder, entries: dict[str, Entry], lacking: Sequence[str], cut: Cut
) -> shard_io.Reads:
    """Return the sources of a parameter. entries: of its state by array; 8-bit state has "scales", too.

    lacking: arrays without entries, filled with zeros.
    """
    if "scales" not in entries:
        arrays: dict[str, Any] = {key: lambda part: torch.zeros(()) for key in lacking}
        return shard_io.Reads(master, arrays | {key: _reader(folder, entry, cut) for key, entry in entries.items()})
    if parts.state.form.coded and cut.count == 1:
        return shard_io.Reads(master, codes=lambda key, part: _read_codes(folder, key, entries[key], part))
    return shard_io.Reads(master, {key: _decoder(folder, entries, key, cut) for key in parts.state.form.arrays})


def _read_codes(folder: Folder, key: str, entry: Entry, part: slice) -> torch.Tensor:
    width = entry.shape[1] if key == "scales" else 1
    return read_part(folder, entry, part.start * width, part.stop * width)


def _decoder(folder: Folder, entries: dict[str, Entry], name: str, cut: Cut) -> Any:
    """Return a decoder of 8-bit state to fp32."""
    return lambda part: cut.read(part, lambda first, last: read_decoded(folder, entries, name, first, last))


def read_decoded(folder: Folder, entries: dict[str, Entry], name: str, first: int, last: int) -> torch.Tensor:
    """Return elements [first, last) of an array of 8-bit state in fp32. entries: of the parameter's state by array."""
    count = torch.Size(entries[name].shape).numel()
    blocks = slice(first // STATE_BLOCK, -(-last // STATE_BLOCK))
    begin, end = blocks.start * STATE_BLOCK, min(blocks.stop * STATE_BLOCK, count)
    parts = {key: blocks if key == "scales" else slice(begin, end) for key in entries}
    coded = {key: _read_codes(folder, key, entries[key], where) for key, where in parts.items()}
    return decoded(coded)[name][first - begin : last - begin]
