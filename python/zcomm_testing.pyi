"""Doubles of a device, for tests (python/bindings/testing): in a checkout, in no wheel."""

from zcomm._core import Communicator, Device, Event, Mesh, NcclPart, Stream

def simulated_device(
    seed: int = 0, max_delay_s: float = 0.0, memory_nbytes: int = 0, name: str = "simulated", dry_run: bool = False
) -> Device: ...

class FakeNccl:
    """A stand-in for NCCL, for ranks that are threads; one at a time (tests/cpp/coll/support/fake_nccl.hpp)."""

    def __init__(self) -> None: ...
    def hold_kernels(self, rank: int) -> None:
        """Let kernels that that rank launches from now on wait for an abort."""
    def let_calls_differ(self) -> None:
        """Let calls differ between ranks from now on; their kernels wait for an abort."""
    @property
    def made(self) -> tuple[int, int]:
        """Communicators that ncclCommInitRankConfig and ncclCommSplit have made, on all ranks."""
    @property
    def complaints(self) -> int:
        """Calls so far that NCCL forbids."""
    def join(
        self,
        control: Communicator,
        guard: Communicator,
        messages: Communicator | None,
        watched: Mesh,
        device: Device,
        timeout_s: float,
        joined: NcclPart | None = None,
    ) -> Communicator:
        """Make a communicator of backend nccl over it. Collective."""

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
