import asyncio
import os
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest

from asyncrl.engine.client import EngineClient, EngineUnavailable, SamplingParams
from benchmarks.engine import save_random_model, served

LONG = SamplingParams(100)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    save_random_model(directory, vocab=64, hidden=32, layers=2)
    return directory


async def test_an_engine_that_dies_fails_every_call_in_flight(model):
    async with served(model) as address:
        client = EngineClient(address)
        begun = asyncio.Event()
        async with aiohttp.ClientSession(address) as session, session.get("/server_info") as response:
            pid = (await response.json())["pid"]
        asks = [
            asyncio.create_task(client.generate([1, i % 64], LONG, on_tokens=lambda _: begun.set(), stream_interval=1))
            for i in range(200)
        ]
        await begun.wait()
        os.kill(pid, signal.SIGKILL)
        answers = await asyncio.gather(*asks, return_exceptions=True)
        await client.close()

    assert {type(answer) for answer in answers[-50:]} == {EngineUnavailable}


def command(*options):
    return [sys.executable, "-m", "asyncrl.engine.embedded", *map(str, options)]


def test_a_taken_port_is_one_clear_line_and_exit_code_1(model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            command("--model-path", model, "--port", port), capture_output=True, text=True, check=False
        )

    assert done.returncode == 1
    assert done.stderr == f"engine: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_model_that_is_not_there_is_one_clear_line_and_exit_code_1(tmp_path):
    done = subprocess.run(command("--model-path", tmp_path, "--port", 0), capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "cannot read config.json" in done.stderr


def test_sigterm_stops_the_server_cleanly(model, tmp_path):
    arguments = command("--model-path", model, "--port", 0, "--port-file", tmp_path / "address")
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as process:
        assert "serving" in process.stderr.readline()
        assert (tmp_path / "address").read_text().startswith("http://127.0.0.1:")
        process.terminate()

        assert process.wait(timeout=120) == 0
        assert process.stderr.read() == ""
