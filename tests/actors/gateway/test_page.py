"""The chat page in a headless Chromium, driven over its debugging protocol."""

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, ClientWebSocketResponse

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.process import ChildProcess
from harness.gateways import gateway
from harness.sglang_like import LikeSGLang
from harness.stage import Stage, until
from topics.turns import FEEDBACK_GIVEN

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
SHOTS = os.environ.get("ASYNCRL_SHOTS", "")  # folder for screenshots

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not CHROMIUM, reason="there is no Chromium here (Debian: apt install chromium)"),
]


class Tab:
    """A page in the browser."""

    def __init__(self, socket: ClientWebSocketResponse) -> None:
        self._socket, self._numbers = socket, itertools.count(1)

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while (answer := await self._socket.receive_json(timeout=120)).get("id") != number:
            pass
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
        finally:
            print(await self.run("document.body.innerText"))

    async def shot(self, name: str) -> None:
        if SHOTS:
            picture = await self.call("Page.captureScreenshot")
            Path(SHOTS, f"{name}.png").write_bytes(base64.b64decode(picture["data"]))


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
                yield Tab(socket)
    finally:
        await process.end()


async def test_a_user_chats_and_votes_on_the_page_which_shows_the_version_of_each_reply(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    async with (
        gateway(bus, stage, tmp_path / "model", inference, page=True, max_new_tokens=8) as served,
        browser(tmp_path / "browser", f"{served.address}/") as tab,
    ):
        await tab.shows("document.readyState === 'complete' && !!document.querySelector('#key')", "the page is there")
        await tab.shot("empty")
        write = "text.value = {}; document.querySelector('#form').requestSubmit()"
        await tab.run("key.value = 'sk-wrong'; " + write.format("'abc'"))
        await tab.shows("document.querySelector('p.error')?.textContent.includes('not valid')", "a bad key is refused")
        await tab.shot("bad-key")
        await tab.run(f"document.querySelector('#clear').click(); key.value = {json.dumps(served.key)}")
        for number in (1, 2):
            await tab.run(write.format("'abc'"))
            await tab.shows(f"document.querySelectorAll('.version').length === {number}", "the reply is whole")
        assert await tab.run("document.querySelector('.version').textContent") == "version 0"
        assert len(inference.asked[1].ids) > len(inference.asked[0].ids)  # the second prompt has the first reply
        await tab.run("document.querySelectorAll('[data-thumb=down]')[1].click()")
        await tab.shows("document.querySelectorAll('[data-thumb=down]')[1].ariaPressed === 'true'", "the vote is taken")
        await tab.shot("chat")
        record = await asyncio.wait_for(read_last(bus, FEEDBACK_GIVEN), 60)
        assert record is not None and float(record.headers["score"]) == -1.0
