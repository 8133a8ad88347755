"""Parts of `bench/adam.py`: variants of an optimizer step, the exact result, the page, loss curves of small state."""

from __future__ import annotations
