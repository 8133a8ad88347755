"""Progress of training on rank 0: a bar on a terminal, a line now and then elsewhere, nothing on other ranks."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from zcomm.demo.options import DemoConfig
    from zcomm.demo.text import Text

_LINES = 20  # plain lines per run
_WIDE = 100  # columns from which the parts of a step have their full names beside the bar
_WINDOW = 10  # steps over which speed and shares are averaged


@dataclass(frozen=True)
class StepRecord:
    """One step. loss: nats per byte, mean over ranks; seconds are rank 0's, compute is what is not waiting."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    step_s: float
    compute_s: float
    comm_s: float
    swap_s: float


class Progress(ExitStack):
    """Progress that shows nothing; also the interface of the other two."""

    def step(self, record: StepRecord) -> None:
        """Record the end of a step."""

    def validation(self, step: int, loss: float) -> None:
        """Show the validation loss after `step`."""


class Recent:
    """Means over the last steps."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=_WINDOW)

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


class PlainProgress(Progress):
    """Lines for a log."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps
        self._every = max(1, steps // _LINES)
        self._recent = Recent()

    def step(self, record: StepRecord) -> None:
        """Print every so many steps."""
        self._recent.add(record)
        if record.step % self._every == 0 or record.step in (1, self._steps):
            print(f"step {record.step}/{self._steps}  {self._recent.text()}", flush=True)

    def validation(self, step: int, loss: float) -> None:
        """Print the validation loss."""
        print(f"step {step}/{self._steps}  validation loss {loss:.3f}", flush=True)


class BarProgress(Progress):
    """A bar of rich's."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        super().__init__()
        console = console or Console()
        self._short = console.width < _WIDE
        self._bar = RichProgress(
            BarColumn(bar_width=10 if self._short else 20),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
        )
        self._task = self._bar.add_task("first step ...", total=steps)
        self._recent = Recent()

    def __enter__(self) -> BarProgress:
        self.enter_context(self._bar)
        return self

    def step(self, record: StepRecord) -> None:
        """Move the bar."""
        self._recent.add(record)
        self._bar.update(self._task, advance=1, description=self._recent.text(self._short))

    def validation(self, step: int, loss: float) -> None:
        """Print a line above the bar."""
        self._bar.console.print(f"step {step}: validation loss {loss:.3f}", highlight=False)


def make_progress(config: DemoConfig, text: Text, numel: int, entropy: float, *, active: bool) -> Progress:
    """Make the progress that fits stdout; print the run's head line where it shows anything."""
    if not active or config.quiet:
        return Progress()
    where = {"nvme": "swapped to disk", "cpu": "offloaded to host memory", "none": "not offloaded"}[config.offload]
    print(
        f"GPT of {numel / 1e6:.2f} million parameters ({config.layers} layers, width {config.width}), "
        f"{config.world_size} ranks, stage {config.stage}, {config.precision}, state {where}\n"
        f"text: {text.source}, {text.file_count} files, {len(text.train) / 1e6:.2f} MB to train on, "
        f"{len(text.validation) / 1e6:.2f} MB to validate on, unigram entropy {entropy:.3f} nats per byte",
        flush=True,
    )
    return BarProgress(config.steps) if sys.stdout.isatty() else PlainProgress(config.steps)
