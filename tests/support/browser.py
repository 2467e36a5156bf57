"""A real browser without a window, over its DevTools protocol: what a page shows is asked of the page itself.

The protocol runs over two pipes, so that neither a port nor a WebSocket client is needed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import pathlib
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from tests.support.fake_workers import eventually

NAMES = ("chromium", "chromium-browser", "google-chrome")
WITHOUT = "no browser on PATH: apt-get install chromium"
FLAGS = (
    *("--headless", "--remote-debugging-pipe", "--no-first-run", "--no-default-browser-check", "--disable-gpu"),
    *("--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-extensions", "--disable-default-apps", "--hide-scrollbars", "--force-device-scale-factor=1"),
    *("--mute-audio", "--password-store=basic", "--lang=en-US"),
)
START_S = 60.0
ANSWER_S = 30.0
MESSAGE_MAX = 64 << 20
_BEGIN = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(one), fcntl.F_DUPFD, 10) for one in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads from descriptor 3 and writes to 4."""


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """A running one. ``events`` are those of all its tabs, in order."""

    def __init__(self, reader: asyncio.StreamReader, write: Callable[[bytes], object]) -> None:
        self._reader = reader
        self._write = write
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self.events: list[dict[str, Any]] = []

    async def read(self) -> None:
        """Take what the browser says, until it ends."""
        try:
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                waiting = self._waiting.pop(message.get("id", 0), None)
                if waiting is None:
                    self.events.append(message)
                elif not waiting.done():
                    waiting.set_result(message)
        except asyncio.IncompleteReadError:
            for waiting in self._waiting.values():
                if not waiting.done():
                    waiting.set_exception(AssertionError("the browser has ended"))

    async def call(self, method: str, session: str = "", within_s: float = ANSWER_S, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(within_s):
            answer = await waiting
        assert "error" not in answer, (method, answer["error"])
        return dict(answer["result"])

    async def open(self, url: str, *, scheme: str = "light", width: int = 1280, height: int = 900) -> Tab:
        """A tab with that page, which prefers the colour ``scheme``; its own storage, as a new visitor has."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = await self.call("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            await tab.call(f"{domain}.enable")
        await tab.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await tab.call("Emulation.setFocusEmulationEnabled", enabled=True)  # as if its window were in front
        await tab.prefer(scheme)
        await tab.call("Page.navigate", url=url)
        await tab.until("document.readyState === 'complete'")
        return tab


class Tab:
    """One page, and what the browser said of it."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        return await self._browser.call(method, self._session, **params)

    async def prefer(self, scheme: str) -> None:
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}], media=""
        )

    async def value(self, expression: str) -> Any:
        """What JavaScript gives in the page, as JSON."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str, *, within_s: float = 20.0) -> None:
        """Wait until JavaScript gives true."""

        async def is_true() -> bool:
            return bool(await self.value(expression))

        try:
            await eventually(is_true, within_s=within_s)
        except TimeoutError:
            said = await self.value("document.body.innerText")
            raise AssertionError(f"never true: {expression}; the page says: {said[:2000]}") from None

    async def press(self, key: str) -> None:
        """Press a key of the keyboard."""
        more = {"Enter": {"windowsVirtualKeyCode": 13, "text": "\r"}, "Tab": {"windowsVirtualKeyCode": 9}}[key]
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **more)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, **more)

    async def type(self, text: str) -> None:
        """Put text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """What the window shows, as a PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])

    def said(self, *methods: str) -> list[dict[str, Any]]:
        """The parameters of the events of these kinds."""
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] in methods
        ]

    def asked(self) -> list[str]:
        """Every address that the page asked for."""
        return [event["request"]["url"] for event in self.said("Network.requestWillBeSent")]

    def troubles(self) -> list[Any]:
        """Exceptions, errors on the console, and what a policy forbade."""
        logged = [event["entry"] for event in self.said("Log.entryAdded") if event["entry"]["level"] == "error"]
        errors = [event for event in self.said("Runtime.consoleAPICalled") if event["type"] in ("error", "assert")]
        return [*logged, *errors, *self.said("Runtime.exceptionThrown")]


@contextlib.asynccontextmanager
async def browsing(profile: pathlib.Path) -> AsyncIterator[Browser]:
    """A browser with a ``profile`` of its own; it has ended at the end."""
    path = find_browser()
    assert path is not None, WITHOUT
    loop = asyncio.get_running_loop()
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    begin = (sys.executable, "-c", _BEGIN, str(theirs_in), str(theirs_out))
    process = await asyncio.create_subprocess_exec(
        *begin,
        *(path, *FLAGS, *sandbox, f"--user-data-dir={profile}", "about:blank"),
        pass_fds=(theirs_in, theirs_out),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(theirs_in)
    os.close(theirs_out)
    reader = asyncio.StreamReader(limit=MESSAGE_MAX)
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours_in, "rb", buffering=0)
    )
    browser = Browser(reader, lambda message: os.write(ours_out, message))
    reading = asyncio.create_task(browser.read())
    try:
        await browser.call("Browser.getVersion", within_s=START_S)
        yield browser
        with contextlib.suppress(AssertionError, TimeoutError, OSError):
            await browser.call("Browser.close", within_s=5.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), 10.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it started is of its group, which is its own
        await process.wait()
        reading.cancel()
        await asyncio.wait({reading})
        transport.close()
        os.close(ours_out)
