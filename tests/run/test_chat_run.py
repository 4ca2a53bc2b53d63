"""`asyncrl up chat`: a model of one's own behind a gateway, for stock SDKs, with nothing that trains."""

import asyncio
import json
import re
from pathlib import Path

import pytest

from asyncrl.config.load import load_config
from asyncrl.ports import free_port
from asyncrl.run.preflight import check_surroundings
from harness.configs import the_problem
from harness.live_runs import answers, conversing_model
from harness.runs import Run, command, resume, up
from harness.sdks import sdks
from harness.stage import until

FREE_PORT = "gateway.port=0"  # a run of another test may have the default one


@pytest.mark.real_start
@pytest.mark.slow
async def test_a_model_is_served_to_both_sdks_and_the_address_and_a_key_are_printed(tmp_path: Path):
    port, model = free_port(), conversing_model(tmp_path / "mine")
    address = f"http://127.0.0.1:{port}"
    async with up(tmp_path, f"model.path={model}", f"gateway.port={port}", config="chat") as run:
        await run.reaches((run.root / "keys" / "me").exists, "a key is made")
        key = (run.root / "keys" / "me").read_text()
        await until(lambda: answers(address), "the gateway listens", 180)
        user = [{"role": "user", "content": "abc"}]
        async with sdks(address, key) as (first, second):
            chat = await first.with_options(max_retries=5).chat.completions.create(
                model="any", messages=user, max_tokens=5
            )
            message = await second.messages.create(model="any", messages=user, max_tokens=5)
        assert 0 < chat.usage.completion_tokens <= 5 and 0 < message.usage.output_tokens <= 5
        actors = {name for name in run.processes().values() if "actors.main" in name}
        assert not any(f" {role}-1 " in name for name in actors for role in ("learner", "prompter", "rollout"))
        code, _ = await command(tmp_path, "down")
        assert (code, await asyncio.wait_for(run.ended(), 120)) == (0, 0), run.story
    assert f"{address}/v1" in run.out and key in run.out
    assert json.loads((run.root / "config.json").read_text())["only"] == ["engine", "gateway"]


@pytest.mark.slow
async def test_a_run_goes_on_with_another_number_of_gateways(tmp_path: Path):
    port = free_port()
    model = conversing_model(tmp_path / "mine")
    async with up(tmp_path, f"model.path={model}", f"gateway.port={port}", "gateway.count=2", config="chat") as run:
        await until(lambda: gateways(run) == {"gateway-1", "gateway-2"}, "both gateways run", 180)
        await command(tmp_path, "down")
        await asyncio.wait_for(run.ended(), 120)
    async with resume(tmp_path, "chat", "--set", "gateway.count=1") as run:
        await until(lambda: answers(f"http://127.0.0.1:{port}"), "a gateway listens", 180)
        assert gateways(run) == {"gateway-1"}
        await command(tmp_path, "down")
        await asyncio.wait_for(run.ended(), 120)


def gateways(run: Run) -> set[str]:
    return {word for name in run.processes().values() for word in name.split() if re.fullmatch(r"gateway-\d", word)}


def test_a_gateway_without_a_model_and_a_template_is_refused_before_the_start():
    assert "set model.path or model.create.template" in the_problem("chat", FREE_PORT, files=True).message


def test_limits_and_data_of_rollouts_are_no_matter_where_nothing_is_rolled_out(tmp_path: Path):
    model = f"model.path={conversing_model(tmp_path / 'mine')}"
    words = [model, FREE_PORT, "rollout.max_new_tokens=513", "task.source=nothing"]
    load_config("chat", overrides=words, further=check_surroundings)

    assert the_problem("chat", *words[:3], "only=[]", files=True).key == "--set rollout.max_new_tokens"


def test_a_gateway_whose_turns_shall_be_learnt_needs_a_learner(tmp_path: Path):
    model = f"model.path={conversing_model(tmp_path / 'mine')}"

    assert "set only=[]" in the_problem("chat", model, FREE_PORT, "live.fraction=1", files=True).message


def test_a_template_that_cannot_go_on_from_tokens_is_found_before_the_start(tmp_path: Path):
    model = conversing_model(tmp_path / "mine")
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")

    problem = the_problem("chat", f"model.path={model}", FREE_PORT, files=True)
    assert "expected an end-of-sequence token first" in problem.message
