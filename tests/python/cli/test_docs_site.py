"""The site that `make docs` builds, in a headless browser: search finds pages, and pages fit narrow windows."""

from __future__ import annotations

import functools
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import PROGRAM, Browser, browser
from places import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout_s(300),
    pytest.mark.skipif(PROGRAM is None, reason="no chromium (apt-get install chromium)"),
]
FOUND = {"endurance": "nvme.html", "max_elastic_nodes": "cli.html", "rehearse": "several_machines.html"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, as `make docs` does."""
    for package in ("mkdocs", "material", "mkdocstrings"):
        pytest.importorskip(package, reason="`make docs` installs mkdocs-material and mkdocstrings")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.fixture
def page(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path) as started:
        started.resize(1400)
        yield started


@pytest.fixture
def server(site: Path) -> Iterator[str]:
    """Serve the site; yields its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()
        thread.join()


def search(page: Browser, word: str) -> str:
    """Type a word into the page's search; return the addresses that it finds, one in each line."""
    page.evaluate("document.querySelector('[data-md-component=search-query]').focus()")
    page.evaluate(
        "(box => { box.value = " + json.dumps(word) + "; box.dispatchEvent(new KeyboardEvent('keyup')); })"
        "(document.querySelector('[data-md-component=search-query]'))"
    )
    links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href).join('\\n')"
    return str(page.wait_for(links, f"what {word!r} finds"))


@pytest.mark.parametrize("way", ["served", "from the disk"])
def test_search_finds_pages(site: Path, page: Browser, request: pytest.FixtureRequest, way: str) -> None:
    root = request.getfixturevalue("server") if way == "served" else site.as_uri()
    for word, wanted in FOUND.items():
        page.load(f"{root}/index.html")
        found = search(page, word)
        assert f"{root}/{wanted}" in found, f"{word}: {found}"
    assert page.errors == []


def test_pages_fit_a_narrow_window_and_a_wide_one(site: Path, page: Browser) -> None:
    names = sorted(str(file.relative_to(site)) for file in site.rglob("*.html") if file.name != "404.html")
    assert len(names) > 40
    wide = []
    for name in names:
        page.load(f"{site.as_uri()}/{name}")
        for width in (400, 1400):
            page.resize(width)
            if page.evaluate("document.documentElement.scrollWidth") > width:
                wide.append(f"{name} at {width}")
    assert wide == []
    assert [error for error in page.errors if "mermaid" not in error] == []  # mermaid is on another server
