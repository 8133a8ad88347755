"""1-bit optimizers: whole copies of the state on each rank, which exchange moments with one bit per element."""

from __future__ import annotations
