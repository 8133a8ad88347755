"""The argument parser of the `zcomm` command and of its parts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"
"""Argument of a command's ``add_parser``."""


class OptionalChoice(argparse.Action):
    """Option with one of ``choices``, or without a value, which means the first one.

    The word after the option is its value only if it is a choice, because argparse would use the script as the value.
    """

    def __init__(self, option_strings: Sequence[str], dest: str, choices: Iterable[str], help: str) -> None:
        super().__init__(option_strings, dest, choices=choices, help=help)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        """Set the attribute."""
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Argument parser that reports errors in one line."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, with the values of each ``OptionalChoice`` before the first positional argument."""
        return super().parse_known_args(None if args is None else self._with_choices(list(args)), namespace)

    def _with_choices(self, args: list[str]) -> list[str]:
        at = 0
        while at < len(args) and args[at].startswith("-"):
            action = self._option_string_actions.get(args[at])
            if isinstance(action, OptionalChoice):
                choices = list(action.choices or ())
                if at + 1 == len(args) or args[at + 1] not in choices:
                    args[at] += f"={choices[0]}"
                    at -= 1
            at += 1 if action is None or action.nargs == 0 else 2
        return args

    def error(self, message: str) -> NoReturn:
        """Print the message and a pointer to --help, and exit with code 2."""
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")
