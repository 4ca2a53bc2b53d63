"""The page of a run in headless Chromium: what it shows, and what it withstands."""

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from asyncrl.bus.publish import pack, publish
from asyncrl.page.report import write_report
from asyncrl.page.serve import served_page
from harness.browser import NEEDS_CHROMIUM, Tab, browser
from harness.page_feed import RUN, FedRun, fed_run
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.profiles import ProfileStored
from topics.runs import RUN_STATE
from topics.stalls import StallFound
from topics.topic import TRAJECTORIES
from topics.turns import FeedbackGiven, TurnFinished, TurnJudged, TurnStarted

pytestmark = NEEDS_CHROMIUM

FIGURES = {
    "state": "state",
    "step": "step",
    "steps": "steps",
    "version": "version",
    "reward": "reward",
    "mean_lag_versions": "mean_lag_versions",
    "trajectories_failed": "trajectories_failed",
    "checkpoint_step": "checkpoint_step",
    "elapsed_s": "elapsed_s",
}
HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"
CONTROLS = "\x1b[31mred\x1b]0;title\x07 \u202egnp.exe \u2066isolate"


@pytest.fixture
async def fed(tmp_path: Path) -> AsyncIterator[FedRun]:
    async with fed_run(tmp_path / "run") as run:
        yield run


@pytest.fixture
async def tab(tmp_path: Path) -> AsyncIterator[Tab]:
    async with browser(tmp_path / "browser", "about:blank") as opened:
        yield opened


@pytest.fixture
def pages(fed: FedRun):
    """Serves the page for a role; returns its URL."""
    with ExitStack() as served:
        yield lambda role: served.enter_context(served_page(fed.found(role), role))


def value_of(name: str) -> str:
    return f"JSON.parse(document.querySelector('[data-name=\"{name}\"]').dataset.value ?? 'null')"


async def shows_step(tab: Tab, step: int) -> None:
    await tab.shows(f"{value_of('step')} === {step}", f"the page shows step {step}")


async def test_a_report_links_profiles_and_the_page_of_a_live_run_names_their_files(
    fed: FedRun, tab: Tab, pages: Any, tmp_path: Path
):
    status = await fed.state(profiles=[ProfileStored("learner-1", "steps", "profiles/steps.json")])
    links = "[...document.querySelectorAll('td a')].map((one) => one.getAttribute('href'))"
    await tab.open(pages("monitor"))
    await tab.shows("document.body.textContent.includes('profiles/steps.json')", "the page names the file")
    assert await tab.run(links) == []

    report = tmp_path / "report.html"
    await write_report(report, fed.owner, status, None, None)
    await tab.open(report.as_uri())

    await tab.shows(f"{links}.includes('profiles/steps.json')", "the report links the file")


@pytest.mark.parametrize("role", ["observer", "monitor"])
async def test_the_page_shows_the_numbers_of_the_published_state(fed: FedRun, tab: Tab, pages: Any, role: str):
    status = await fed.state(reward=0.123456, mean_lag_versions=0.75)
    await fed.train(range(1, 50))
    await tab.open(pages(role))
    await shows_step(tab, 5)

    shown = {name: await tab.run(value_of(name)) for name in FIGURES}

    published = json.loads(msgspec.json.encode(status))
    assert shown == {name: published[field] for name, field in FIGURES.items()}
    charted = "document.querySelector('[data-chart=\"lag/mean\"] .value').dataset.value"
    await tab.shows(f"Number({charted}) === 0.4", "the chart has the newest lag")
    await fed.state(step=6, reward=0.5)
    await shows_step(tab, 6)


async def test_the_page_asks_no_other_host(fed: FedRun, tab: Tab, pages: Any):
    await fed.state()
    await fed.trajectory("p000001-0", completion=HOSTILE)
    await tab.call("Network.enable")
    url = pages("monitor")
    await tab.open(url)
    await shows_step(tab, 5)
    for view in ("timeline", "actors", "trajectories", "live", "compare"):
        await tab.press(f"nav [data-view={view}]")
    await tab.press("nav [data-view=trajectories]")
    await tab.shows("!!document.querySelector('.rows .row')", "the list has the trajectory")
    await tab.press(".rows .row")
    await tab.shows("!!document.querySelector('.tokens')", "the tokens are there")

    asked = [event["params"] for event in tab.events if event["method"] == "Network.requestWillBeSent"]
    sockets = [event["params"]["url"] for event in tab.events if event["method"] == "Network.webSocketCreated"]
    hosts = {one["request"]["url"].split("/")[2] for one in asked if one["request"]["url"].startswith("http")}
    assert hosts == {url.split("/")[2]}
    assert set(sockets) == {f"{fed.login('monitor').websocket}/"}


