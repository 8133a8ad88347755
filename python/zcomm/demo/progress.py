"""Progress of training on rank 0: a live picture on a terminal, lines otherwise, no output on other ranks."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from zcomm.demo.phases import Bound, DriveRates, Phase, bounds
from zcomm.memory.sizes import as_nbytes

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from zcomm.demo.options import DemoConfig
    from zcomm.demo.text import Text

_LINES = 20  # plain lines per run
_WIDE = 100  # columns from which the parts of a step have their full names next to the bar
_NAME_WIDTH = 8  # of tiers and phases: bars stand below each other
_WINDOW = 10  # steps over which speed and shares are averaged


@dataclass(frozen=True)
class StepRecord:
    """One step. loss: nats per byte, mean over ranks; seconds are rank 0's; compute is the time without waiting.

    phases: by name, summed over micro-steps. bubble: of a pipeline's last pass, measured and by the formula.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    step_s: float
    compute_s: float
    comm_s: float
    swap_s: float
    phases: dict[str, Phase] = field(default_factory=dict)
    bubble: dict[str, float] | None = None


class Progress(ExitStack):
    """Progress that shows nothing; also the interface of the other two."""

    def step(self, record: StepRecord) -> None:
        """Record the end of a step."""

    def tiers(self, memory: dict[str, dict[str, int]], peak_nbytes: int, gpu_peak_nbytes: int | None = None) -> None:
        """Record rank 0's memory by tier and purpose, and the most that its process and its GPU (if any) ever held."""

    def validation(self, step: int, loss: float) -> None:
        """Show the validation loss after `step`."""


class Recent:
    """Means over the last steps. rates: of the drive, if the run swaps."""

    def __init__(self, world_size: int = 1, rates: DriveRates | None = None) -> None:
        self._records: deque[StepRecord] = deque(maxlen=_WINDOW)
        self._world_size, self._rates = world_size, rates

    def bounds(self) -> list[Bound]:
        """Return the bound of each phase."""
        phases = [{name: asdict(phase) for name, phase in each.phases.items()} for each in self._records]
        return bounds(phases, self._world_size, self._rates)

    def mean(self, bound: Bound) -> float:
        """Return the seconds of a phase in a step."""
        return bound.seconds / max(1, len(self._records))

    def add(self, record: StepRecord) -> None:
        """Add a step."""
        self._records.append(record)

    def text(self, short: bool = False) -> str:
        """Return loss, tokens/s and the shares of time; short: for a terminal of 80 columns."""
        count = len(self._records)
        total_s = sum(r.step_s for r in self._records) or 1e-9
        tokens = sum(r.tokens_per_s * r.step_s for r in self._records)
        compute, comm, swap = (
            100.0 * sum(getattr(r, part) for r in self._records) / total_s for part in ("compute_s", "comm_s", "swap_s")
        )
        loss = sum(r.loss for r in self._records) / count
        if short:
            shares = f"{compute:.0f}/{comm:.0f}/{swap:.0f}%"
            return f"loss {loss:.3f} {tokens / total_s:,.0f} tok/s comp/comm/swap {shares}"
        return (
            f"loss {loss:.3f}  {tokens / total_s:,.0f} tokens/s  "
            f"compute {compute:.0f}%  communication {comm:.0f}%  swap {swap:.0f}%"
        )


def bound_words(bound: Bound) -> str:
    """Return a phase's share of its bound: "drive 92%"."""
    return f"{bound.by} {100 * bound.share:.0f}%"


