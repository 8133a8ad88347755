"""Taps: wrappers that a profile installs around the parts of an optimizer while it is open, and then removes.

A program without a profile has no overhead. On entry, methods are replaced on the objects, the core's communicators and
swap files are wrapped by a proxy, and hooks are registered.
Thread rule: taps are installed and removed on the main thread. One watching thread per proxy waits for the operations
in their order and records when each ended. A core Work is one thread's: only the watcher touches it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from zcomm import _core
from zcomm.profiling.trace import Trace

if TYPE_CHECKING:
    from zcomm.comm.communicator import Communicator
    from zcomm.zero.registry import Owner

COLLECTIVES = {
    *"all_reduce reduce reduce_scatter all_gather broadcast gather scatter all_to_all barrier".split(),
}
_SWAPS = {"read", "write"}


class Recorder(Protocol):
    """Receiver of calls timed by a Proxy: a Trace, or a log."""

    def add(self, lane: str, name: str, begin: int, end: int, **args: Any) -> None: ...


class Spans(Protocol):
    """Receiver of calls on the main thread."""

    def span(self, lane: str, name: str) -> AbstractContextManager[object]: ...


class Watched:
    """An operation that the watcher waits for."""

    def __init__(self, work: Any, lane: str, name: str, args: dict[str, Any], begin: int) -> None:
        self.work, self.lane, self.name, self.args, self.begin = work, lane, name, args, begin
        self.ended = threading.Event()
        self.error: BaseException | None = None


class WatchedWork:
    """Stand-in for the core's Work: the program waits for the watcher, also when it drops this."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    @property
    def inner(self) -> Any:
        """The core's Work, for communicators that start an operation after it."""
        return self._watched.work

    def wait(self, timeout: float | None = None) -> None:
        if not self._watched.ended.wait(timeout):
            raise TimeoutError(f"Work.wait: not done after {timeout} s; the operation goes on")
        if self._watched.error is not None:
            raise self._watched.error

    def done(self) -> bool:
        return self._watched.ended.is_set()

    def __del__(self) -> None:
        self._watched.ended.wait()


