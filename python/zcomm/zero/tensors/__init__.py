"""Whole tensors of sharded ones: read, set, loaded, and as a state_dict."""

from __future__ import annotations
