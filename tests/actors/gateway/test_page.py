"""The chat page in a headless Chromium, driven over its debugging protocol."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from harness.browser import NEEDS_CHROMIUM, browser
from harness.gateways import gateway
from harness.sglang_like import LikeSGLang
from harness.stage import Stage
from topics.turns import FEEDBACK_GIVEN

pytestmark = NEEDS_CHROMIUM


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
