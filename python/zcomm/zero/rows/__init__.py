"""Weights that are gathered in blocks of rows; see ops.py."""

from __future__ import annotations
