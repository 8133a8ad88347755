"""``deepspeed.runtime.dataloader``: a loader that starts again at its end, and the class of ``initialize``'s loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from zcomm.data import Loader as DeepSpeedDataLoader

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class RepeatingLoader:
    """Iterator over ``loader`` that starts again at its end.

    Raises: StopIteration where the loader gives nothing at all.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
