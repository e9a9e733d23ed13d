"""A headless Chromium, driven through pipes by its DevTools protocol: no driver, no port."""

import json
import os
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
#: None, or why there is no browser.
MISSING = None if any(map(shutil.which, NAMES)) else f"none of {', '.join(NAMES)} is on the PATH"

_OPTIONS = (
  "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --hide-scrollbars"
  " --no-first-run --force-device-scale-factor=1 --remote-debugging-pipe"
  " --disable-background-networking --mute-audio"
)
_SECONDS = 20.0


class Browser:
  """One page, closed as a context manager.

  Attributes:
    errors: what the page wrote to its console as an error, threw, or asked the network for.
  """

  def __init__(self):
    self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    theirs_in, self._to = os.pipe()
    self._from, theirs_out = os.pipe()

    # Chromium reads commands from 3 and answers on 4; dup2 onto itself would close on exec.
    def wire():
      high = [os.dup(theirs_in), os.dup(theirs_out)]
      for source, target in zip(high, (3, 4), strict=True):
        os.dup2(source, target)

    path = next(filter(None, map(shutil.which, NAMES)))
    command = [path, *_OPTIONS.split(), f"--user-data-dir={self._profile.name}", "about:blank"]
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    self._process = subprocess.Popen(command, preexec_fn=wire, close_fds=False, **quiet)
    os.close(theirs_in)
    os.close(theirs_out)
    self._buffer, self._number, self._session = b"", 0, None
    self.errors = []
    target = self.call("Target.createTarget", url="about:blank")["targetId"]
    attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
    self._session = attached["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
      self.call(f"{domain}.enable")

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self._process.kill()
    self._process.wait()
    os.close(self._to)
    os.close(self._from)
    self._profile.cleanup()

  def _message(self):
    while b"\0" not in self._buffer:
      piece = os.read(self._from, 1 << 20)
      if not piece:
        raise RuntimeError("Chromium ended")
      self._buffer += piece
    text, self._buffer = self._buffer.split(b"\0", 1)
    return json.loads(text)

  def _note(self, event, facts):
    if event == "Network.requestWillBeSent":
      is_error = not facts["request"]["url"].startswith(("file:", "data:", "about:"))
    elif event in ("Runtime.consoleAPICalled", "Log.entryAdded"):
      entry = facts.get("entry", facts)
      is_error = entry.get("level", entry.get("type")) in ("error", "warning")
    else:
      is_error = event == "Runtime.exceptionThrown"
    if is_error:
      self.errors.append(json.dumps(facts))

  def call(self, method, **params):
    """A command of the protocol; raises RuntimeError if it fails."""
    self._number += 1
    command = {"id": self._number, "method": method, "params": params}
    if self._session:
      command["sessionId"] = self._session
    os.write(self._to, json.dumps(command).encode() + b"\0")
    while True:
      message = self._message()
      self._note(message.get("method"), message.get("params"))
      if message.get("id") == self._number:
        if "error" in message:
          raise RuntimeError(f"{method}: {message['error']['message']}")
        return message["result"]

  def evaluate(self, script):
    """The value of a JavaScript expression, which may be a promise."""
    options = {"returnByValue": True, "awaitPromise": True}
    done = self.call("Runtime.evaluate", expression=script, **options)
    if "exceptionDetails" in done:
      raise RuntimeError(done["exceptionDetails"].get("exception", {}).get("description"))
    return done["result"].get("value")

  def wait(self, condition):
    """Until a JavaScript expression is true."""
    end = time.monotonic() + _SECONDS
    while not self.evaluate(f"Boolean({condition})"):
      if time.monotonic() > end:
        raise TimeoutError(f"{condition} did not come true; errors: {self.errors}")
      time.sleep(0.02)

  def settle(self):
    """Until what was changed is drawn."""
    for _ in range(2):
      self.evaluate("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")

  def open(self, path, hash_=""):
    self.call("Page.navigate", url="about:blank")
    self.call("Page.navigate", url=f"{path.resolve().as_uri()}{hash_}")
    self.wait("document.readyState === 'complete' && window.perfDashboard")
    self.settle()

  def resize(self, width, height, is_phone=False):
    size = {"width": width, "height": height, "deviceScaleFactor": 1 + is_phone}
    self.call("Emulation.setDeviceMetricsOverride", **size, mobile=is_phone)
    self.settle()

  def prefer(self, scheme):
    """What the system prefers, ``"dark"`` or ``"light"``."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    self.call("Emulation.setEmulatedMedia", features=[feature])
    self.settle()

  def type(self, text):
    """Type into what has the focus."""
    self.call("Input.insertText", text=text)
