"""Requests, answers and settings of vLLM, without a vLLM."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from asyncrl.config.engine_settings import Capability, EngineGroup, EngineSettings
from asyncrl.engine.answer import Member
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.control import ServerSpec, open_control
from asyncrl.engine.errors import EngineRefused, RequestFailed
from asyncrl.engine.starting import EngineFailed
from asyncrl.engine.vllm import api
from asyncrl.engine.vllm.answers import joined, read_event, request_body
from asyncrl.engine.vllm.control import VLLMControl
from asyncrl.engine.vllm.key_guard import KeyGuard
from asyncrl.engine.vllm.kind import KIND
from asyncrl.torch_gpus import last_line_of
from harness.configs import the_problem

MODELS = {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}}


def member(sampling: SamplingParams, **options: Any) -> Member:
    return Member([1, 2, 3], sampling.body(None), "key", None, **options)


def event(*tokens: tuple[int, float], **choice: Any) -> bytes:
    content = [{"token_id": token, "logprob": value, "rank": 1} for token, value in tokens]
    ids = [token for token, _ in tokens]
    return json.dumps({"choices": [{"token_ids": ids, "logprobs": {"content": content}, **choice}]}).encode()


async def test_a_request_has_the_names_of_vllm_and_the_salt_of_its_version():
    sampling = SamplingParams(9, temperature=0.5, min_new_tokens=2, seed=7, ignore_eos=True)

    body = request_body(member(sampling, priority=2, adapter="run/0:1:a"), streamed=True)

    assert body["sampling_params"] == {
        **{"max_tokens": 9, "temperature": 0.5, "min_tokens": 2, "ignore_eos": True},
        **{"seed": 10, "logprobs": 0, "detokenize": False},
    }
    assert (body["token_ids"], body["cache_salt"], body["model"], body["priority"]) == (
        [1, 2, 3],
        "key",
        "run/0:1:a",
        -2,
    )


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
async def test_a_request_for_a_part_of_the_distribution_is_refused(cut: dict[str, Any]):
    with pytest.raises(EngineRefused, match=next(iter(cut))):
        request_body(member(SamplingParams(9, **cut)), streamed=False)


async def test_a_log_prob_that_vllm_does_not_know_fails_the_request():
    whole = joined([read_event(event((5, -9999.0), finish_reason="length"))], 0, 0)
    waiting = member(SamplingParams(1))
    waiting.take(whole)

    with pytest.raises(RequestFailed):
        await waiting.future


def test_the_likeliest_tokens_are_without_a_sampled_one_of_a_lower_rank():
    ranked = [{"token_id": 9, "logprob": -5.0, "rank": 7}, {"token_id": 4, "logprob": -0.1, "rank": 1}]
    ranked += [{"token_id": 6, "logprob": -2.0, "rank": 2}]
    content = [{"token_id": 9, "logprob": -5.0, "rank": 7, "top_logprobs": ranked}]
    raw = msgspec.json.encode({"choices": [{"token_ids": [9], "logprobs": {"content": content}}]})

    answer = joined([read_event(raw)], 0, 2, "0:1:a")

    assert answer.meta_info.output_top_logprobs == [[(-0.1, 4, None), (-2.0, 6, None)]]


def test_likeliest_tokens_of_equal_rank_are_in_the_order_of_their_ids():
    ranked = [{"token_id": token, "logprob": -1.0, "rank": 2} for token in (8, 3)]
    content = [{"token_id": 8, "logprob": -1.0, "rank": 2, "top_logprobs": ranked}]
    choice = {"token_ids": [8], "logprobs": {"content": content}}
    raw = json.dumps({"choices": [choice]}).encode()

    answer = joined([read_event(raw)], 0, 2, "0:1:a")

    assert answer.meta_info.output_top_logprobs == [[(-1.0, 3, None), (-1.0, 8, None)]]


@pytest.mark.parametrize("raw", [event(finish_reason="error"), b'{"error": {"message": "no room", "code": 503}}'])
def test_a_fault_in_a_stream_is_raised(raw: bytes):
    with pytest.raises(Exception, match=r"fault|no room"):
        read_event(raw)


@pytest.fixture
async def server() -> AsyncIterator[tuple[TestServer, dict[str, str]]]:
    """A server that lists some calls, and answers nothing else."""
    paths = dict.fromkeys(api.ALWAYS, "")
    app = web.Application()

    async def listed(_: web.Request) -> web.Response:
        return web.json_response({"paths": paths})

    async def settings(_: web.Request) -> web.Response:
        return web.json_response(MODELS)

    app.router.add_get("/openapi.json", listed)
    app.router.add_get("/server_info", settings)
    server = TestServer(app)
    await server.start_server()
    yield server, paths
    await server.close()


async def test_each_missing_call_of_a_server_is_named_at_its_start(
    server: tuple[TestServer, dict[str, str]], tmp_path: Path
):
    found, paths = server
    settings = EngineSettings(kind="vllm", addresses=[str(found.make_url("")).rstrip("/")])
    control = open_control(ServerSpec("engine-1", settings, tmp_path, tmp_path / "log", None))
    await control.start()
    del paths["/pause"], paths[api.GENERATE]

    with pytest.raises(EngineFailed) as raised:
        await control.start()
    await control.close()

    assert "/pause (enabled by VLLM_SERVER_DEV_MODE=1)" in str(raised.value)
    assert "/inference/v1/generate (enabled by --enable-scale-out)" in str(raised.value)


def test_each_missing_call_of_an_installed_vllm_is_named_by_check(tmp_path: Path):
    (tmp_path / "vllm" / "entrypoints").mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").touch()
    known = [path for path in {**api.ALWAYS, **api.DIRECT} if path != "/resume"]
    (tmp_path / "vllm" / "entrypoints" / "routes.py").write_text("\n".join(f'route("{path}")' for path in known))
    group = EngineGroup(kind="vllm", environment={"PYTHONPATH": str(tmp_path)})

    [missing] = KIND.machine_checks("engine", group)
    [absent] = KIND.machine_checks("engine", EngineGroup(kind="vllm", environment={"PYTHONPATH": ""}))

    assert "/resume (enabled by" in missing.message and "/pause" not in missing.message
    assert "no package vllm" in absent.message
    assert last_line_of(api.program(["/pause"]), group.environment) == "found /pause"


def test_a_group_with_addresses_has_servers_of_another_owner():
    own, other = EngineGroup(kind="vllm", count=2), EngineGroup(kind="vllm", addresses=["http://a:1", "http://b:1"])

    assert own.can(Capability.PROCESSES) and not own.can(Capability.ADDRESSES)
    assert other.can(Capability.ADDRESSES) and not other.can(Capability.PROCESSES)
    assert (own.servers, other.servers, other.on_gpus) == (2, 2, False)


def test_a_server_has_its_key_in_a_private_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "key").write_text("a secret\n")
    home = ServerSpec("engine-1", EngineSettings(kind="vllm"), tmp_path, tmp_path / "log", tmp_path / "key")

    control = VLLMControl(home)

    assert "a secret" not in " ".join([*control.arguments(), *control.environment().values()])
    for name, value in control.environment().items():
        monkeypatch.setenv(name, value)
    assert KeyGuard(None)._wanted == b"Bearer a secret"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "found"), [(["--api-server-count", "2"], "abort"), (["--stream-interval=1"], "run itself sets")]
)
def test_arguments_that_break_the_contract_are_found(arguments: list[str], found: str):
    [finding] = KIND.checks({"engine": EngineGroup(kind="vllm", arguments=arguments)}, "resume")

    assert found in finding.message


@pytest.mark.parametrize(
    ("setting", "found"), [("rollout.top_p=0.9", "after these cuts"), ("engine.router.count=1", "a router needs")]
)
def test_settings_that_vllm_cannot_follow_are_found(setting: str, found: str):
    assert found in the_problem("demo", 'engine.kind="vllm"', setting).message
