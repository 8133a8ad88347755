"""Work: the handle of an asynchronous operation, with the tensors it needs kept alive."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import torch


class CoreWork(Protocol):
    """Interface of the core's Work, and of its substitutes: MPI's, a profile's, several as one."""

    def wait(self, timeout: float | None = None) -> None: ...
    def done(self) -> bool: ...


class Work:
    """An operation in flight. ``wait()`` rethrows its error, ``done()`` polls; dropping it waits.

    Thread rule: one thread at a time. Reading or changing the tensors before ``wait()`` returned is a race.
    """

    __slots__ = ("_core", "_keep_alive")
    ends_in_wait: ClassVar[bool] = False  # wait() has a part of the operation to do

    def __init__(self, core: CoreWork, keep_alive: Any = None) -> None:
        self._core = core
        self._keep_alive = keep_alive

    def wait(self, timeout: float | None = None) -> None:
        """Block until the operation ended.

        timeout: seconds; None waits for the operation's own deadline.
        Raises: TimeoutError if ``timeout`` passes first (the operation continues), or the operation's error.
        """
        self._core.wait(timeout)
        self._keep_alive = None

    def done(self) -> bool:
        """Return True if the operation ended (well or not); never blocks."""
        return self._core.done()


def followed(work: Work) -> Any:
    """Return the core's Work (or its stand-in) behind ``work``, for an operation that starts after it.

    Raises: TypeError for anything but a communicator's Work; NotImplementedError if only ``wait()`` ends it.
    """
    if not isinstance(work, Work):
        raise TypeError(f"after: pass the Work of an asynchronous operation, got {type(work).__name__}")
    if work.ends_in_wait:
        raise NotImplementedError("after: a receive for a device ends in wait(): call wait() instead")
    core = work._core
    return getattr(core, "inner", core)


class DeviceWork(Work):
    """An operation on a CUDA device: it ends on a stream.

    ``wait()`` blocks the host until all ranks have called and the operation is queued, and makes the current stream
    wait for its end. If the Work is dropped without ``wait()``, the call's stream waits.
    """

    __slots__ = ("_device",)

    def __init__(self, core: Any, keep_alive: Any, device: str) -> None:
        super().__init__(core, keep_alive)
        self._device = device

    def wait(self, timeout: float | None = None) -> None:
        """Wait as Work.wait does; work queued later on the current stream runs after the operation."""
        wait_on_current_stream(self._core, self._device, timeout)
        self._keep_alive = None


def current_stream(device: str) -> int:
    """Return the native handle of torch's current stream of ``device``; 0 for the CPU."""
    return 0 if device == "cpu" else torch.cuda.current_stream(device).cuda_stream


def wait_on_current_stream(core: Any, device: str, timeout: float | None) -> None:
    """Make torch's current stream of ``device`` wait for ``core``.

    core: the core's Work, or a substitute that has ended when its wait() returns (a profile's).
    """
    wait_on = getattr(core, "wait_on", None)
    if wait_on is None:
        core.wait(timeout)
    else:
        wait_on(current_stream(device), timeout)