class PlainProgress(Progress):
    """Lines for a log."""

    def __init__(self, steps: int, recent: Recent) -> None:
        super().__init__()
        self._steps = steps
        self._every = max(1, steps // _LINES)
        self._recent = recent

    def step(self, record: StepRecord) -> None:
        """Print every so many steps."""
        self._recent.add(record)
        if record.step % self._every == 0 or record.step in (1, self._steps):
            print(f"step {record.step}/{self._steps}  {self._recent.text()}", flush=True)

    def validation(self, step: int, loss: float) -> None:
        """Print the validation loss."""
        print(f"step {step}/{self._steps}  validation loss {loss:.3f}", flush=True)


class BarProgress(Progress):
    """A live picture of rich: the bar of steps, memory by tier, and each phase next to its bound."""

    def __init__(
        self,
        steps: int,
        recent: Recent | None = None,
        limit_nbytes: int | None = None,
        console: Console | None = None,
    ) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        super().__init__()
        self._console = console or Console()
        self._short = self._console.width < _WIDE
        self._bar = RichProgress(
            BarColumn(bar_width=10 if self._short else 20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
        )
        self._task = self._bar.add_task("first step ...", total=steps)
        self._recent = recent or Recent()
        self._limit_nbytes = limit_nbytes
        self._memory: dict[str, dict[str, int]] = {}
        self._peak_nbytes = 0
        self._gpu_peak_nbytes: int | None = None
        self._live = Live(console=self._console, get_renderable=self._picture, refresh_per_second=4)

    def __enter__(self) -> BarProgress:
        self.enter_context(self._live)
        return self

    def step(self, record: StepRecord) -> None:
        """Move the bar."""
        self._recent.add(record)
        self._bar.update(self._task, advance=1, description=self._recent.text(self._short))

    def tiers(self, memory: dict[str, dict[str, int]], peak_nbytes: int, gpu_peak_nbytes: int | None = None) -> None:
        """Show the memory from now on."""
        self._memory, self._peak_nbytes, self._gpu_peak_nbytes = memory, peak_nbytes, gpu_peak_nbytes

    def validation(self, step: int, loss: float) -> None:
        """Print a line above the picture."""
        self._console.print(f"step {step}: validation loss {loss:.3f}", highlight=False)

    def _picture(self) -> Any:
        from rich.console import Group

        parts = [self._tier_table(), self._phase_table()] if self._memory else []
        return Group(*parts, self._bar)

    def _tier_table(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        rows = tier_rows(self._memory, self._peak_nbytes, self._limit_nbytes, self._gpu_peak_nbytes)
        most = max((row.nbytes for row in rows), default=0) or 1
        table = Table.grid(padding=(0, 1))
        table.add_column(min_width=_NAME_WIDTH)
        table.add_column()
        table.add_column()
        for row in rows:
            bar = ProgressBar(total=row.of_nbytes or most, completed=row.nbytes, width=10 if self._short else 30)
            table.add_row(row.name, bar, row.text)
        return table

    def _phase_table(self) -> Table:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        table.add_column(min_width=_NAME_WIDTH)
        table.add_column()
        table.add_column()
        for bound in self._recent.bounds():
            bar = ProgressBar(total=1.0, completed=bound.share, width=10 if self._short else 30)
            table.add_row(bound.name, bar, f"{self._recent.mean(bound):.3g} s, bound by {bound_words(bound)} of it")
        return table


@dataclass(frozen=True)
class TierRow:
    """A tier of rank 0. of_nbytes: its limit; None: unlimited. text: in words."""

    name: str
    nbytes: int
    of_nbytes: int | None
    text: str


def tier_rows(
    memory: dict[str, dict[str, int]], peak_nbytes: int, limit_nbytes: int | None, gpu_peak_nbytes: int | None = None
) -> list[TierRow]:
    """Return the tiers in use: the GPU with torch's peak, RAM with the process's peak and limit, and the drive.

    memory: bytes by tier and purpose. gpu_peak_nbytes: None for a model on the CPU.
    """
    held = held_by_place(memory, gpu_peak_nbytes is not None)
    limit = "" if limit_nbytes is None else f" of {gib(limit_nbytes)} allowed"
    rows = []
    if gpu_peak_nbytes is not None:
        words = f"peak {gib(gpu_peak_nbytes)}, optimizer {gib(held['GPU'])}"
        rows.append(TierRow("GPU", gpu_peak_nbytes, None, words))
    words = f"peak {gib(peak_nbytes)}{limit}, optimizer {gib(held['RAM'])}"
    rows.append(TierRow("RAM", peak_nbytes, limit_nbytes, words))
    if held["drive"]:
        rows.append(TierRow("drive", held["drive"], None, gib(held["drive"])))
    return rows


def held_by_place(memory: dict[str, dict[str, int]], on_gpu: bool) -> dict[str, int]:
    """Return the optimizer's bytes on the GPU, in RAM and on the drive. Without a GPU tier "device" is RAM, too."""
    device, cpu, nvme = (sum(memory.get(tier, {}).values()) for tier in ("device", "cpu", "nvme"))
    return {"GPU": device if on_gpu else 0, "RAM": cpu if on_gpu else device + cpu, "drive": nvme}


def gib(nbytes: float) -> str:
    """Return bytes in GiB, or in MiB below 1 GiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.0f} MiB"


def print_head(
    config: DemoConfig, text: Text, numel: int, entropy: float, rates: DriveRates | None, gpu: str | None = None
) -> None:
    """Print the run's head lines, before set-up, which takes long for large models. gpu: name of rank 0's GPU."""
    where = {"nvme": "swapped to disk", "cpu": "offloaded to host memory", "none": "not offloaded"}[config.offload]
    kind = {"gpt": "GPT", "llama": "decoder of Llama's shape"}[config.model]
    ranks = "1 rank" if config.world_size == 1 else f"{config.world_size} ranks"
    if config.mesh is not None:
        ranks += f" ({' x '.join(f'{axis}={size}' for axis, size in config.mesh.items())})"
    print(
        f"{kind} of {numel / 1e6:,.2f} million parameters ({config.layers} layers, width {config.width}), "
        f"{ranks}{'' if gpu is None else f' on {gpu}'}, stage {config.stage}, {config.precision}, state {where}\n"
        f"text: {text.source}, {text.file_count} files, {len(text.train) / 1e6:.2f} MB to train on, "
        f"{len(text.validation) / 1e6:.2f} MB to validate on, unigram entropy {entropy:.3f} nats per byte",
        flush=True,
    )
    if rates is not None:
        print(f"drive, idle: {rates.read / 1e9:.2f} GB/s read, {rates.written / 1e9:.2f} GB/s written", flush=True)


def make_progress(config: DemoConfig, rates: DriveRates | None, *, active: bool) -> Progress:
    """Return the progress that fits stdout."""
    if not active or config.quiet:
        return Progress()
    recent = Recent(config.world_size, rates)
    if not sys.stdout.isatty():
        return PlainProgress(config.steps, recent)
    return BarProgress(config.steps, recent, None if config.memory is None else as_nbytes(config.memory))
