"""The argument parser of the `zcomm` command and of its parts."""

from __future__ import annotations

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and where help is; exit code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
