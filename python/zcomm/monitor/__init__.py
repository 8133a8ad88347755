"""Monitors: rank 0 writes an engine's events to TensorBoard, Weights & Biases, CSV files or Comet.

Event: (name, value, samples so far). Packages are imported when a writer is made; a missing one is an error then.
Thread rule: the engine's thread.
"""

from __future__ import annotations

from zcomm.monitor.writers import CometWriter, CsvWriter, Event, Monitors, TensorBoardWriter, WandbWriter, Writer

__all__ = ["CometWriter", "CsvWriter", "Event", "Monitors", "TensorBoardWriter", "WandbWriter", "Writer"]
