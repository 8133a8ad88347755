"""mkdocs hook: the options of all commands, from their argparse parsers, in place of `PLACE` in docs/cli.md.

The parsers import neither torch nor the compiled core, so that the page needs no build.
"""

from __future__ import annotations

import argparse
import html
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE, PLACE = "cli.md", "<!-- options: written by tools/docs/commands.py -->"
SOURCES = Path(__file__).resolve().parents[2] / "python"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Put the options of all commands into the page of commands."""
    if page.file.src_uri != PAGE:
        return markdown
    before, place, after = markdown.partition(PLACE)
    if not place:
        raise ValueError(f"docs/{PAGE} has no line {PLACE}")
    return before + "\n".join(lines()) + after


def parsers() -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Yield the parser and the description of each command that users start: `zcomm`'s and `deepspeed`."""
    if str(SOURCES) not in sys.path:
        sys.path.insert(0, str(SOURCES))
    from zcomm.cli.main import build_parser
    from zcomm.compat.deepspeed.launcher import runner

    yield from _with_commands(build_parser(), "")
    yield runner.build_parser(), ""


def lines() -> Iterator[str]:
    """Yield the page's lines: for each command a heading, its description and a table of its options."""
    for parser, does in parsers():
        yield f"### {parser.prog}\n"
        yield f"{_text(parser.description or does)}\n"
        if parser.usage:
            yield f"```text\n{parser.usage}\n```\n"
        rows = [row for group in parser._action_groups for row in map(_row, group._group_actions) if row]
        if rows:
            yield from ("| option | meaning |", "|---|---|", *rows, "")


def _with_commands(parser: argparse.ArgumentParser, does: str) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    yield parser, does
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action._choices_actions:
                yield from _with_commands(action.choices[each.dest], each.help or "")


def _row(action: argparse.Action) -> str | None:
    """Return the option as a row of a table. None: it is not shown to users."""
    if action.help == argparse.SUPPRESS or isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
        return None
    names = list({name.replace("_", "-"): name for name in reversed(action.option_strings)}.values())[::-1]
    value = ""
    if not names:
        names = [str(action.metavar or action.dest)]
    elif action.nargs != 0:
        choices = ", ".join(map(str, action.choices)) if action.choices else action.dest.upper()
        value = f" *{_text(str(action.metavar or choices))}*"
    return f"| {', '.join(map(_code, names))}{value} | {_text(action.help or '')} |"


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _text(text: str) -> str:
    """Escape plain text, except code between backticks, so that Markdown shows it literally."""
    parts = text.replace("%%", "%").split("`")
    for number in range(0, len(parts), 2):
        shown = html.escape(parts[number], quote=False)
        for sign in "*_[]|":
            shown = shown.replace(sign, "\\" + sign)
        parts[number] = shown
    return "`".join(parts)


if __name__ == "__main__":
    print("\n".join(lines()))
