"""Headless Chromium, by its DevTools protocol over a pipe: no package is needed."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Elements that are cut or that widen the page: their right edge lies outside of the window, and
# nothing around them scrolls.
OUTSIDE = """[...document.querySelectorAll("body *")].filter(e => {
  const box = e.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1 || !e.checkVisibility()) return false;
  for (let p = e; p && p != document.body; p = p.parentElement) {
    const style = getComputedStyle(p);
    if (p != e && /auto|scroll/.test(style.overflowX) || style.position == "fixed") return false;
  }
  return true;
}).map(e => e.outerHTML.slice(0, 200))"""


class Browser:
    """A window of Chromium."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._number, self._rest, self._session = 0, b"", ""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        self.ask("Page.enable")

    def open(self, url: str, width: int, *, dark: bool = False) -> None:
        """Load a page in a window of this width."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Page.navigate", url=url)
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, script: str) -> Any:
        """The value of an expression in the page, whose policy does not bind it."""
        answer = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def ask(self, method: str, **fields: Any) -> dict[str, Any]:
        """The result of a command of the protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": fields}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            part = os.read(self._back, 1 << 16)
            assert part, "Chromium has ended"
            self._rest += part
        text, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(text))


@contextlib.contextmanager
def chromium(home: Path) -> Iterator[Browser]:
    """A browser whose files lie in `home`; the test is skipped where there is no Chromium."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("needs Chromium, e.g. apt-get install chromium")
    (theirs, to), (back, answers) = os.pipe(), os.pipe()
    # The protocol is spoken at descriptors 3 and 4, which are freed by the copies at 10 and 11.
    wiring = f'exec 10<&{theirs} 11>&{answers}; exec 3<&10 4>&11 10<&- 11>&-; exec "$@"'
    options = (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
        "--remote-debugging-pipe", f"--user-data-dir={home}", "about:blank",
    )  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", wiring, "chromium", program, *options], pass_fds=(theirs, answers),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "HOME": str(home)},
    )  # fmt: skip
    os.close(theirs), os.close(answers)
    try:
        yield Browser(to, back)
    finally:
        os.close(to), os.close(back)  # which ends it
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