async def test_an_observer_is_refused_texts_and_a_monitor_reads_them(fed: FedRun, tab: Tab, pages: Any):
    await fed.state()
    await fed.trajectory("p000001-0", completion="the answer")
    shown = "document.querySelector('.details').textContent"
    for role, words in (("observer", "log in as monitor"), ("monitor", "the answer")):
        await tab.open(pages(role))
        await tab.press("nav [data-view=trajectories]")
        await tab.shows("!!document.querySelector('.rows .row')", "the list has the trajectory")
        await tab.press(".rows .row")
        await tab.shows(f"{shown}.includes({words!r})", f"{role}: {words}")


async def test_the_page_continues_after_a_restart_of_the_server(fed: FedRun, tab: Tab, pages: Any):
    await fed.state()
    await fed.train(range(1, 10))
    await tab.open(pages("monitor"))
    await shows_step(tab, 5)
    state = "document.querySelector('.state').textContent"

    await fed.server.stop()
    await tab.shows(f"{state}.includes('away')", "the page tells that the server is away")
    await fed.server.start()
    await fed.provision_again()
    await fed.state(step=7)
    await fed.train(range(10, 12))

    await shows_step(tab, 7)
    await tab.shows(f"{state} === 'live'", "the page is live again")
    await tab.press("nav [data-view=compare]")
    count = "document.querySelector('.compare .numbers tbody td:nth-child(2)').textContent"
    await tab.shows(f"{count} === '11'", "steps after the restart are there, and none twice")


async def test_a_wrong_password_and_a_revoked_login_are_named(fed: FedRun, tab: Tab, pages: Any):
    await fed.state()
    url, state = pages("observer"), "document.querySelector('.state').textContent"
    await tab.open(url.replace("password=", "password=wrong"))
    await tab.shows(f"{state}.includes('refuses this login')", "a wrong password is named")

    await tab.open(url)
    await shows_step(tab, 5)
    await fed.server.stop()
    login = fed.login("observer")
    msgspec.structs.replace(login, password="another").save(fed.root / "credentials" / "observer.json")
    await fed.server.start()
    await tab.shows(f"{state}.includes('refuses this login')", "a revoked login is named")


async def test_hostile_texts_are_shown_as_text(fed: FedRun, tab: Tab, pages: Any):
    stall = StallFound("reward failing", HOSTILE, CONTROLS, HOSTILE)
    await fed.state(stalls=[stall], failure=HOSTILE)
    await fed.trajectory("p000001-0", prompt=HOSTILE, completion=CONTROLS)
    await tab.open(pages("monitor"))
    await shows_step(tab, 5)
    await tab.press("nav [data-view=trajectories]")
    await tab.shows("!!document.querySelector('.rows .row')", "the list has the trajectory")
    await tab.press(".rows .row")
    await tab.shows("document.querySelector('.details').textContent.includes('onerror')", "the prompt is a text")
    text = await tab.run("document.querySelector('.details').textContent")
    assert "\u241b[31mred" in text
    assert "<U+202E>gnp.exe" in text
    assert not {"\x1b", "\u202e", "\u2066"} & {*text}
    await tab.press("nav [data-view=overview]")
    finding = await tab.run("document.querySelector('[data-cause]').textContent")
    assert HOSTILE in finding
    assert await tab.run("document.querySelectorAll('img, main script').length") == 0
    assert "hacked" not in await tab.run("document.title")


async def test_a_text_of_ten_megabytes_is_shown_in_parts(fed: FedRun, tab: Tab, pages: Any):
    await fed.state()
    await fed.trajectory("p000001-0", completion="a<b>" * 2_500_000)
    await tab.open(pages("monitor"))
    await tab.press("nav [data-view=trajectories]")
    await tab.shows("!!document.querySelector('.rows .row')", "the list has the trajectory")
    began_s = time.monotonic()
    await tab.press(".rows .row")
    await tab.shows(
        "document.querySelector('.details').textContent.includes('of 10,000,000 characters')", "its length is named"
    )
    print(f"10 MB: {time.monotonic() - began_s:.2f} s")
    assert await tab.run("document.querySelector('.details').textContent.length") < 200_000


