"""`asyncrl scale engine=1` while the engine that leaves is in the middle of answers: these go on where they were."""

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.bus.connection import Bus
from harness.audited import assert_consistent, messages_on
from harness.models import make_endless_model
from harness.runs import LIMIT_S, UNTRAINED, Run, address_of, command, up
from harness.stage import until
from topics.engines import ENGINE_READY
from topics.topic import ENGINES

pytestmark = pytest.mark.slow

HELD = '''
"""One answer, begun once the file `closed` is gone, and given back once `held` is."""
import asyncio
from pathlib import Path

CLOSED, HELD = (Path(__file__).with_name(name) for name in ("closed", "held"))


async def rollout(row, context):
    while CLOSED.exists():
        await asyncio.sleep(0.02)
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))
    while HELD.exists():
        await asyncio.sleep(0.02)
'''
PROMPT = len("^abcd=")  # tokens, of every prompt


async def load_of(http: aiohttp.ClientSession, address: str) -> dict[str, Any]:
    async with http.get(f"{address}/v1/loads") as response:
        load: dict[str, Any] = (await response.json())["loads"][0]
        return load


async def totals_of(http: aiohttp.ClientSession, address: str) -> dict[str, float]:
    async with http.get(f"{address}/metrics") as response:
        lines = [line.rpartition(" ") for line in (await response.text()).splitlines() if line.startswith("sglang:")]
    return {name.partition("{")[0].removeprefix("sglang:"): float(value) for name, _, value in lines}


async def test_answers_of_an_engine_that_leaves_go_on_at_the_other_with_all_their_tokens(tmp_path: Path):
    (tmp_path / "rollouts.py").write_text(HELD)
    for name in ("closed", "held"):
        (tmp_path / name).touch()
    # Answers of a thousand tokens: it is met in their middle. Nothing is trained, and no version follows, before it is
    # read what the engine that stays was sent.
    make_endless_model(tmp_path / "model", spread=30)
    settings = [*UNTRAINED, f"model.path={tmp_path / 'model'}", "rollout.max_new_tokens=1000"]
    settings += ["task.rollout=rollouts.py:rollout", "eval.prompts=0"]
    async with up(tmp_path, *settings, "engine.count=2", "learner.steps=1") as run, aiohttp.ClientSession() as http:
        await run.reaches(lambda: run.actor("rollout-1"), "the first rollout worker")
        http.headers["Authorization"] = f"Bearer {(run.root / 'engine.key').read_text()}"
        addresses = await two_engines(run)
        (tmp_path / "closed").unlink()
        async with asyncio.timeout(LIMIT_S):
            held = await paused_in_the_middle(http, addresses["engine-2"])
        code, output = await command(tmp_path, "scale", "engine=1")
        assert (code, output) == (0, "scaled: engine 1\n")
        async with asyncio.timeout(LIMIT_S):
            while (sent := await tokens_sent(http, addresses["engine-1"])) < held:
                pass  # those of the other come as its end is noticed
        assert sent == held, "each token that the other had sampled, and each once"
        (tmp_path / "held").unlink()
        assert await run.ended() == 0, run.story

    assert_consistent(run, steps=1, warmup_steps=0)
    assert run.summary["trajectories_failed"] == 0
    assert "it is gone: " not in run.out, "an engine that leaves as it was asked, also at the end, is no finding"
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert (code, ": clean\n" in output) == (0, True), output


async def two_engines(run: Run) -> dict[str, str]:
    """Addresses of both engines, once they are ready."""
    addresses: dict[str, str] = {}
    bus = await Bus.connect(address_of(run), "short")

    async def both_are_ready() -> bool:
        ready = (await messages_on(bus, ENGINES)).on(ENGINE_READY)
        addresses.update({one.engine_id: one.address for one in ready})
        return len(addresses) == 2

    await until(both_are_ready, "both engines are ready", LIMIT_S)
    await bus.close()
    return addresses


async def paused_in_the_middle(http: aiohttp.ClientSession, address: str) -> int:
    """Pause an engine that samples; returns the tokens that it holds of answers under way."""
    while True:
        load = await load_of(http, address)
        if load["num_used_tokens"] > PROMPT * load["num_running_reqs"]:
            await http.post(f"{address}/pause_generation", json={"mode": "in_place"})
            while load["num_used_tokens"] != (load := await load_of(http, address))["num_used_tokens"]:
                pass  # the step that was under way
            held: int = load["num_used_tokens"] - PROMPT * load["num_running_reqs"]
            if held:
                return held
            await http.post(f"{address}/continue_generation", json={})


async def tokens_sent(http: aiohttp.ClientSession, address: str) -> int:
    """Tokens behind the prompts of all requests that an engine has had, once it has none."""
    while True:
        async with http.get(f"{address}/v1/loads?wait_idle=60") as response:
            load = (await response.json())["loads"][0]
        if not load["num_running_reqs"] + load["num_waiting_reqs"]:
            totals = await totals_of(http, address)
            return int(totals["prompt_tokens_total"] - PROMPT * totals["num_requests_total"])
