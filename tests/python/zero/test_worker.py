"""A worker's calls: in order, their values and errors, and interrupts of a thread that waits for one."""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from interrupts import interrupted_at
from programs import Program
from zcomm.zero.worker import StallTimer, Worker


def test_calls_run_in_order_and_give_their_values() -> None:
    worker, seen = Worker("test"), []  # type: ignore[var-annotated]
    calls = [worker.submit(lambda n: seen.append(n) or 2 * n, number) for number in range(20)]
    assert [call.result() for call in calls] == [2 * number for number in range(20)]
    assert seen == list(range(20)) and all(call.done() for call in calls)
    worker.close()


def test_a_call_that_is_not_done_is_waited_for_by_several_threads() -> None:
    worker, go = Worker("test"), threading.Event()
    call, found = worker.submit(go.wait), []  # type: ignore[var-annotated]
    threads = [threading.Thread(target=lambda: found.append(call.result())) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert not call.done()
    go.set()
    for thread in threads:
        thread.join()
    assert found == [True] * 4
    worker.close()


class Held:
    """An object that the error's frames reference."""


def test_an_error_is_raised_each_time_and_keeps_nothing_alive() -> None:
    worker, held = Worker("test"), Held()
    gone = weakref.ref(held)

    def fails(what: Held) -> None:
        raise ValueError("no")

    call = worker.submit(fails, held)
    gc.disable()
    try:
        for _ in range(2):
            with pytest.raises(ValueError, match="no") as caught:
                call.result()
            del caught
        del held, call
        worker.close()
        assert gone() is None
    finally:
        gc.enable()


def test_an_interrupt_of_a_waiting_thread_is_that_and_nothing_else() -> None:
    """Interrupt each line in turn: before, during and after the wait."""
    worker, moment = Worker("test"), 1
    while True:
        call = worker.submit(lambda n: time.sleep(0.02) or n, moment)
        interrupted = interrupted_at(moment, lambda call=call: call.result())  # type: ignore[misc]
        assert call.result() == moment and call.result() == moment
        if not interrupted:
            break
        moment += 1
    assert moment > 5
    worker.close()


def test_a_forked_child_is_refused() -> None:
    worker, go = Worker("test"), threading.Event()
    call = worker.submit(go.wait)
    child = os.fork()
    if child == 0:
        told = []
        for use in (lambda: worker.submit(int), call.result):
            try:
                use()
            except RuntimeError as error:
                told.append("only the parent can use it" in str(error))
        worker.close()
        os._exit(0 if told == [True, True] else 1)
    go.set()
    _, status = os.waitpid(child, 0)
    assert status == 0 and call.result() is True
    worker.close()


def test_a_thread_that_waits_does_not_hold_up_the_end_of_the_program(start_program: Callable[..., Program]) -> None:
    script = "from zcomm.zero.worker import Worker; import threading; Worker('test').submit(threading.Event().wait)"
    assert start_program(script).wait() == 0


class Slow:
    """A work that ends after 20 ms, with ``error`` if given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def wait(self) -> None:
        time.sleep(0.02)
        if self.error is not None:
            raise self.error


def test_waits_count_on_threads_that_train_alone() -> None:
    waits, worker = StallTimer(), Worker("test")
    worker.submit(waits.wait, Slow()).result()
    assert waits.seconds == 0.0, "it is hidden, or counted by the thread that waits for the call"
    waits.wait(Slow())
    assert waits.seconds >= 0.02
    with pytest.raises(OSError, match="gone"):
        waits.wait(Slow(OSError("gone")))
    assert waits.seconds >= 0.04
    worker.close()