async def test_numbers_that_are_none_and_names_of_a_newer_version_do_not_disturb(fed: FedRun, tab: Tab, pages: Any):
    await fed.train(range(1, 5))
    trained = BatchTrained(
        5, 0, "rl", {"loss": float("nan"), "new/metric": 3.5, "big": float("inf")}, {0: 1}, 0, [0.5, 0.0], 1, 5
    )
    body = msgspec.msgpack.decode(pack(trained, BATCH_TRAINED))
    await fed.store_raw(BATCH_TRAINED, msgspec.msgpack.encode({**body, "from_the_future": {"a": [1]}}))
    status = json.loads(msgspec.json.encode(await fed.state()))
    status |= {
        "step": 9,
        "reward": None,
        "from_the_future": [HOSTILE],
        "state": "hibernating",
        "stalls": [{"cause": "new"}],
    }
    text = json.dumps(status).replace('"mean_lag_versions": ', '"mean_lag_versions": NaN, "was": ')
    await fed.store_raw(RUN_STATE, text.encode())
    await tab.open(pages("monitor"))
    await shows_step(tab, 9)
    assert await tab.run(value_of("state")) == "hibernating"
    assert await tab.run(value_of("mean_lag_versions")) is None
    await tab.shows(
        "[...document.querySelectorAll('option')].some((one) => one.value === 'new/metric')", "a new metric"
    )


async def test_a_trimmed_trajectory_is_named_so(fed: FedRun, tab: Tab, pages: Any):
    await fed.state()
    await fed.trajectory("p000001-0")
    await fed.owner.api(f"STREAM.PURGE.{TRAJECTORIES.full_name(RUN)}")
    await tab.open(pages("monitor"))
    await tab.press("nav [data-view=trajectories]")
    await tab.shows("!!document.querySelector('.rows .row')", "the list has the trajectory")
    await tab.press(".rows .row")
    await tab.shows("document.querySelector('.missing')?.textContent.includes('trimmed')", "its tokens were trimmed")


async def test_a_report_shows_the_same_numbers_without_a_server(fed: FedRun, tab: Tab, tmp_path: Path):
    status = await fed.state(stalls=[StallFound("no credit", HOSTILE, "seen", "do")])
    await fed.train(range(1, 50))
    await fed.moments(20)
    await fed.trajectory("p000001-0", completion=f"</script>{HOSTILE}")
    path = tmp_path / "report.html"
    await write_report(path, fed.owner, status, None, None)
    assert HOSTILE.encode() not in path.read_bytes()
    await fed.server.stop()

    await tab.open(path.as_uri())
    await shows_step(tab, 5)
    await tab.shows("document.querySelector('[data-chart=\"lag/mean\"] .value')?.dataset.value === '0.4'", "the chart")
    assert HOSTILE in await tab.run("document.querySelector('[data-cause]').textContent")
    await tab.press("nav [data-view=trajectories]")
    await tab.press(".rows .row")
    await tab.shows("document.querySelector('.details').textContent.includes('</script><img')", "its text is a text")
    await tab.press("nav [data-view=timeline]")
    await tab.shows("document.querySelector('canvas').width > 300", "the timeline is drawn")
    assert await tab.run("document.querySelectorAll('img, main script').length") == 0


async def test_the_page_fits_a_phone_and_is_used_by_keys(fed: FedRun, tab: Tab, pages: Any):
    await fed.state(stalls=[StallFound("no credit", "x" * 200, "y" * 200, "z" * 200)])
    await fed.train(range(1, 50))
    await fed.trajectory("p000001-0", 200)
    await fed.vitals(range(1, 30), 1000.0)
    for width, height, dark in ((390, 800, True), (1280, 860, False)):
        await tab.size(width, height, dark=dark)
        await tab.open(pages("monitor"))
        await shows_step(tab, 5)
        for key, view in enumerate(("overview", "timeline", "actors", "trajectories", "live", "compare"), 1):
            await tab.run(f"dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}'}}))")
            chosen = "document.querySelector('nav [aria-selected=true]').dataset.view"
            assert await tab.run(chosen) == view
            assert await tab.run("document.documentElement.scrollWidth <= innerWidth"), f"{view} at {width} px"
            await tab.shot(f"{view}-{width}")
        paper = await tab.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == dark
        await tab.run("dispatchEvent(new KeyboardEvent('keydown', {key: 't'}))")
        assert await tab.run("getComputedStyle(document.body).backgroundColor") != paper
        await tab.run("localStorage.clear()")


