"""Headless Chromium under control of a test, over the DevTools protocol on two pipes: no port, no further package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)
_ANSWER_S = 60.0


def chromium() -> str:
    """Chromium's path; skips the test where there is none."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium here; .ci/browser.sh installs it")
    return path


@dataclass
class Page:
    """The one page of a browser, and what went wrong or over the network while it was shown.

    Attributes:
        errors: uncaught errors, and what the console has as errors or the page's policy refused.
        requests: addresses that the page asked for.
    """

    _process: subprocess.Popen[bytes]
    _write: int
    _read: int
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _session: str | None = None
    _number: int = 0
    _rest: bytes = b""
    _loaded: bool = False

    def attach(self) -> None:
        """Take over the page that the browser opened."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(
        self, path: Path, *, width: int = 1240, height: int = 900, dark: bool = False, script: bool = True
    ) -> None:
        """Show the file at ``path`` in a window of this size, and wait until it is loaded."""
        self.errors, self.requests, self._loaded = [], [], False
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.absolute().as_uri())
        deadline = time.monotonic() + _ANSWER_S
        while not self._loaded:
            self._take(self._message(deadline, "the page to load"))

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            pytest.fail(f"{expression} raised {result['exceptionDetails']}")
        return result["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A real mouse event at window coordinates; ``kind`` is ``mouseMoved``, ``mousePressed``, ..."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events on the way are noted."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session is not None and method != "Browser.close":
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        deadline = time.monotonic() + _ANSWER_S
        while True:
            message = self._message(deadline, f"an answer to {method}")
            if message.get("id") == self._number:
                if "error" in message:
                    pytest.fail(f"{method}: {message['error']}")
                return dict(message["result"])
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(str(params["args"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.loadEventFired":
                self._loaded = True

    def _message(self, deadline: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._read, 1 << 16) if ready else b""
            if not piece:
                pytest.fail(f"the browser is gone or silent; waited for {what}")
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        return dict(json.loads(message))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser with one page, its own empty ``profile`` folder; it is gone afterwards."""
    path = chromium()
    ends = [_above_ten(end) for pipe in (os.pipe(), os.pipe()) for end in pipe]
    its_read, our_write, our_read, its_write = ends
    command = [path, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{its_read} 4>&{its_write}', "browser", *command],
        pass_fds=(its_read, its_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_read)
    os.close(its_write)
    page = Page(process, our_write, our_read)
    try:
        page.attach()
        yield page
        page.call("Browser.close")
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait()
        os.close(our_write)
        os.close(our_read)


def _above_ten(end: int) -> int:
    """The same end of a pipe under a number that the shell's redirections to 3 and 4 do not touch."""
    moved = fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(end)
    return moved
