"""Headless Chromium, driven over its debugging protocol."""

import base64
import contextlib
import itertools
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse

from asyncrl.process import ChildProcess
from harness.stage import until

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
SHOTS = os.environ.get("ASYNCRL_SHOTS", "")  # folder for screenshots
NEEDS_CHROMIUM = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here (Debian: apt install chromium)"),
]


class Tab:
    """A page in the browser."""

    def __init__(self, socket: ClientWebSocketResponse, pid: int) -> None:
        self._socket, self._numbers = socket, itertools.count(1)
        self.pid = pid  # of the browser
        self.events: list[dict[str, Any]] = []  # that came while answers were awaited

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while (answer := await self._socket.receive_json(timeout=120)).get("id") != number:
            self.events.append(answer)
        assert "error" not in answer, answer
        return answer["result"]

    async def run(self, script: str) -> Any:
        """Run a script in the page; returns its value."""
        answer = await self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def shows(self, script: str, what: str) -> None:
        """Wait until a script is true."""

        async def holds() -> bool:
            return bool(await self.run(script))

        try:
            await until(holds, what)
        except BaseException:
            print(await self.run("document.body.innerText"))
            raise

    async def press(self, selector: str) -> None:
        """Click on the first element that a selector finds."""
        await self.run(f"document.querySelector({selector!r}).click()")

    async def open(self, url: str) -> None:
        """Load a URL, also one that differs from the current one in its fragment alone."""
        await self.call("Page.enable")
        await self.call("Page.navigate", url="about:blank")
        await self.call("Page.navigate", url=url)
        await self.shows("document.readyState === 'complete' && !!document.querySelector('nav')", "the page is there")

    async def shot(self, name: str) -> None:
        if SHOTS:
            picture = await self.call("Page.captureScreenshot")
            Path(SHOTS, f"{name}.png").write_bytes(base64.b64decode(picture["data"]))

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Take the size of a screen, and the colours that its user prefers."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])


@contextlib.asynccontextmanager
async def browser(folder: Path, address: str) -> AsyncIterator[Tab]:
    """Open an address in a browser."""
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    flags += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=900,700"]
    process = await ChildProcess.start([CHROMIUM, *flags, address], log=folder.with_suffix(".log"))
    port = folder / "DevToolsActivePort"
    try:
        await until(lambda: port.exists() and "\n" in port.read_text(), "the browser listens")
        async with ClientSession(f"http://127.0.0.1:{port.read_text().split()[0]}") as client:
            found = list[dict[str, Any]]()

            async def opened() -> bool:
                async with client.get("/json/list") as answer:
                    found[:] = [one for one in await answer.json() if one["url"].startswith(address)]
                return bool(found)

            await until(opened, "the page is open")
            async with client.ws_connect(found[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                yield Tab(socket, process.pid)
    finally:
        await process.end()