async def test_rows_are_chosen_by_the_arrow_keys_and_tokens_take_colours(fed: FedRun, tab: Tab, pages: Any):
    await fed.state()
    for number in range(3):
        await fed.trajectory(f"p00000{number}-0", 12, reward=number / 2)
    await tab.open(f"{pages('monitor')}&view=trajectories")
    await tab.shows("document.querySelectorAll('.rows .row').length === 3", "the list has the trajectories")
    box = "document.querySelector('.scroll')"
    for _ in range(2):
        await tab.run(f"{box}.dispatchEvent(new KeyboardEvent('keydown', {{key: 'ArrowDown'}}))")
    await tab.shows("document.querySelector('.details h2')?.textContent === 'p000001-0'", "the second one is chosen")
    await tab.shows("document.querySelectorAll('.tokens span').length === 12", "its tokens are there")
    kinds = {}
    for kind in ("version", "logprob", "mask"):
        await tab.run(f"""(() => {{ const select = document.querySelector('.details select');
            select.value = '{kind}'; select.dispatchEvent(new Event('change')); }})()""")
        kinds[kind] = await tab.run("[...document.querySelectorAll('.tokens span')].map((one) => one.className)")
    assert kinds["version"][:3] == kinds["logprob"][:3] == ["given"] * 3
    assert kinds["mask"] == ["c0"] * 3 + ["c7"] * 9
    assert kinds["logprob"][-1] == "c0"
    assert kinds["version"][-1] == "c7"
    await tab.run("""(() => { const search = document.querySelector('input[type=search]');
        search.value = 'reward>0.4 p00'; search.dispatchEvent(new Event('input')); })()""")
    assert await tab.run("document.querySelectorAll('.rows .row').length") == 2


async def test_runs_are_compared_by_their_files(fed: FedRun, tab: Tab, pages: Any, tmp_path: Path):
    status = await fed.state()
    await fed.train(range(1, 20))
    await write_report(tmp_path / "other.html", fed.owner, status, None, None)
    rows = [{"event": "step", "stage": "rl", "step": step, "reward_mean": step / 10} for step in range(1, 6)]
    (tmp_path / "third.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "broken.jsonl").write_text(HOSTILE)
    await tab.open(f"{pages('monitor')}&view=compare")
    await tab.call("DOM.enable")
    root = await tab.call("DOM.getDocument")
    node = await tab.call("DOM.querySelector", nodeId=root["root"]["nodeId"], selector="input[type=file]")
    files = [str(tmp_path / name) for name in ("other.html", "third.jsonl", "broken.jsonl")]
    await tab.call("DOM.setFileInputFiles", files=files, nodeId=node["nodeId"])
    await tab.shows("document.querySelectorAll('.compare .numbers tbody tr').length === 3", "three runs are compared")
    shown = await tab.run("[...document.querySelectorAll('.compare .numbers tbody tr')].map((row) => row.textContent)")
    assert shown[2].startswith("third50.5")
    await tab.shows(
        "document.querySelector('.compare [role=status]').textContent.includes('broken.jsonl')", "the fault"
    )


async def test_live_traffic_is_shown_to_a_monitor_without_texts(fed: FedRun, tab: Tab, pages: Any):
    await fed.state()
    tokens = np.arange(5, dtype=np.int32)
    started = TurnStarted(turn_id="t1", session="s1", tenant="anna", api="chat", tokens=tokens)
    logprobs, versions = np.zeros(5, np.float32), np.full(5, 4, np.int32)
    finished = TurnFinished(
        turn_id="t1", session="s1", finish="stop", tokens=tokens, logprobs=logprobs, versions=versions
    )
    judged = TurnJudged(turn_id="t1", reward=0.5, judge="length-1")
    feedback = FeedbackGiven(feedback_id="f1", turn_id="t1", tenant="anna", score=-1.0)
    for message in (started, finished, judged, feedback):
        await publish(fed.owner, message)
    await tab.open(f"{pages('monitor')}&view=live")
    cells = "[...document.querySelectorAll('.rows .row span')].map((one) => one.textContent)"
    await tab.shows(f"{cells}.length === 12 && {cells}[10] === '-1'", "the turn is there, with its feedback")
    found = await tab.run(cells)
    assert found[1:7] == ["t1", "s1", "anna", "5", "5", "4"]
    assert found[8:11] == ["stop", "0.5", "-1"]
    await tab.open(f"{pages('observer')}&view=live")
    await tab.shows("document.body.dataset.messages >= 1", "a state is there")
    assert "no live traffic" in await tab.run("document.querySelector('main').textContent")
