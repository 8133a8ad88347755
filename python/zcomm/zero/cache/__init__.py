"""Bytes between one drive and a few windows of host memory. Nothing here knows what a tensor means."""

from __future__ import annotations
