"""A headless Chromium under this process's control, over a pipe: Chrome's DevTools protocol, and no other package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT_S = 60.0


def browser() -> str | None:
    """The path of a Chromium or Chrome on this machine."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Page:
    """A page in a browser of its own, which has no network but what this machine serves itself.

    Attributes:
        errors: What it wrote to its console as an error or warning, and exceptions that nothing caught.
        requests: Addresses that it asked for.
    """

    def __init__(self, folder: Path, width: int = 1280, height: int = 900) -> None:
        path = browser()
        assert path is not None
        self.errors: list[str] = []
        self.requests: list[str] = []
        to_read, to_write = os.pipe(), os.pipe()
        self._in, self._out = to_read[1], to_write[0]
        arguments = (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
            *(
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--disable-extensions",
            ),
            *(
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                "--hide-scrollbars",
                "--remote-debugging-pipe",
            ),
            *(f"--user-data-dir={folder}", f"--window-size={width},{height}", "about:blank"),
        )
        # The browser reads commands from descriptor 3 and answers on 4; each ends with a NUL.
        shell = f'exec "$0" "$@" 3<&{to_read[0]} 4>&{to_write[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, path, *arguments],
            pass_fds=(to_read[0], to_write[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read[0])
        os.close(to_write[1])
        self._rest, self._number, self._session = b"", 0, ""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Page:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        os.close(self._in)
        os.close(self._out)
        self._process.kill()
        self._process.wait()

    def resize(self, width: int, height: int) -> None:
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def scheme(self, name: str) -> None:
        """Prefers `"light"` or `"dark"`."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, where: Path | str) -> None:
        """Opens a file, or an address."""
        self._call("Page.navigate", url=where if isinstance(where, str) else where.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def eval(self, code: str) -> Any:
        """The value of an expression, once it is there."""
        found = self._call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, code: str) -> None:
        """Waits until an expression is true."""
        until = time.monotonic() + WAIT_S
        while not self.eval(code):
            assert time.monotonic() < until, code
            time.sleep(0.02)

    def settle(self) -> None:
        """Waits until what the page meant to draw is drawn."""
        self.eval("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def key(self, name: str) -> None:
        text = {"text": name} if len(name) == 1 else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=name, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=name)
        self.settle()

    def point(self, x: float, y: float, kind: str = "mouseMoved", **more: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.settle()

    def drag(self, x: float, y: float, by: float) -> None:
        self.point(x, y, "mousePressed", button="left", buttons=1, clickCount=1)
        for part in range(1, 5):
            self.point(x + by * part / 4, y, buttons=1, button="left")
        self.point(x + by, y, "mouseReleased", button="left", clickCount=1)

    def picture(self, path: Path, *, whole: bool = True) -> None:
        shot = self._call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, (method, found["error"])
                return found["result"]
            self._note(found)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._out, 1 << 20)
            assert got, "the browser ended"
            self._rest += got
        line, _, self._rest = self._rest.partition(b"\0")
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        notes: dict[str, Callable[[dict[str, Any]], None]] = {
            "Runtime.exceptionThrown": lambda p: self.errors.append(str(p["exceptionDetails"])),
            "Runtime.consoleAPICalled": lambda p: self.errors.append(str(p["args"])),
            "Log.entryAdded": lambda p: self.errors.append(p["entry"]["text"]),
            "Network.requestWillBeSent": lambda p: self.requests.append(p["request"]["url"]),
        }
        if event.get("method") in notes:
            notes[event["method"]](event["params"])
