"""Bytes of an optimizer: those that it has (usage), those of a choice (plan), the choice that keeps memory= (limit)."""

from __future__ import annotations
