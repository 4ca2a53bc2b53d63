from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from asyncrl.child_pool.frames import CallFailed
from asyncrl.data.sources import open_source
from asyncrl.errors import FunctionError
from asyncrl.rewards.graders import Grader, GraderError, GradeResult, open_grader
from asyncrl.rewards.kinds import BUILT_IN, Reward
from asyncrl.rewards.score import GradeRequest
from harness.child_graders import asked, failing


@asynccontextmanager
async def opened(base: Path, spec: str, *, time_limit_s: float = 30.0) -> AsyncIterator[Grader]:
    grader = await open_grader(spec, base=base, time_limit_s=time_limit_s)
    try:
        yield grader
    finally:
        await grader.close()


async def test_an_unknown_reward_is_refused_with_those_there_are(tmp_path):
    with pytest.raises(
        GraderError,
        match="unknown reward 'exakt'; known are exact, math, dapo, last_number, deepscaler, f1, gpqa, boxed_math, ",
    ):
        await open_grader("exakt", base=tmp_path)


async def test_a_reward_of_a_new_row_is_opened_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def made(by):\n    return lambda completion: len(completion) / by\n")
    monkeypatch.setitem(BUILT_IN, "length", Reward(f"{tmp_path}/mine.py:made", {"by": 2}, reads_label=False))

    async with opened(tmp_path, "length") as grader:
        assert await grader.grade(asked("abc", None)) == GradeResult(1.5)


async def test_an_unknown_reasoning_gym_dataset_stops_the_start(tmp_path):
    with pytest.raises(FunctionError, match="close: leg_counting"):
        await open_grader("reasoning-gym:leg_count", base=tmp_path)


# Rewards of the library


@pytest.mark.parametrize(
    ("completion", "label", "reward"), [(" cba\n", "cba", 1.0), ("cb", "cba", 0.0), ("42", 42, 1.0), ("", None, 0.0)]
)
async def test_exact_compares_stripped_texts(tmp_path, completion, label, reward):
    grader = await open_grader("exact", base=tmp_path)

    assert await grader.grade(asked(completion, label)) == GradeResult(reward)


async def test_math_compares_values_and_not_texts(tmp_path):
    async with opened(tmp_path, "math") as grader:
        for completion, label, reward in [
            ("So the answer is $\\frac{1}{2}$.", "0.5", 1.0),
            ("Thus \\boxed{x^2 + 2x + 1}", "(x+1)^2", 1.0),
            ("it is 1,234", 1234, 1.0),
            ("The answer is \\boxed{7}", "$8$", 0.0),
            ("I do not know", "3", 0.0),
            ("$\\{1, 2\\}$", "\\{2, 1\\}", 1.0),
        ]:
            assert (await grader.grade(asked(completion, label))).reward == reward, completion

        assert "is no mathematical answer" in (await failing(grader, asked("3", ""))).detail


async def test_a_reasoning_gym_answer_scores_as_its_dataset_scores_it(tmp_path):
    async with opened(tmp_path, "reasoning-gym") as grader:
        for name in ("leg_counting", "knights_knaves", "decimal_arithmetic", "arc_agi"):
            options = {"max_num_decimal_places": 5} if name == "decimal_arithmetic" else {}
            row = open_source(f"reasoning-gym:{name}", options=options, seed=3, base=tmp_path).row(2)
            request = GradeRequest("", row.prompt, row.label, row.metadata)
            for request.completion in (f"Well, <answer> {row.label} </answer>", f"\n{row.label}\n"):
                assert (await grader.grade(request)).reward == 1.0
            request.completion = f"{row.label} <answer>nonsense</answer>"
            assert (await grader.grade(request)).reward < 0.5


async def test_a_named_reasoning_gym_dataset_scores_rows_of_any_source(tmp_path):
    async with opened(tmp_path, "reasoning-gym:leg_counting") as grader:
        assert await grader.grade(asked("12", "12")) == GradeResult(1.0)


async def test_reasoning_gym_needs_a_row_that_names_its_dataset(tmp_path):
    async with opened(tmp_path, "reasoning-gym") as grader:
        assert "has no 'source_dataset'" in (await failing(grader, asked())).detail


# Over HTTP


