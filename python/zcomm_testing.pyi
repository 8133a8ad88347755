"""Doubles of a device, for tests (python/bindings/testing): in a checkout, in no wheel."""

from zcomm._core import Device, Event, Stream

def simulated_device(
    seed: int = 0, max_delay_s: float = 0.0, memory_nbytes: int = 0, name: str = "simulated", dry_run: bool = False
) -> Device: ...

class RaceSide:
    actor: str
    label: str
    operation: int
    is_write: bool
    range: tuple[int, int]

class Race:
    """Two accesses that nothing orders; str() describes both and the remedy."""

    first: RaceSide
    second: RaceSide
    overlap: tuple[int, int]
    remedy: str

class Trace:
    """Operations that recorded devices were asked for, and their races (doubles/recorded/trace.hpp).

    `actor`: None, the calling thread; a name, a queue that runs beside it ("comm"); a stream of a recorded device.
    """

    def __init__(self) -> None: ...
    def touch(self, actor: Stream | str | None, address: int, nbytes: int, access: str, label: str) -> None:
        """Record an access made elsewhere; access: "r", "w" or "rw"."""
    def set_subject(self, subject: str) -> None: ...
    def rename(self, actor: Stream | str | None, name: str) -> None: ...
    def order(self, before: Event | Stream | str | None, after: Stream | str | None) -> None:
        """Order later work on `after` behind the event, or behind all earlier work on `before`."""
    def races(self) -> list[Race]: ...
    @property
    def operations(self) -> int: ...
    @property
    def race_count(self) -> int: ...

def record_device(device: Device, trace: Trace) -> Device: ...
