"""Requests about a traced trajectory carry its trace context; others carry none."""

import re
from pathlib import Path

from aiohttp import web

from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.rewards.graders import GradeRequest, open_grader
from asyncrl.tracing import GRADE, SAMPLE, is_sampled, span_id, trace_id, traced, traceparent

FORM = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01")
ANSWER = {
    "output_ids": [5],
    "meta_info": {
        "finish_reason": {"type": "length"},
        "weight_version": "0-1",
        "output_token_logprobs": [[-0.5, 5, None]],
    },
}


def test_a_trace_context_has_the_form_of_its_standard():
    with traced("demo", "p000001-0", SAMPLE, 1.0):
        given = traceparent()
    trace = trace_id("demo", "p000001-0")

    assert FORM.fullmatch(given)
    assert given == f"00-{trace.hex()}-{span_id(trace, SAMPLE).hex()}-01"
    assert traceparent() == ""


def test_about_the_share_is_sampled():
    sampled = [is_sampled(trace_id("demo", f"p{number:06d}-0"), 0.1) for number in range(5000)]

    assert 400 < sum(sampled) < 600


async def test_engines_and_reward_servers_get_the_trace_context_of_traced_trajectories(tmp_path: Path):
    seen: list[str | None] = []

    async def answer(http: web.Request) -> web.Response:
        seen.append(http.headers.get("traceparent"))
        return web.json_response(ANSWER if http.path == "/generate" else 1.0)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    client, grader = EngineClient(address), await open_grader(f"{address}/reward", base=tmp_path)
    try:
        for share in (0.0, 1.0):
            with traced("demo", "p000001-0", SAMPLE, share):
                await client.generate([1, 2], SamplingParams(1))
            with traced("demo", "p000001-0", GRADE, share):
                await grader.grade(GradeRequest("abc", "?"))
    finally:
        await client.close()
        await grader.close()
        await runner.cleanup()

    trace = trace_id("demo", "p000001-0")
    expected = [f"00-{trace.hex()}-{span_id(trace, span).hex()}-01" for span in (SAMPLE, GRADE)]
    assert seen == [None, None, *expected]
