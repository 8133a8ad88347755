"""Saving: each parameter is assembled on one rank, which writes it; then the folder is renamed to its final name.

Memory: this rank's shards and a piece of one parameter (chunks.py); in the background a copy of its shards, too
(snapshot.py). Every rank must see the same folder (a shared file system between hosts). Collective: after any error of
one rank all raise, and the last checkpoint remains. While saving, no deadline applies, because a drive may be slow; a
dead rank is still detected.
"""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zcomm.comm.communicator import Communicator
from zcomm.zero.agree import ErrorHolder, agree, agreed, all_values, check_places
from zcomm.zero.checkpoint import extra_state, rng_state
from zcomm.zero.checkpoint.hf_layout import configs_of, write_index
from zcomm.zero.checkpoint.json_values import to_json
from zcomm.zero.checkpoint.manifest import ENTRIES, Manifest
from zcomm.zero.checkpoint.shard_files import (
    WEIGHTS,
    Content,
    Saved,
    gathered,
    plans_of,
    write,
)
from zcomm.zero.checkpoint.snapshot import freeze
from zcomm.zero.checkpoint.whole_names import HeldNames, Rest, Row, names_of_all, rows_of
from zcomm.zero.files import durable
from zcomm.zero.files.folder import Folder
from zcomm.zero.files.save_task import SaveTask
from zcomm.zero.files.staging import NewFolder
from zcomm.zero.files.tensor_file import Entry, check_dtypes
from zcomm.zero.format_names import format_names
from zcomm.zero.layout.sections import NoModel
from zcomm.zero.param_groups import options_of
from zcomm.zero.parts import Parts, TrainState
from zcomm.zero.remedy import with_remedy
from zcomm.zero.rules.counters import COUNTERS, of_ranks
from zcomm.zero.validate import log_unsaved


def start(parts: Parts, write: Callable[[Communicator], None], wait: bool) -> SaveTask:
    """Run ``write`` here, or on a thread and a communicator of its own. Collective."""
    if wait:
        with parts.comm.no_deadline():
            write(parts.comm)
        done: Future[None] = Future()
        done.set_result(None)
        return SaveTask(done)
    if parts.save_comm is None:
        parts.save_comm = parts.comm.duplicate()
    comm = parts.save_comm
    background = ThreadPoolExecutor(1, thread_name_prefix="zcomm-save")

    def run() -> None:
        with comm.no_deadline():
            write(comm)

    task = SaveTask(background.submit(run))
    background.shutdown(wait=False)  # the thread ends with its one task
    return task


@dataclass(frozen=True)
class ExtraState:
    """Values of the program that a checkpoint keeps. scheduler: None, or an object with ``state_dict()``. root: the
    first part of paths to values of ``client_state`` in messages."""

    scheduler: Any = None
    client_state: Any = None
    root: str = "client_state"


def save(
    parts: Parts,
    train: TrainState,
    final: Path,
    extras: ExtraState,
    *,
    wait: bool,
    lean: bool = False,
    then: Callable[[], None] = lambda: None,
) -> SaveTask:
    """See ZeroOptimizer.save. lean: without frozen parameters. then: called on rank 0 after the folder has its final
    name."""
    parts.check_one_model("save()")
    if not train.poison.unreported:  # otherwise ``drain`` below raises on all ranks
        train.poison.check("save()")
    log_unsaved(parts.reducer.waiting_passes, train.micro_step, train.grad_accum)
    parts.end_saving()
    with with_remedy("save()", train):
        parts.updates.drain("save()")
    with with_remedy("save()", train), parts.looking():
        parts.verify()
        parts.saving = task = _save(parts, train, final, extras, wait, lean, then)
    return task


