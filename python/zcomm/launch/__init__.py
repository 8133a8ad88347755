"""Launcher: starts the ranks of one host and ends all of them.

Imports neither torch nor the core: a start costs milliseconds.
"""

from __future__ import annotations

from zcomm.launch.front import launch
from zcomm.launch.job import Job

__all__ = ["Job", "launch"]