@asynccontextmanager
async def judged_by(
    tmp_path: Path, handler: Callable[[web.Request], Awaitable[web.StreamResponse]], time_limit_s: float = 5.0
) -> AsyncIterator[Grader]:
    app = web.Application()
    app.router.add_post("/judge", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server and site._server.sockets
    port = site._server.sockets[0].getsockname()[1]
    async with opened(tmp_path, f"http://127.0.0.1:{port}/judge", time_limit_s=time_limit_s) as grader:
        yield grader
    await runner.cleanup()


async def test_a_server_gets_the_request_and_answers_a_number(tmp_path):
    seen = []

    async def judge(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(0.5)

    async with judged_by(tmp_path, judge) as grader:
        result = await grader.grade(asked("hello", ["a", 1], metadata={"x": None}))

    assert result == GradeResult(0.5)
    assert seen == [{"prompt": "p", "completion": "hello", "label": ["a", 1], "metadata": {"x": None}}]


async def test_a_server_may_answer_metrics(tmp_path):
    async def judge(request: web.Request) -> web.Response:
        return web.json_response({"reward": True, "length": 3})

    async with judged_by(tmp_path, judge) as grader:
        assert await grader.grade(asked()) == GradeResult(1.0, {"length": 3.0})


async def test_a_busy_server_is_asked_again(tmp_path):
    answers = [web.Response(status=503), web.Response(status=429), web.json_response(1)]

    async def judge(request: web.Request) -> web.Response:
        return answers.pop(0)

    async with judged_by(tmp_path, judge) as grader:
        assert (await grader.grade(asked())).reward == 1.0
    assert not answers


async def test_a_dropped_connection_is_tried_again(tmp_path):
    tries = []

    async def judge(request: web.Request) -> web.Response:
        tries.append(1)
        if len(tries) == 1 and request.transport:
            request.transport.abort()
        return web.json_response(1)

    async with judged_by(tmp_path, judge) as grader:
        assert (await grader.grade(asked())).reward == 1.0
    assert len(tries) == 2


async def test_a_refusal_is_not_tried_again(tmp_path):
    tries = []

    async def judge(request: web.Request) -> web.Response:
        tries.append(1)
        return web.Response(status=422, text="no label")

    async with judged_by(tmp_path, judge) as grader:
        failed = await failing(grader, asked())

    assert failed.reason == "http"
    assert failed.detail.endswith("/judge answered status 422: no label")
    assert len(tries) == 1


async def test_labels_do_not_follow_a_redirection(tmp_path):
    asked_for = []

    async def judge(request: web.Request) -> web.Response:
        asked_for.append(request.query_string)
        return web.Response(status=307, headers={"Location": "/judge?elsewhere"})

    async with judged_by(tmp_path, judge) as grader:
        failed = await failing(grader, asked())

    assert failed.reason == "http"
    assert "answered status 307 and names /judge?elsewhere" in failed.detail
    assert asked_for == [""]


async def test_an_answer_without_end_fails_the_call(tmp_path):
    async def judge(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:  # until nobody reads it any more
            await response.write(b"1" * 65536)

    async with judged_by(tmp_path, judge) as grader:
        failed = await failing(grader, asked())

    assert failed.reason == "value"
    assert "answered more than 1048576 bytes: 1111" in failed.detail


@pytest.mark.parametrize("body", ["NaN", "oops", "null", '"1"', '{"score": 1}', '{"reward": 1, "note": "x"}'])
async def test_an_answer_that_is_no_number_fails_the_call(tmp_path, body):
    async def judge(request: web.Request) -> web.Response:
        return web.Response(text=body)

    async with judged_by(tmp_path, judge) as grader:
        assert (await failing(grader, asked())).reason == "value"


async def test_a_silent_server_fails_the_call_at_its_limit(tmp_path):
    async def judge(request: web.Request) -> web.Response:
        if (await request.json())["completion"] == "hang":
            await asyncio.Event().wait()
        return web.json_response(1)

    async with judged_by(tmp_path, judge, time_limit_s=1.0) as grader:
        calls = (grader.grade(asked(text)) for text in ("fine", "hang", "fine"))
        first, failed, last = await asyncio.gather(*calls, return_exceptions=True)

    assert first == last == GradeResult(1.0)
    assert isinstance(failed, CallFailed)
    assert failed.reason == "time_limit"


async def test_a_server_that_is_not_there_fails_the_call_at_its_limit_with_the_reason(tmp_path):
    async with opened(tmp_path, "http://127.0.0.1:1/", time_limit_s=1.0) as grader:
        failed = await failing(grader, asked())

    assert failed.reason == "time_limit"
    assert "no reward from http://127.0.0.1:1/ within 1 s; last: Cannot connect" in failed.detail