class Proxy:
    """Proxy of a core object; times the calls in ``timed``. ``serial``: its operations run one after the other."""

    def __init__(self, inner: Any, lane: str, timed: set[str], recorder: Recorder, serial: bool) -> None:
        self.inner, self._lane, self._timed, self.recorder, self._serial = inner, lane, timed, recorder, serial
        self._queue: queue.SimpleQueue[Watched | None] = queue.SimpleQueue()
        self._lock, self._closed = threading.Lock(), False  # a thread that gathers may call while this is closed
        self._thread = threading.Thread(target=self._watch, name="zcomm-profile", daemon=True)
        self._thread.start()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        return self._wrap(name, value) if name in self._timed else value

    def all_reduce_tensor(self, *_args: Any) -> Any:
        """Return NotImplemented: the caller then takes the longer way by ``all_reduce``, which is timed."""
        return NotImplemented

    def _wrap(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            words = [value for value in (*args, *kwargs.values()) if isinstance(value, str) and value]
            name = " ".join([operation, *words[:1]])
            begin = time.perf_counter_ns()
            work = call(*args, **kwargs)
            known = _size(operation, args)
            if work is None:
                self.recorder.add(self._lane, name, begin, time.perf_counter_ns(), **known)
                return None
            watched = Watched(work, self._lane, name, known, begin)
            with self._lock:
                if self._closed:
                    return work
                self._queue.put(watched)
            return WatchedWork(watched)

        return timed

    def _watch(self) -> None:
        last = 0
        while (watched := self._queue.get()) is not None:
            try:
                watched.work.wait()
            except BaseException as error:
                watched.error = error
            end = time.perf_counter_ns()
            begin = max(watched.begin, last) if self._serial else watched.begin
            self.recorder.add(watched.lane, watched.name, begin, end, **watched.args)
            last = end
            watched.ended.set()

    def close(self) -> None:
        """Wait for the end of all operations and stop the thread. Later ones are not timed."""
        with self._lock:
            self._closed = True
            self._queue.put(None)
        self._thread.join()


def _size(operation: str, args: tuple[Any, ...]) -> dict[str, Any]:
    if operation in _SWAPS:
        return {"nbytes": args[2]} if len(args) > 2 else {}
    lists = [given for given in args if isinstance(given, list) and given and isinstance(given[0], tuple)]
    lists = [spans for spans in lists if len(spans[0]) == 2]  # not a rank's own parts
    if not lists:
        return {}
    dtype = next((given for given in args if isinstance(given, _core.DType)), None)
    counts = [sum(span[1] for span in spans) for spans in lists]
    return {"elements": counts[0]} | ({} if dtype is None else {"nbytes": max(counts) * ITEMSIZES[dtype.name]})


ITEMSIZES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
ITEMSIZES |= {name: 1 for name in _core.DType.__members__ if name not in ITEMSIZES}


class Taps(ExitStack):
    """Everything that one profile has installed; closing removes it, last first.

    trace: receives the spans. A Trace also receives operations on other threads, and forward of the modules.
    """

    def __init__(self, trace: Spans) -> None:
        super().__init__()
        self.trace = trace

    def optimizer(self, optimizer: Owner) -> None:
        """Tap an optimizer and its model."""
        from zcomm.zero.registry import parts_of, train_of

        parts, train = parts_of(optimizer), train_of(optimizer)
        store: Any = parts.store
        for comm in parts.comms.every:
            self._communicator(comm)
        if hasattr(store, "life"):
            for comm in store.gather.every:
                self._communicator(comm)
            self._time(store.gather, "fill", "gathering", lambda unit, *_: f"gather {unit.name}")
            whole = type(store.units[0].state).GATHERED
            self._time(
                store.life,
                "ensure",
                "waiting",
                lambda unit: f"wait for {unit.name}",
                lambda unit: unit.state is not whole,
            )
        states: Sequence[Any] = parts.state.kinds
        sources = store.source.kinds if hasattr(store, "life") else ()
        for holder in (*states, *sources):
            if hasattr(holder, "_cache"):
                self._proxy(holder._cache, "_swap", "swap", _SWAPS, serial=False)
        for transport in parts.reducer.accumulators.kinds:
            self._gradients(transport)
        for state in states:
            if hasattr(state, "_cache"):
                works = state._cache._works
                self._time(
                    state._cache,
                    "_settle",
                    "waiting",
                    lambda _: "wait for swap",
                    lambda window, works=works: works[window] is not None,
                )
            step = "_put" if hasattr(state, "_put") else "_step_tile"  # on a device: the time to queue it
            self._time(state, step, "compute", lambda *_: "update")
        self._time(store, "publish", "waiting", lambda: "wait for weights")
        self._time(optimizer, "step", "compute", lambda *_: f"optimizer step {train.step_count + 1}")
        if parts.model is not None:
            self._forward(parts.model)

    def _gradients(self, transport: Any) -> None:
        """Tap the wait for a reduction through host memory."""
        host = getattr(transport, "host", transport)
        if hasattr(host, "_works"):
            self._time(host, "wait", "waiting", lambda n: "wait for gradients", lambda n: bool(host._works[n]))

    def backward(self) -> None:
        """Tap autograd's entry, which Tensor.backward calls."""
        self._time(torch.autograd, "backward", "compute", lambda *_, **__: "backward")

    # --- tools ------------------------------------------------------------------------------------------------

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value`` until the taps close."""
        own = vars(owner).get(name, self)  # self: it is the class's

        def back() -> None:
            if own is self:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        setattr(owner, name, value)
        self.callback(back)

    def _communicator(self, comm: Communicator) -> None:
        self._proxy(comm, "_core", "communication", COLLECTIVES, serial=True)

    def _proxy(self, owner: Any, name: str, lane: str, timed: set[str], serial: bool) -> None:
        if not isinstance(self.trace, Trace):
            return
        proxy = Proxy(getattr(owner, name), lane, timed, self.trace, serial)
        self.callback(proxy.close)  # after the original is back
        self.replace(owner, name, proxy)

    def calls(self, owner: Any, names: Iterable[str], lane: str) -> None:
        """Record each call of an object's or a class's functions by name, and by the operation's name if it has one."""
        for name in names:

            def label(*_: Any, known: str = name, **options: Any) -> str:
                return " ".join(word for word in (known, options.get("name", "")) if word)

            self._time(owner, name, lane, label)

    def _time(
        self,
        owner: Any,
        name: str,
        lane: str,
        label: Callable[..., str],
        counts: Callable[..., bool] = lambda *_, **__: True,
    ) -> None:
        """Record each call of ``owner.name`` for which ``counts``."""
        original = getattr(owner, name)
        trace = self.trace

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not counts(*args, **kwargs):
                return original(*args, **kwargs)
            with trace.span(lane, label(*args, **kwargs)):
                return original(*args, **kwargs)

        self.replace(owner, name, timed)

    def _forward(self, model: nn.Module) -> None:
        """Time forward of the model, its children, and the members of its lists."""
        trace = self.trace
        if not isinstance(trace, Trace):
            return
        begins: dict[int, list[int]] = {}
        for name, module in _shown_modules(model):
            words = f"forward {name or type(model).__name__}"

            def enter(module: nn.Module, args: Any) -> None:
                begins.setdefault(id(module), []).append(time.perf_counter_ns())

            def leave(module: nn.Module, args: Any, output: Any, words: str = words) -> None:
                if begins.get(id(module)):
                    trace.add("compute", words, begins[id(module)].pop(), time.perf_counter_ns())

            self.callback(module.register_forward_pre_hook(enter).remove)
            self.callback(module.register_forward_hook(leave, always_call=True).remove)


def _shown_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    shown = [("", model)]
    for name, child in model.named_children():
        shown.append((name, child))
        if isinstance(child, (nn.ModuleList, nn.Sequential)):
            shown += [(f"{name}.{number}", member) for number, member in enumerate(child)]
    return shown
