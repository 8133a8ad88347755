"""Other libraries' names for zcomm's parts, so that scripts move over by their import line."""

from __future__ import annotations
