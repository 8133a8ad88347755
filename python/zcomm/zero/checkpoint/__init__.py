"""Checkpoints: one layout for all world sizes, stages, tiers and precisions (decision D10, docs/checkpoints.md)."""

from __future__ import annotations

from zcomm.zero.checkpoint.load import load
from zcomm.zero.checkpoint.manifest import Manifest
from zcomm.zero.checkpoint.manifest_reader import read_manifest
from zcomm.zero.checkpoint.save import ExtraState, save
from zcomm.zero.files.save_task import SaveTask

__all__ = ["ExtraState", "Manifest", "SaveTask", "load", "read_manifest", "save"]
