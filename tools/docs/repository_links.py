"""mkdocs hook: links between the site and the repository around it.

CONTRIBUTING.md and CHANGELOG.md become pages of the site. A link of a page to another file of the repository is
checked. It becomes a link to `repo_url`, or the file's name where there is none. Links of README are checked, too. Each
dead link is a warning, which fails a strict build.
"""

from __future__ import annotations

import logging
import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
OUTSIDE = ("README.md", "bench/README.md")  # checked, but not shown

_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^ *```.*?^ *```[^\n]*$)", re.DOTALL | re.MULTILINE)
_log = logging.getLogger("mkdocs.hooks.repository_links")


def on_files(files: Files, config: Any) -> Files:
    """Add the root's files as pages, and check the links of those that are not shown."""
    for source, page in PAGES.items():
        if page != "index.md":
            text = (ROOT / source).read_text(encoding="utf-8")
            files.append(File.generated(config, page, content=_links(text, lambda link: _in_docs("", link))))
    for source in OUTSIDE:
        for target in _targets((ROOT / source).read_text(encoding="utf-8")):
            _check(source, _resolved(posixpath.dirname(source), target))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links that leave docs/ into links that work on the site."""
    folder = posixpath.dirname(page.file.src_uri)

    def replaced(link: re.Match[str]) -> str:
        path = _resolved(posixpath.join("docs", folder), link[3])
        if path is None or path.startswith("docs/"):
            return link[0]
        _check(page.file.src_uri, path)
        if path in PAGES:
            anchor = "#" + link[3].partition("#")[2] if "#" in link[3] else ""
            return f"[{link[2]}]({posixpath.relpath(PAGES[path], folder or '.')}{anchor})"
        if config.repo_url:
            return f"{link[1]}[{link[2]}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        name = link[2].strip("`")
        return f"`{path}`" if name == path else f"{link[2]} (`{path}`)"

    return _links(markdown, replaced)


def _in_docs(folder: str, link: re.Match[str]) -> str:
    """Return a link of a file at the root as one of a page in docs/."""
    path = _resolved(folder, link[3])
    if path is None:
        return link[0]
    target = link[3].removeprefix("docs/") if path.startswith("docs/") else "../" + link[3]
    return f"{link[1]}[{link[2]}]({target})"


def _resolved(folder: str, target: str) -> str | None:
    """Return the path in the repository that a relative link names. None: an address, or an anchor of the same page."""
    path = target.partition("#")[0]
    if not path or ":" in path.split("/")[0] or path.startswith("/"):
        return None
    return posixpath.normpath(posixpath.join(folder, path))


def _check(source: str, path: str | None) -> None:
    if path is not None and not (ROOT / path).exists():
        _log.warning("%s links to %s, which is not in the repository", source, path)


def _links(markdown: str, replaced: Callable[[re.Match[str]], str]) -> str:
    """Replace links outside of fenced code."""
    parts = _FENCED.split(markdown)  # text, code, text, ...
    return "".join(part if number % 2 else _LINK.sub(replaced, part) for number, part in enumerate(parts))


def _targets(markdown: str) -> Iterator[str]:
    found: list[str] = []

    def seen(link: re.Match[str]) -> str:
        found.append(link[3])
        return link[0]

    _links(markdown, seen)
    yield from found
