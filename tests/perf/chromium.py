"""A headless Chromium, driven through pipes by its DevTools protocol: no driver, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: None, or why there is no browser.
MISSING = None if any(map(shutil.which, NAMES)) else f"none of {', '.join(NAMES)} is on the PATH"

_OPTIONS = (
    "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
    " --no-first-run --force-device-scale-factor=1 --remote-debugging-pipe"
    " --disable-background-networking --mute-audio"
)
_SECONDS = 20.0
_KEYS = {"Tab": 9, "Enter": 13, "Space": 32, "End": 35, "ArrowRight": 39, "ArrowDown": 40}


class Browser:
    """One page. Closed by ``close``, or as a context manager.

    Attributes:
        errors: what the page wrote to its console as an error, threw, or was kept from loading.
    """

    def __init__(self) -> None:
        path = next(filter(None, map(shutil.which, NAMES)))
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()

        # Chromium reads commands from 3 and answers on 4; dup2 onto itself would close on exec.
        def wire() -> None:
            high = [os.dup(theirs_in), os.dup(theirs_out)]
            for source, target in zip(high, (3, 4), strict=True):
                os.dup2(source, target)

        command = [path, *_OPTIONS.split(), f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            command,
            preexec_fn=wire,
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser."""
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)
        self._profile.cleanup()

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise RuntimeError("Chromium ended")
            self._buffer += piece
        text, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(text)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        event, facts = message.get("method"), message.get("params", {})
        if event == "Runtime.exceptionThrown":
            details = facts["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(a.get("value")) for a in facts["args"]))
        elif event == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.errors.append(facts["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            url = facts["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.errors.append(f"asked the network for {url}")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the protocol; raises RuntimeError if it fails."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._to, json.dumps(command).encode() + b"\0")
        while True:
            message = self._message()
            self._note(message)
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result

    def evaluate(self, script: str) -> Any:
        """The value of a JavaScript expression, which may be a promise."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"].get("exception", {}).get("description"))
        return done["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until a JavaScript expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} did not come true; errors: {self.errors}")
            time.sleep(0.02)

    def settle(self) -> None:
        """Until what was changed is drawn."""
        frame = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
        for _ in range(2):
            self.evaluate(frame)

    def open(self, path: Path, hash_: str = "") -> None:
        """Load a page anew."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=f"{path.resolve().as_uri()}{hash_}")
        self.wait("document.readyState === 'complete' && window.perfDashboard")
        self.settle()

    def resize(self, width: int, height: int, is_phone: bool = False) -> None:
        """Change the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        self.settle()

    def prefer(self, scheme: str) -> None:
        """What the system prefers, ``"dark"`` or ``"light"``."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        self.settle()

    def press(self, key: str, times: int = 1) -> None:
        """Press a key."""
        facts = {"key": " " if key == "Space" else key, "code": key}
        facts |= {"windowsVirtualKeyCode": _KEYS[key]}
        text = {"Enter": "\r", "Space": " "}.get(key)
        for _ in range(times):
            down = {"type": "keyDown" if text else "rawKeyDown", **facts}
            self.call("Input.dispatchKeyEvent", **down, **({"text": text} if text else {}))
            self.call("Input.dispatchKeyEvent", type="keyUp", **facts)
        self.settle()

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self.call("Input.insertText", text=text)

    def screenshot(self, path: Path) -> None:
        """Keep a picture of the window."""
        shot = self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))

    def accessible(self) -> list[tuple[str, str]]:
        """Role and name of all that a screen reader meets."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]
