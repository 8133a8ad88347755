"""Other libraries' names for zcomm's parts, so that scripts migrate by changing their import line."""

from __future__ import annotations
