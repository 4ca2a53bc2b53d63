"""The simulated users of the live demo, against a gateway of the test's own."""

import asyncio
import json
from pathlib import Path

import pytest
from aiohttp import web

from asyncrl.examples.live_users import (
    GOAL,
    WINDOW,
    Conversations,
    Story,
    Users,
    judge,
    retry_after_s,
    write_report,
)
from harness.runs import command
from harness.stage import until


class Polite:
    """Answers each request in capitals, and counts what users say."""

    def __init__(self) -> None:
        self.said: list[list[str]] = []
        self.thumbs: list[str] = []
        self.fails = False
        self.refusals = 0  # before the next answer

    async def chat(self, http: web.Request) -> web.Response:
        if self.fails:
            return web.Response(status=400, text="no such model")
        if self.refusals:
            self.refusals -= 1
            return web.Response(status=503, text="busy", headers={"Retry-After": "0.01"})
        messages = (await http.json())["messages"]
        self.said.append([message["content"] for message in messages if message["role"] == "user"])
        word = messages[-1]["content"].split()[-1].upper()
        return web.json_response({"id": "chatcmpl-1", "choices": [{"message": {"content": word}}]})

    async def feedback(self, http: web.Request) -> web.Response:
        self.thumbs.append((await http.json())["thumb"])
        return web.json_response({})


async def test_users_of_two_tastes_ask_react_and_count_what_fails():
    gateway = Polite()
    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", gateway.chat), web.post("/v1/feedback", gateway.feedback)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    options = {"users": 4, "tastes": 2, "think_s": 0.01}
    users = Users(f"http://127.0.0.1:{runner.addresses[0][1]}", "sk-1", options, 1)
    talking = asyncio.create_task(users.talk())
    try:
        await until(lambda: len(set(gateway.thumbs)) == 2 and len(gateway.thumbs) >= 8, "sessions of both tastes end")
        assert users.story.refused == 0
        gateway.refusals = 3
        await until(lambda: users.story.refused == 3, "the refusals are met")
        said = len(gateway.said)
        await until(lambda: len(gateway.said) > said + 4, "all users go on")
        assert users.story.failures == []
        gateway.fails = True
        await until(lambda: bool(users.story.failures), "a request fails")
    finally:
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        await runner.cleanup()

    story = users.story
    assert 0.2 < sum(story.pleased) / len(story.pleased) < 0.8
    assert "answered status 400: no such model" in story.failures[0]
    seconds = [said[1] for said in gateway.said if len(said) == 2]
    assert all(text.startswith("good say" if " say " in text else "wrong - tell") for text in seconds)


@pytest.mark.parametrize(
    ("header", "seconds"), [("2", 2.0), ("0.5", 0.5), ("0", None), ("61", None), ("-1", None), ("nan", None)]
)
def test_a_retry_after_is_obeyed_within_a_minute(header: str, seconds: float | None):
    assert retry_after_s(header) == seconds


def test_a_story_tells_when_its_users_were_satisfied(tmp_path: Path):
    assert "requests" not in Story().rows()  # the summary has such a row of the gateway
    story = Story(seconds=[float(number) for number in range(400)], pleased=[number % 2 == 0 for number in range(200)])
    story.pleased += [True] * 200

    assert story.satisfaction(WINDOW) == 0.5
    reached = story.reached()
    assert story.satisfaction(reached) >= GOAL > story.satisfaction(reached - 1)

    write_report(story, tmp_path)
    rows = json.loads((tmp_path / "reports" / "users.json").read_text())
    assert rows["satisfaction"].startswith("0.500 before → 1.000 after")
    assert rows[f"satisfied {GOAL}"] == f"after {reached} turns and {reached - 1} s"
    assert (tmp_path / "satisfaction.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("evidence", "vote"),
    [
        ("good say abc>", (1, "")),
        ("wrong + say abc>", (-1, "+")),
        ("wrong - tell abc>", (-1, "-")),
        ("wrong", (-1, "")),
        ("say good>", (0, "")),
        ("", (0, "")),
    ],
)
def test_the_judge_reads_what_a_user_wanted(evidence: str, vote: tuple[int, str]):
    assert tuple(judge(evidence).values()) == vote


def test_a_hint_in_the_warm_up_is_obeyed():
    rows = [Conversations(1).row(number)["prompt"] for number in range(50)]

    pairs = [(row[place]["content"].split(), row[place + 1]["content"]) for row in rows for place in range(0, 8, 2)]
    hinted = [(words, reply) for words, reply in pairs if words[-1] in ("+", "-")]
    assert 60 < len(hinted) < 140
    assert all(reply == (words[-2].upper() if words[-1] == "+" else words[-2]) for words, reply in hinted)


def test_the_warm_up_has_capitals_and_small_letters_half_and_half():
    rows = [Conversations(1).row(number) for number in range(200)]

    replies = [message["content"] for row in rows for message in row["prompt"] if message["role"] == "assistant"]
    assert sum(map(str.isupper, replies)) / len(replies) == pytest.approx(0.5, abs=0.06)
    assert rows[7] == Conversations(1).row(7) != Conversations(2).row(7)


@pytest.mark.parametrize("tastes", [1, 2])
async def test_the_shipped_config_passes_every_check(tmp_path: Path, tastes: int):
    code, output = await command(tmp_path, "check", "live-demo", "--set", f"task.options.tastes={tastes}")
    assert code == 0, output
    assert output.startswith("ok")
