"""The table of idioms: each is one function, with the settings in which ZeroOptimizer refuses it, and the errors.

A place is "WORLD:SETTING". A row names its places in `make test` and in `make test-slow`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from idioms.run import IdiomRun


def among(place: str, patterns: tuple[str, ...]) -> bool:
    """Return True if a place fits one of the patterns."""
    return any(fnmatchcase(place, pattern) for pattern in patterns)


@dataclass(frozen=True)
class Refusal:
    """An error instead of torch's numbers: its class (or a base), a pattern of its message, and its places."""

    kind: str
    says: str  # a regular expression
    where: tuple[str, ...] = ("*",)  # patterns of places


@dataclass(frozen=True)
class Places:
    """Places in `make test` and in `make test-slow`. At other places a row is left to `make test-long`."""

    fast: tuple[str, ...] = ()
    slow: tuple[str, ...] = ()

    def __or__(self, other: Places) -> Places:
        return Places(self.fast + other.fast, self.slow + other.slow)


def _in_pairs(*settings: str) -> Places:
    """Return these settings with two ranks in `make test`, with one in `make test-slow`."""
    return Places(tuple(f"2:{each}" for each in settings), tuple(f"1:{each}" for each in settings))


USUAL = Places(("2:3-units",), ("2:3-nvme", "2:2-fp16", "2:3-units-bf16"))
# Rows for sharded weights, which have no memory. zero/device/test_device_weight_idioms.py runs these and WEIGHTS, too.
SHARDED = Places(("1:3-units-nvme", "2:3-nvme"), ("1:3-units", "2:3-units", *USUAL.slow))
WEIGHTS = USUAL | SHARDED
# A row for each way to change weights.
EDITS = WEIGHTS | _in_pairs("0", "1", "2-private", "2-cpu", "3", "3-bf16", "1-fp16", "0-fp16")
# Rows that use p.grad.
GRADIENTS = USUAL | _in_pairs("0", "2", "3", "3-units", "3-nvme-late")


@dataclass(frozen=True)
class Idiom:
    """A row of the table."""

    run: Callable[[IdiomRun], None]
    refusals: tuple[Refusal, ...] = ()
    precisions: tuple[str, ...] = ("fp32",)
    places: Places = USUAL

    @property
    def name(self) -> str:
        return self.run.__name__

    def refusal(self, place: str) -> Refusal | None:
        return next((refusal for refusal in self.refusals if among(place, refusal.where)), None)


IDIOMS: list[Idiom] = []
FP32, HALF = ("fp32",), ("fp32", "bf16", "fp16")
Act = Callable[[Any, int], object]  # of the model and the number of the step; its result must be torch's, too


def idiom(*refusals: Refusal, precisions: tuple[str, ...] = FP32, places: Places = USUAL) -> Any:
    """Add the decorated program to the table."""

    def add(run: Callable[[IdiomRun], None]) -> Callable[[IdiomRun], None]:
        IDIOMS.append(Idiom(run, refusals, precisions, places))
        return run

    return add


def before_step(places: Places = USUAL, precisions: tuple[str, ...] = FP32, steps: int = 3, **options: Any) -> Any:
    """Add a program that acts between each backward and its step. options: of SGD."""

    def add(act: Act) -> Act:
        def program(run: IdiomRun) -> None:
            model, opt = run.sgd(**options)
            run.train(model, opt, steps, before=lambda step: run.note(act.__name__, act(model, step)))

        program.__name__ = act.__name__
        idiom(precisions=precisions, places=places)(program)
        return act

    return add


def between_steps(places: Places = USUAL, precisions: tuple[str, ...] = FP32) -> Any:
    """Add a program that acts before the first forward and after each step. The parameters remain the same objects."""

    def add(act: Act) -> Act:
        def program(run: IdiomRun) -> None:
            model, opt = run.sgd()
            before = list(model.parameters())

            def call(step: int) -> None:
                run.note(act.__name__, act(model, step))
                assert all(a is b for a, b in zip(before, model.parameters(), strict=True))

            call(0)
            run.train(model, opt, after=lambda step: call(step + 1))

        program.__name__ = act.__name__
        idiom(precisions=precisions, places=places)(program)
        return act

    return add
