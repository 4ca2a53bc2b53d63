"""Arguments of the servers that a run starts, and findings of the doctor and of `check` about engines."""

import asyncio
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.config.engine_settings import EngineSettings
from asyncrl.config.hints import hints
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.embedded.__main__ import parse
from asyncrl.engine.embedded.control import EmbeddedControl
from asyncrl.engine.errors import RequestFailed
from asyncrl.engine.sglang.control import SGLangControl
from benchmarks.engine import save_random_model
from harness.configs import from_settings, the_problem
from harness.models import made_model
from harness.stage import until
from harness.states import NOW_S, MadeState
from topics.engines import EngineReady, EngineUpdating


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    save_random_model(directory, vocab=64, hidden=32, layers=2)
    return directory


def mode(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


async def test_an_update_waits_for_a_moment_without_a_request_of_a_client_and_for_no_rollout(
    model: Path, tmp_path: Path
):
    async def has(count: int) -> bool:
        return (await server.load()).requests == count

    home = ServerSpec("engine-1", EngineSettings(), model, tmp_path / "log", None, gap_s=3000.0)
    server = EmbeddedControl(home)
    try:
        await server.start()
        await server.pause("in_place")
        rollout = asyncio.create_task(server.generate([1], SamplingParams(40)))
        await until(lambda: has(1), "it is there")
        await server.wait_gap()
        assert not rollout.done()

        live = asyncio.create_task(server.generate([2], SamplingParams(40, priority=100)))
        await until(lambda: has(2), "both are there")
        server._home, began = home._replace(gap_s=0.05), time.monotonic()
        await server.wait_gap()
        assert time.monotonic() - began >= 0.05 and not live.done()

        server._home = home
        gap = asyncio.create_task(server.wait_gap())
        await server.resume()
        await asyncio.gather(rollout, live, gap)
    finally:
        await server.close()


async def test_two_servers_started_here_have_a_key_and_draw_by_seeds_of_their_own(model: Path, tmp_path: Path):
    key_file = tmp_path / "engine.key"
    key_file.write_text("a secret\n")
    logs = [tmp_path / f"engine-{n}.server.log" for n in (1, 2)]
    servers = [EmbeddedControl(ServerSpec("engine-1", EngineSettings(), model, log, key_file)) for log in logs]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        addresses = [server.address for server in servers]
        clients = [EngineClient(address, api_key="a secret") for address in addresses]
        asked = [[client.generate([1, 2, 3], SamplingParams(40)) for _ in range(3)] for client in clients]
        first, second = [[(await answer).token_ids.tolist() for answer in answers] for answers in asked]
        stranger = EngineClient(addresses[0])
        with pytest.raises(RequestFailed, match="HTTP 401"):
            await stranger.update_weights(model, "none", False)
        for client in (*clients, stranger):
            await client.close()
        lines = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children()]
    finally:
        for server in servers:
            await server.close()

    assert not [answer for answer in first if answer in second]
    assert len([line for line in lines if b"engine.embedded" in line and str(key_file).encode() in line]) == 2
    assert not [line for line in lines if b"a secret" in line]
    assert mode(tmp_path / "engine-1.server.log") == 0o600


def children() -> list[str]:
    """Processes that this one has started."""
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


def test_sglang_reads_its_key_from_a_private_file(tmp_path: Path):
    key_file = tmp_path / "engine.key"
    key_file.write_text("a secret")
    home = ServerSpec("engine-1", EngineSettings(kind="sglang"), tmp_path, tmp_path / "engine-1.server.log", key_file)

    arguments = SGLangControl(home).arguments()

    options = Path(arguments[arguments.index("--config") + 1])
    assert options.suffix == ".yaml"  # SGLang takes no other
    assert (mode(options), options.read_text()) == (0o600, f"api-key: {json.dumps('a secret')}\n")
    assert "a secret" not in " ".join(arguments)


def test_sglang_starts_in_the_form_that_versions_have(tmp_path: Path):
    home = ServerSpec("engine-1", EngineSettings(kind="sglang"), made_model(tmp_path / "m"), tmp_path / "log", None)

    *_, key, form, load, how = SGLangControl(home._replace(form="fp8-blocks")).arguments()

    assert (key, load, how) == ("--json-model-override-args", "--load-format", "dummy")
    quantised = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert json.loads(form) == {"quantization_config": {**quantised, "modules_to_not_convert": ["lm_head"]}}
    for same in ("model", "plain"):
        assert "--load-format" not in SGLangControl(home._replace(form=same)).arguments()


def test_a_seed_repeats_what_requests_without_one_draw():
    assert parse(["--model-path", "m"]).seed is None
    assert parse(["--model-path", "m", "--seed", "7"]).seed == 7


@pytest.mark.parametrize("option", ["--api-key", "--config", "--api-key=mine"])
def test_check_refuses_options_that_the_run_itself_gives_a_server(option: str):
    problem = the_problem("demo", f'engine.arguments=["{option}", "x"]')

    assert f"holds {option.split('=')[0]}, which a server started here is given by the run" in str(problem)


def test_check_refuses_a_key_for_the_router():
    problem = the_problem("demo", 'engine.router.arguments=["--api-key=mine"]')

    assert "holds --api-key, which the run itself gives a router; remove it" in str(problem)


@pytest.mark.parametrize("setting", ["rollout.top_p=0.9", "rollout.top_k=20", "rollout.min_p=0.05"])
def test_check_hints_where_log_probs_are_not_of_what_was_sampled_from(setting: str):
    [hint] = hints(from_settings(setting).config)

    assert hint.startswith(f"{setting.replace('=', ' = ')}: tokens are sampled from a part of the distribution")
    assert not hints(from_settings().config)


def test_a_server_with_weights_of_somebody_else_is_a_finding_while_training_goes_on():
    case = MadeState(last_step_s=NOW_S - 1)
    case.publish(EngineUpdating("engine-1", 0, 5, found="default"), at_s=NOW_S - 9)
    case.publish(EngineReady("engine-1", "http://e", 0, 5, "d", 8), at_s=NOW_S - 8)
    assert case.found() == [("mislabelled", "engine-1")]
    assert case.evidence().startswith("9 s ago the server at http://e had weights called 'default', which this run did")

    case.state.now_ns += int(60e9)
    assert ("mislabelled", "engine-1") not in case.found()


def test_answers_labelled_otherwise_than_the_server_announces_are_a_finding():
    case = MadeState(last_step_s=NOW_S - 1).vitals("rollout-1", mislabelled_at_s=NOW_S - 4, mislabelled_tokens=1234)

    assert case.found() == [("mislabelled", "rollout-1")]
    assert "1,234 tokens were thrown away" in case.evidence()


def test_a_server_without_its_key_file_does_not_start(model: Path, tmp_path: Path):
    command = [sys.executable, "-m", "asyncrl.engine.embedded", "--model-path", str(model), "--port", "0"]

    done = subprocess.run([*command, "--api-key-file", str(tmp_path / "none")], capture_output=True, check=False)

    assert done.returncode != 0


def test_a_server_beside_a_gateway_lets_its_requests_come_first(tmp_path: Path):
    home = ServerSpec("engine-1", EngineSettings(kind="sglang"), tmp_path, tmp_path / "log", None)

    assert "--enable-priority-scheduling" in SGLangControl(home._replace(priorities=True)).arguments()
    assert "--enable-priority-scheduling" not in SGLangControl(home).arguments()
    assert "--enable-priority-scheduling" not in EmbeddedControl(home._replace(priorities=True)).arguments()
