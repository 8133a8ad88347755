"""Errors that end a command with one line and no traceback."""

from __future__ import annotations


class UserError(Exception):
    """Error of use: a request that cannot be served. The message is the one line shown. exit_code: of the command."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