def _save(
    parts: Parts,
    train: TrainState,
    final: Path,
    extras: ExtraState,
    wait: bool,
    lean: bool,
    then: Callable[[], None],
) -> SaveTask:
    ends = ExitStack()
    source: Callable[[Communicator], Parts] = lambda comm: parts  # noqa: E731

    def write(comm: Communicator) -> None:
        with ends:
            _write(comm, content, lambda: gathered(source(comm), content.rows, lean), place, folder, final, then)

    try:
        with parts.comm.no_deadline():
            rows = rows_of(parts)
            values: dict[str, torch.Tensor] = {}
            rest, extra = agreed(
                parts.comm,
                f"saving {final}",
                lambda: (Rest(parts, lean), extra_state.pack(parts.model, values, parts.comm.rank == 0)),
            )
            names = names_of_all(parts, {**rest.names, "extra": extra or {}})
            cohorts = parts.comms.told(train.counters.state(parts.names, train.param_groups), "counters of parameters")
            content = agreed(
                parts.comm,
                f"saving {final}",
                lambda: _content(
                    parts, train, extras, rows, rest, names, lean, of_ranks(cohorts, len(train.param_groups)), values
                ),
            )
            _check_options(parts, content.manifest)
            place, folder = _make_folder(parts, final, ends)
            if not wait:
                ends.callback((frozen := freeze(parts, final)).close)
                source, content = frozen.parts, agreed(parts.comm, f"saving {final}", lambda: _copied(content))
        return start(parts, write, wait)
    except BaseException:
        ends.close()
        raise


def _copied(content: Content) -> Content:
    """Copy the tensors, because the program continues."""
    rest = [(which, name, tensor.clone()) for which, name, tensor in content.rest]
    values = {name: tensor.to("cpu", copy=True) for name, tensor in content.values.items()}
    return dataclasses.replace(content, rest=rest, values=values)


def _content(
    parts: Parts,
    train: TrainState,
    extras: ExtraState,
    rows: list[Row],
    rest: Rest,
    names: HeldNames,
    lean: bool,
    cohorts: list[dict[str, Any]],
    values: dict[str, torch.Tensor],
) -> Content:
    """Collect the content of the checkpoint. Raises: ValueError for a value that cannot be kept. values: tensors of
    extra states."""
    check_dtypes(rest.every)
    given = [name for name, held in names["extra"].items() if held.first == parts.comm.rank]
    begins = tuple(f"extra[{json.dumps(name)}]" for name in given)
    values = {key: tensor for key, tensor in values.items() if key.startswith(begins)}
    of_extra = dict(values)
    manifest = _manifest(parts, train, extras, rows, cohorts, values)
    manifest.frozen, manifest.added = list(names["frozen"]), list(names["added"])
    manifest.aliases = {name: held.value for name, held in names["aliases"].items()}
    if not isinstance(parts.model, NoModel):
        manifest.extra = {name: held.value for name, held in names["extra"].items()}
    mine = [(name, tensor) for name, tensor in rest.every if names["rest"][name].first == parts.comm.rank]
    plans, random = plans_of(parts, rows, mine, lean), rng_state.pack(parts.device)
    of_model = [(WEIGHTS, name, tensor) for name, tensor in mine]
    if parts.comm.rank != 0:
        return Content(manifest, rows, plans, random, of_model, of_extra)
    configs = {} if lean else configs_of(parts.model, str(parts.state.form.dtype).removeprefix("torch."))
    return Content(manifest, rows, plans, random, of_model, values, configs)


def _write(
    comm: Communicator,
    content: Content,
    weights: Callable[[], Iterable[Saved]],
    place: NewFolder | None,
    folder: Path,
    final: Path,
    then: Callable[[], None],
) -> None:
    """Write this rank's files, agree, and let rank 0 rename the folder to its final name."""
    kept, mine = ErrorHolder(), {}
    try:
        saved = itertools.chain(weights(), content.rest)
        mine = write(kept, comm.rank, content, saved, folder)
    except BaseException as error:
        kept.error = kept.error or error
    agree(comm, kept.error, f"saving {final}")
    every = all_values(comm, mine, "parts written")
    if place is not None:
        with kept.errors():
            _finish(content, every, place)
            then()
    agree(comm, kept.error, f"saving {final}")


def _make_folder(parts: Parts, final: Path, ends: ExitStack) -> tuple[NewFolder | None, Path]:
    """Create the folder on rank 0, and check that all ranks see it. ends: discards it. Collective."""
    kept = ErrorHolder()
    place: NewFolder | None = None
    with kept.errors():
        final = durable.resolved(final)
        if parts.comm.rank == 0:
            ends.callback((place := NewFolder(final)).discard)
    agree(parts.comm, kept.error, f"saving {final}")
    name = all_values(parts.comm, place.path.name if place is not None else None, "folder of the checkpoint")[0]
    _check_seen(parts.comm, final, str(name))
    return place, final.parent / str(name)


