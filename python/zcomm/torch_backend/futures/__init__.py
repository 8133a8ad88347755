"""Works and Futures of a process group, and the threads that serve them."""

from __future__ import annotations
