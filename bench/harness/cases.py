"""A program of several cases: `bench/NAME.py CASE flags...`; without a case the first one runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def run(description: str, cases: Mapping[str, str]) -> int:
    """Run the case that the command line names and return its exit code. cases: modules with a `main`, by name.

    A case's module is imported before the project's interpreter is chosen, so it imports neither torch nor zcomm at
    its top. `main` gets the words after the case's name.
    """
    words = sys.argv[1:]
    if words and not words[0].startswith("-"):
        name, words = words[0], words[1:]
        if name not in cases:
            sys.exit(f"{sys.argv[0]} {name}: use {', '.join(cases)}")
    elif {"-h", "--help"} & set(words):
        print(f"{description.strip()}\n\nCases: {', '.join(cases)}. `{sys.argv[0]} CASE --help` lists a case's flags.")
        return 0
    else:
        name = next(iter(cases))
    main: Callable[[list[str]], int] = import_module(cases[name]).main
    return main(words)
