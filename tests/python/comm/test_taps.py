"""Proxies of a profile: calls during or after their close end, and run on the core's object."""

from __future__ import annotations

from typing import Any

from zcomm.profiling.taps import Proxy


class Work:
    def wait(self, timeout: float | None = None) -> None:
        pass


class Swap:
    def read(self, key: str) -> Work:
        return Work()


class Spans:
    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, lane: str, name: str, begin: int, end: int, **args: Any) -> None:
        self.names.append(name)


def test_an_operation_that_begins_when_the_profile_has_ended_is_not_waited_for() -> None:
    spans = Spans()
    proxy = Proxy(Swap(), "swap", {"read"}, spans, serial=False)
    read = proxy.read  # as a gathering thread holds it when the profile ends
    read("a").wait(5)
    proxy.close()
    late = read("b")
    assert isinstance(late, Work), "nothing watches it any more"
    assert spans.names == ["read a"]
