"""DeepSpeed's shape of configuration, read strictly: a dict, a file or text becomes a frozen ``Config``.

Needs neither torch nor the core. ``schema.py`` lists the keys with an effect, ``foreign.py`` all others.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Mapping
from typing import Any

from zcomm.config.batch import BatchSizes, resolve_batch
from zcomm.config.compression_keys import CompressionTraining
from zcomm.config.keys import Note
from zcomm.config.parse import parse, parse_compression
from zcomm.config.schema import Config
from zcomm.config.source import Source, read_source

__all__ = [
    "BatchSizes",
    "Config",
    "ConfigWarning",
    "Source",
    "compression_settings",
    "load",
    "load_with_notes",
    "raw",
    "resolve_batch",
    "warn_of",
]


class ConfigWarning(UserWarning):
    """Warning of a key that was accepted and has no effect; the message has the reason."""


def load(source: Source | Config, auto: Mapping[str, Any] | None = None) -> Config:
    """Return the checked configuration of ``source``.

    source: a dict; a path of a JSON or hjson file; such text, or base64 of it; a Config passes through.

    auto: values of "auto" by dotted key ("optimizer.params.lr"); without one, "auto" means the key's default.
    Issues one ConfigWarning for each key set to a value that has no effect. Keys that Hugging Face writes for each run
    are one line of the logger at level DEBUG instead.
    Raises: ValueError naming the dotted key, the value and the remedy (unknown key: the nearest known one).
    NotImplementedError for a value that zcomm refuses. OSError if the file cannot be read.
    """
    config, notes = load_with_notes(source, auto)
    warn_of(notes)
    return config


def load_with_notes(source: Source | Config, auto: Mapping[str, Any] | None = None) -> tuple[Config, list[Note]]:
    """Load as ``load`` does, but return the notes about keys without effect, so that one rank can warn for all."""
    if isinstance(source, Config):
        return source, []
    return parse(*read_source(source), auto)


def compression_settings(source: Source | Config | CompressionTraining) -> CompressionTraining:
    """Return the section "compression_training" of ``source``, of which other keys are not read.

    Raises: as ``load``.
    """
    if isinstance(source, CompressionTraining):
        return source
    if isinstance(source, Config):
        return source.compression_training
    settings, notes = parse_compression(*read_source(source))
    warn_of(notes)
    return settings


def raw(source: Source | Config) -> Mapping[str, Any]:
    """Return the mapping behind ``source``: the program's dict itself, or the contents of its file or text.

    Keys are as they were written; sections of a Config become dicts. Raises: as ``load`` for an unreadable source.
    """
    return dataclasses.asdict(source) if isinstance(source, Config) else read_source(source)[0]


def warn_of(notes: list[Note]) -> None:
    """Issue one ConfigWarning for each note, and one line of the logger at level DEBUG for all quiet ones."""
    for note in notes:
        if not note.quiet:
            warnings.warn(note.text, ConfigWarning, stacklevel=3)
    quiet = [note.text for note in notes if note.quiet]
    if quiet:
        logging.getLogger("zcomm").debug("%s", "; ".join(quiet))
