"""Whole tensors of sharded ones: read, set and loaded."""

from __future__ import annotations
