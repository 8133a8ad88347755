"""Headless Chromium, driven by its DevTools protocol over two pipes: for tests that look at pages.

`browser(folder)` starts it, or skips the test if it is not installed. JavaScript is evaluated in the page.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
QUIET = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars"
).split()


class Browser:
    """A page in Chromium. errors: the errors that the page and its frames have written to the console."""

    def __init__(self, orders: int, answers: int) -> None:
        self._orders, self._answers = orders, answers
        self._numbers = itertools.count(1)
        self._rest = b""
        self._instead: dict[str, bytes] = {}
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def resize(self, width: int, height: int = 900) -> None:
        """Set the window's size, in pixels; a narrow one is a telephone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def load(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)
        here = json.dumps(url.partition("#")[0])
        self.wait_for(f"location.href.split('#')[0] === {here} && document.readyState === 'complete'", url)

    def open(self, url: str, width: int = 1400, height: int = 900) -> None:
        """Go to a page, in a window of this size."""
        self.resize(width, height)
        self._call("Page.navigate", url=url)

    def answer(self, scripts: dict[str, bytes]) -> None:
        """Answer pages' requests for these URLs with these scripts, because there is no network."""
        self._instead = scripts
        self._call("Fetch.enable", patterns=[{"urlPattern": url} for url in scripts])

    def evaluate(self, script: str) -> Any:
        """Return the value of an expression in the page, or the result of its promise. Raises: RuntimeError."""
        found = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:2000])
        return found["result"].get("value")

    def wait_for(self, script: str, what: str, timeout_s: float = 60.0) -> Any:
        """Return the value of an expression as soon as it is true. Raises: AssertionError after the timeout."""
        deadline, last = time.monotonic() + timeout_s, ""
        while time.monotonic() < deadline:
            try:
                if value := self.evaluate(script):
                    return value
            except RuntimeError as error:  # the page is not loaded yet
                last = str(error)
            time.sleep(0.2)
        raise AssertionError(f"still waiting for {what} after {timeout_s} s {last} {self.errors}")

    def screenshot(self, file: Path) -> None:
        """Write a screenshot as PNG."""
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))

    def _send(self, method: str, **parameters: Any) -> int:
        number = next(self._numbers)
        order = {"id": number, "method": method, "params": parameters}
        if method.partition(".")[0] != "Target":
            order["sessionId"] = self._session
        content = json.dumps(order).encode() + b"\0"
        while content:
            content = content[os.write(self._orders, content) :]
        return number

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, **parameters)
        while (answer := self._next()).get("id") != number:
            pass
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            if not select.select([self._answers], [], [], 120)[0]:
                raise RuntimeError("the browser does not answer")
            piece = os.read(self._answers, 1 << 20)
            if not piece:
                raise RuntimeError("the browser has ended")
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        given = told.get("params", {})
        if told.get("method") == "Fetch.requestPaused":
            body = base64.b64encode(self._instead[given["request"]["url"]]).decode()
            kind = [{"name": "Content-Type", "value": "text/javascript"}]
            request = given["requestId"]
            self._send("Fetch.fulfillRequest", requestId=request, responseCode=200, responseHeaders=kind, body=body)
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(given["exceptionDetails"])[:1000])
        if told.get("method") == "Runtime.consoleAPICalled" and given["type"] == "error":
            self.errors.append(json.dumps(given["args"])[:1000])
        if told.get("method") == "Log.entryAdded" and given["entry"]["level"] == "error":
            self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")
        return told


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start Chromium; its files are in ``folder``."""
    if PROGRAM is None:
        pytest.skip("no chromium (Debian: chromium)")
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    high = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 20) for each in (theirs_in, theirs_out)]

    def connect() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    command = [str(PROGRAM), *QUIET, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        command, stdin=quiet, stdout=quiet, stderr=quiet, preexec_fn=connect, close_fds=False, start_new_session=True
    )
    for each in (theirs_in, theirs_out, *high):
        os.close(each)
    try:
        yield Browser(ours_out, ours_in)
    finally:
        os.close(ours_out)
        os.close(ours_in)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
