"""Drives a headless Chromium over the DevTools protocol, through a pipe: the standard library is enough.

Of the libraries that do it, Playwright brings a browser and Node of its own, Selenium a driver of the browser's very
version; the tests ask a handful of methods of the protocol (https://chromedevtools.github.io/devtools-protocol).
"""

import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 60.0


def found() -> str | None:
    """The program of a Chromium, where there is one."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """A page of a browser. `events` is everything that it told since it was opened."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._rest, self._number = to, back, b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Audits"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and give its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def open(self, url: str) -> None:
        """Load a page to the end."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page; what it promises is waited for."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def size(self, width: int, height: int = 800) -> None:
        """Make the window that large, in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def colors(self, scheme: str, media: str = "") -> None:
        """Let the user prefer `light` or `dark`; `media` may be `print`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", media=media, features=features)

    def _read(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._back], [], [], max(end - time.monotonic(), 0))
            assert ready, "the browser does not answer"
            got = os.read(self._back, 1 << 20)
            assert got, "the browser has ended"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message


@contextlib.contextmanager
def tab(program: str, *more: str) -> Iterator[Tab]:
    """A browser with a profile of its own and one page, for as long as it is used; `more` are options for it."""
    near_in, to = os.pipe()
    back, near_out = os.pipe()
    # The protocol is spoken on the descriptors 3 and 4: what starts the browser puts them there from above them.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (near_in, near_out)]
    os.close(near_in)
    os.close(near_out)
    there = f"import os, sys; os.dup2({theirs[0]}, 3); os.dup2({theirs[1]}, 4); os.execv(sys.argv[1], sys.argv[1:])"

    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        options = ("--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run")
        options += ("--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}", *more)
        with subprocess.Popen(
            [sys.executable, "-c", there, program, *options],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(Path(profile))},
        ) as browser:
            for end in theirs:
                os.close(end)
            try:
                yield Tab(to, back)
            finally:
                browser.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    browser.wait(10)
                browser.kill()
                os.close(to)
                os.close(back)