def _check_seen(comm: Communicator, final: Path, name: str) -> None:
    """Raise if ranks save to other folders than rank 0, which has created ``name`` in its own. Collective.

    One folder may have several paths, because hosts may mount it at different ones.
    """
    every = all_values(comm, [str(final), final.name, (final.parent / name).is_dir()], "folder of each rank")
    if any(not seen or last != every[0][1] for _, last, seen in every):
        check_places("save()", [place for place, _, _ in every])
        blind = format_names([str(rank) for rank, (_, _, seen) in enumerate(every) if not seen])
        why = f"rank {blind} does not see the files of rank 0 there; all ranks need one folder"
        raise OSError(errno.ENOENT, why, str(final))


def _finish(content: Content, every: list[dict[str, Any]], place: NewFolder) -> None:
    """Complete the manifest from all ranks' entries, check their files, and rename the folder. On rank 0."""
    manifest = content.manifest
    for of_rank in every:
        for kind in ENTRIES:
            getattr(manifest, kind).update({n: Entry.from_json(entry) for n, entry in of_rank[kind].items()})
        for kind in ("files", "checksums"):
            getattr(manifest, kind).update(of_rank[kind])
        manifest.rank_files.append(of_rank["random"])
    with Folder(place.path) as folder:
        unseen = manifest.missing_files(folder)
    if unseen:
        raise OSError(errno.ENOENT, f"rank 0 does not see files of other ranks ({unseen[0]}); all need one folder")
    write_index(place.path, manifest)
    for name, text in content.configs.items():
        durable.write_file(place.path / name, text)
    manifest.write(place.path)
    place.put()


def _manifest(
    parts: Parts,
    train: TrainState,
    extras: ExtraState,
    rows: list[Row],
    cohorts: list[dict[str, Any]],
    values: dict[str, torch.Tensor],
) -> Manifest:
    """Make the manifest without tensors. values: receives tensors of the schedule and the client state."""
    groups = []
    for number, group in enumerate(train.param_groups):
        own = dict.fromkeys(parts.names[parts.index_of[id(param)]] for param in group["params"])
        names = list(own | dict.fromkeys(row.name for row in rows if row.group == number))
        options = {key: value for key, value in options_of(group).items() if not callable(value)}
        options.pop("state_dtype", None)  # it changes only the storage in memory; the files have fp32
        groups.append({"params": names, "options": to_json(options, f"param_groups[{number}]")})
    counters: dict[str, Any] = {"step_count": train.step_count, "skipped_steps": train.skipped_steps}
    if train.scaler.scales:
        counters["loss_scale"] = train.scaler.state()
    if cohorts:
        counters["cohorts"] = cohorts
    state = extras.scheduler.state_dict() if extras.scheduler is not None else None
    return Manifest(
        world_size=parts.comm.world_size,
        stage=train.stage,
        precision=train.precision.name,
        optimizer_name=train.rule.name,
        parameters=[row.name for row in rows if not row.frozen],
        groups=groups,
        progress=train.rule.progress(),
        counters=counters,
        scheduler=to_json(state, "scheduler", values),
        client_state=to_json(extras.client_state, extras.root, values),
    )


def _check_options(parts: Parts, manifest: Manifest) -> None:
    """Raise ValueError on all ranks if they have other param groups than rank 0, which writes them. Collective."""
    own = [{**group["options"], **dict.fromkeys(COUNTERS)} for group in manifest.groups]
    told = parts.comms.told(own, "options of param groups")
    firsts = told[0]
    for rank, groups in enumerate(told):
        if len(groups) != len(firsts):
            raise ValueError(
                f"save(): rank {rank} has {len(groups)} param groups, but rank 0 has {len(firsts)}: give all ranks the "
                "same groups, which may be empty"
            )
        for number, (group, first) in enumerate(zip(groups, firsts, strict=True)):
            for key in sorted(key for key in group.keys() | first.keys() if group.get(key) != first.get(key))[:1]:
                raise ValueError(
                    f"save(): param_groups[{number}][{key!r}] is {group.get(key)!r} on rank {rank}, but "
                    f"{first.get(key)!r} on rank 0: a checkpoint has one value for all ranks"
                )
