"""Saving: each parameter is put together on one rank, which writes it; then the folder is put in its place.

Memory: this rank's shards and one whole fp32 tensor; in the background a copy of its shards (frozen.py). Every rank
must see the same folder (a shared file system between hosts). Collective; a rank that cannot write makes all raise, and
the last checkpoint stays. While saving, nobody runs into the deadline for a slow drive; a dead rank is noticed.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import shutil
from collections.abc import Callable, Generator, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zcomm.comm import Communicator
from zcomm.zero.build import Parts
from zcomm.zero.checkpoint import durable, generators
from zcomm.zero.checkpoint.exchange import agree, all_values
from zcomm.zero.checkpoint.frozen import Frozen, freeze
from zcomm.zero.checkpoint.manifest import Manifest
from zcomm.zero.checkpoint.plain import to_json
from zcomm.zero.checkpoint.share import Share, gathered, other_tensors, others, share_of, write
from zcomm.zero.checkpoint.tensor_file import Entry, check_dtypes

if TYPE_CHECKING:
    from zcomm.zero.optimizer import ZeroOptimizer


class SaveTask:
    """What is being written while training goes on. ``await task`` works, too."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self._told = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Until the folder is in its place. Raises: what save() raises; TimeoutError (it goes on then)."""
        try:
            self._future.result(timeout)
        except futures.TimeoutError:  # before Python 3.11 not the built-in one
            if self._future.done():  # the save's own
                raise
            raise TimeoutError(f"the save is not done after {timeout} s; it goes on") from None
        finally:
            self._told = self._future.done()

    def end(self) -> None:
        """As wait(), but what wait() has raised is not raised again."""
        if not self._told:
            self.wait()

    def __await__(self) -> Generator[Any, None, None]:
        try:
            yield from asyncio.shield(asyncio.wrap_future(self._future)).__await__()
        finally:
            self._told = self._future.done()


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


def save(
    optimizer: ZeroOptimizer,
    final: Path,
    scheduler: Any,
    client_state: Any,
    wait: bool,
    then: Callable[[], None] = lambda: None,
    lean: bool = False,
) -> SaveTask:
    """See ZeroOptimizer.save. then: what rank 0 does once the folder is in its place. lean: without frozen ones."""
    parts = optimizer._live
    with parts.comm.no_deadline():
        manifest = _describe(optimizer, final, scheduler, client_state, lean)
        folder = _make_folder(parts, final)
        share, random, rest = share_of(parts, lean), generators.pack(parts.device), others(parts, lean)
        frozen = None if wait else _freeze(parts, folder, final)
        if frozen is not None:
            rest = [(which, tensor.clone()) for which, tensor in rest]

    def write(comm: Communicator) -> None:
        try:
            now = parts if frozen is None else frozen.parts(comm)
            _write(comm, share, itertools.chain(gathered(now, lean), rest), random, manifest, folder, final, then)
        finally:
            if frozen is not None:
                frozen.close()

    return start(parts, write, wait)


def _freeze(parts: Parts, folder: Path, final: Path) -> Frozen:
    try:
        return freeze(parts, final)
    except BaseException:
        if parts.comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(
    comm: Communicator,
    share: Share,
    tensors: Iterable[tuple[int, torch.Tensor]],
    random: bytes,
    manifest: Manifest,
    folder: Path,
    final: Path,
    then: Callable[[], None],
) -> None:
    """Write this rank's files, agree, and let rank 0 put the folder in its place."""
    error: Exception | None = None
    try:
        try:
            mine = write(share, tensors, random, folder)
        except OSError as caught:
            error, mine = caught, {}
        agree(comm, error, f"saving {final}")
        for of_rank in all_values(comm, mine, "what was written"):
            _merge(manifest, of_rank)
        if comm.rank == 0:
            error = _finish(manifest, folder, final, then)
        agree(comm, error, f"saving {final}")
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _make_folder(parts: Parts, final: Path) -> Path:
    error: Exception | None = None
    name: str | None = None
    if parts.comm.rank == 0:
        try:
            name = durable.temporary(final).name
        except OSError as caught:
            error = caught
    agree(parts.comm, error, f"making {final}")
    name = all_values(parts.comm, name, "folder of the checkpoint")[0]
    return final.parent / str(name)


def _finish(manifest: Manifest, folder: Path, final: Path, then: Callable[[], None]) -> Exception | None:
    """Rank 0 has the last word."""
    try:
        unseen = manifest.missing_files(folder)
        if unseen:
            return OSError(errno.ENOENT, f"rank 0 does not see what others wrote ({unseen[0]}); all need one folder")
        manifest.write(folder)
        durable.put(folder, final)
        then()
    except OSError as error:
        return error
    return None


def _describe(optimizer: ZeroOptimizer, final: Path, scheduler: Any, client_state: Any, lean: bool) -> Manifest:
    """All but the tensors. Collective: what cannot be kept is an error on every rank, before anything is written."""
    error: Exception | None = None
    try:
        check_dtypes(other_tensors(optimizer._live, lean))
        manifest = _manifest(optimizer, scheduler, client_state)
    except ValueError as caught:
        error = caught
    agree(optimizer._live.comm, error, f"saving {final}")
    return manifest


def _manifest(optimizer: ZeroOptimizer, scheduler: Any, client_state: Any) -> Manifest:
    parts = optimizer._live
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        names = [parts.names[parts.index_of[id(param)]] for param in group["params"]]
        options = {key: value for key, value in group.items() if key != "params" and not callable(value)}
        options.pop("state_dtype", None)  # how it is kept, not what; the files have fp32
        groups.append({"params": names, "options": to_json(options, f"param_groups[{number}]")})
    counters: dict[str, Any] = {"step_count": optimizer.step_count, "skipped_steps": optimizer.skipped_steps}
    if optimizer.scaler is not None:
        counters["loss_scale"] = optimizer.scaler.state()
    state = scheduler.state_dict() if scheduler is not None else None
    return Manifest(
        world_size=parts.comm.world_size,
        stage=optimizer.stage,
        precision=optimizer.precision.name,
        optimizer_name=optimizer.rule.name,
        parameters=parts.names[: parts.geometry.trained_count],
        groups=groups,
        progress=optimizer.rule.progress(),
        counters=counters,
        scheduler=to_json(state, "scheduler"),
        client_state=to_json(client_state, "client_state"),
    )


def _merge(manifest: Manifest, of_rank: dict[str, Any]) -> None:
    manifest.weights.update({name: Entry.from_json(entry) for name, entry in of_rank["weights"].items()})
    manifest.optimizer.update({name: Entry.from_json(entry) for name, entry in of_rank["optimizer"].items()})
    manifest.aliases.update(of_rank["aliases"])
    manifest.files.update(of_rank["files"])
    manifest.rank_files.append(of_rank["random"])
