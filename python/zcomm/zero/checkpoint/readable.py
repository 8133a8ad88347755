"""Reads of weights and state that do not raise, so that a rank with errors continues the collectives of a save.

A failed read gives zeros, and the first error is kept until ``check`` raises it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from zcomm.zero.layout.flat import FlatBucket
from zcomm.zero.parts import Parts


class Readable:
    """Store and state of ``parts``, with the methods that tensors/chunks.py calls. error: of the first failed read."""

    def __init__(self, parts: Parts) -> None:
        self.error: Exception | None = None
        self.form = parts.state.form
        self._store, self._state = parts.store, parts.state
        me: Any = self
        self.parts = dataclasses.replace(parts, store=me, state=me)

    def read(self, bucket: FlatBucket, part: slice) -> torch.Tensor:
        try:
            return self._store.read(bucket, part)
        except Exception as error:
            self.error = self.error or error
            return torch.zeros(part.stop - part.start, dtype=self.form.dtype)

    @contextlib.contextmanager
    def tile(self, bucket: int, part: slice, *, load: bool = True, store: bool = False) -> Iterator[torch.Tensor]:
        assert load and not store
        with contextlib.ExitStack() as stack:
            try:
                state = stack.enter_context(self._state.tile(bucket, part))
            except Exception as error:
                self.error = self.error or error
                state = torch.zeros(self.form.nbytes(part.stop - part.start), dtype=torch.uint8)
            yield state

    def check(self) -> None:
        """Raise the first error of a read."""
        if self.error is not None:
            raise self.error
