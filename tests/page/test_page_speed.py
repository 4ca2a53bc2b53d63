"""How quick the page is, and what it takes: the figures are printed, and the bounds leave room for a loaded machine."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from asyncrl.page.serve import served_page
from harness.browser import NEEDS_CHROMIUM, Tab, browser
from harness.page_feed import FedRun, fed_run

pytestmark = NEEDS_CHROMIUM
RECOLOUR = """(() => {
    const select = document.querySelector('.details select');
    select.value = 'logprob';
    select.dispatchEvent(new Event('change'));
    return document.body.offsetHeight;
})()"""
LOADED = 4  # times as long on a machine that runs other tests


@pytest.fixture
async def fed(tmp_path: Path) -> AsyncIterator[FedRun]:
    async with fed_run(tmp_path / "run") as run:
        yield run


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with browser(tmp_path / "browser", "about:blank") as opened:
        await opened.size(1280, 900)
        yield opened


def cpu_s(tab: Tab) -> float:
    """CPU seconds of all processes of the browser."""
    root = psutil.Process(tab.pid)
    times = [one.cpu_times() for one in [root, *root.children(recursive=True)]]
    return sum(one.user + one.system for one in times)


@pytest.mark.parametrize(("steps", "goal_s"), [(1_000, 1.0), (20_000, 3.0)])
async def test_the_first_picture_of_a_run_comes_soon(fed: FedRun, tab: Tab, steps: int, goal_s: float):
    await fed.state()
    await fed.moments(600)
    await fed.train(range(1, steps + 1))
    drawn = "document.querySelectorAll('.chart .u-over').length >= 3"
    drawn += " && document.querySelector('[data-name=step]').textContent !== ''"
    whole = f"document.body.dataset.messages >= {steps + 601}"
    with served_page(fed.found("monitor"), "monitor") as url:
        began_s = time.monotonic()
        await tab.open(url)
        await tab.shows(drawn, "the figures and the charts are there")
        first_s = time.monotonic() - began_s
        await tab.shows(whole, "all steps are read")
    print(f"{steps:,} steps: first picture {first_s:.2f} s, all of them {time.monotonic() - began_s:.2f} s")
    assert first_s < LOADED * goal_s


async def test_a_thousand_actors_are_fresh_each_second_at_a_small_share_of_a_core(fed: FedRun, tab: Tab):
    seconds = 20
    await fed.state()
    await fed.vitals(range(1, 1001), 1000.0)
    with served_page(fed.found("monitor"), "monitor") as url:
        await tab.open(f"{url}&view=actors")
        await tab.shows(
            "document.querySelector('.bar').textContent.includes('1006 of 1006')",
            "all actors are there, six of the state",
        )
        before_s, began_s = cpu_s(tab), time.monotonic()
        for second in range(seconds):  # each actor publishes its vital signs every two seconds
            await fed.vitals(range(1 + second % 2 * 500, 501 + second % 2 * 500), 1001.0 + second)
            await fed.state(at_s=1001.0 + second, elapsed_s=1001.0 + second)
            await asyncio.sleep(max(0.0, began_s + second + 1 - time.monotonic()))
        share = (cpu_s(tab) - before_s) / (time.monotonic() - began_s)
        silent = "[...document.querySelectorAll('.rows .row')].map((row) => parseFloat(row.lastChild.textContent))"
        assert max(await tab.run(silent)) <= 3.0
    print(f"1,000 actors: {share:.1%} of a core")
    assert share < LOADED * 0.15


async def test_the_tokens_of_a_long_trajectory_appear_soon(fed: FedRun, tab: Tab):
    await fed.state()
    await fed.trajectory("p000001-0", 32_768)
    with served_page(fed.found("monitor"), "monitor") as url:
        await tab.open(f"{url}&view=trajectories")
        await tab.shows("!!document.querySelector('.rows .row')", "the list has the trajectory")
        began_s = time.monotonic()
        await tab.press(".rows .row")
        await tab.shows("document.querySelectorAll('.tokens span').length === 32768", "all tokens are there")
        first_s = time.monotonic() - began_s
        began_s = time.monotonic()
        await tab.run(RECOLOUR)
    print(f"32,768 tokens: {first_s:.2f} s, in other colours {time.monotonic() - began_s:.2f} s")
    assert first_s < LOADED * 1.0


async def test_memory_does_not_grow_over_a_hundred_thousand_messages(fed: FedRun, tab: Tab):
    async def heap_mb() -> float:
        await tab.call("HeapProfiler.collectGarbage")
        return float((await tab.call("Runtime.getHeapUsage"))["usedSize"]) / 1e6

    await fed.state()
    with served_page(fed.found("monitor"), "monitor") as url:
        await tab.open(f"{url}&view=trajectories")
        found = []
        for sent in range(20_000, 100_001, 20_000):
            await fed.grades(range(sent - 20_000, sent))
            await tab.shows(f"document.body.dataset.messages >= {sent}", f"{sent:,} messages are read")
            found.append(await heap_mb())
    print("heap after each 20,000 messages, MB:", *(f"{one:.1f}" for one in found))
    assert found[-1] < 1.1 * found[0] + 1.0
