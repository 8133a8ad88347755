"""The argument parser of the `zcomm` command and of its parts."""

from __future__ import annotations

import argparse
from typing import NoReturn, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""Argument of a command's ``add_parser``."""


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        """Print what is wrong and where help is, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
