"""First weights: deferred construction and the broadcast from rank 0."""

from __future__ import annotations
