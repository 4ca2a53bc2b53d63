"""The contract of all kinds of servers of tools: their tools, results, faults and limits."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncrl.config.tool_settings import KINDS, McpSettings, PythonToolsSettings, ToolSettings
from asyncrl.errors import FunctionError
from asyncrl.ports import free_port
from asyncrl.tools.protocol import ToolsUnavailable
from asyncrl.tools.server import ToolServer
from harness.stage import until

SERVER = Path(__file__).parents[1] / "harness" / "mcp_server.py"
FUNCTIONS = '''
import asyncio, time
from typing import Annotated, Literal
from msgspec import Meta

def add(a: int, b: int = 2) -> int:
    """Add two numbers."""
    open(__file__ + ".calls", "a").write(f"{a}+{b}\\n")
    return a + b

async def hang() -> str:
    await asyncio.sleep(600)

def long() -> str:
    return "a" * 100_000

def fails(unit: Literal["m", "s"]) -> str:
    raise ValueError("no " + unit)

def bare(a): ...
def odd(a: complex): ...
'''


@contextmanager
def served(folder: Path, port: int) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen([sys.executable, str(SERVER), str(folder), str(port)], stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def answers(port: int) -> bool:
    try:
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/"):
            return True
    except aiohttp.ClientError:
        return False


def settings_of(way: str, folder: Path, port: int = 0, **options: Any) -> ToolSettings:
    if way == "python":
        (folder / "tools.py").write_text(FUNCTIONS)
        functions = [f"tools.py:{name}" for name in ("add", "hang", "long", "fails")]
        return PythonToolsSettings(functions=functions, **options)
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    if way == "http":
        return McpSettings(url=f"http://127.0.0.1:{port}/mcp", **options)
    return McpSettings(command=[sys.executable, str(SERVER), str(folder)], **options)


class Servers:
    """Opens servers of tools, and ends them."""

    def __init__(self, way: str, folder: Path) -> None:
        self.way, self.folder = way, folder
        self._opened: list[ToolServer] = []
        self.port = 0

    def open(self, **options: Any) -> ToolServer:
        server = ToolServer("it", settings_of(self.way, self.folder, self.port, **options), self.folder)
        self._opened.append(server)
        return server

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._opened))


@pytest.fixture(params=["python", "stdio", "http"])
async def servers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Servers]:
    found = Servers(request.param, tmp_path)
    if found.way != "http":
        yield found
        await found.close()
        return
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    found.port = free_port()
    with served(tmp_path, found.port):
        await until(lambda: answers(found.port), "the server answers")
        yield found
        await found.close()


def test_each_kind_has_a_module():
    assert {*KINDS} == {"mcp", "python"}


async def test_tools_have_names_descriptions_and_types_and_calls_give_text(servers):
    server = servers.open()

    tools = {tool.name: tool for tool in await server.tools()}
    result = await server.call("add", {"a": 40, "b": 2})

    assert tools["add"].description == "Add two numbers."
    assert tools["add"].parameters["properties"]["a"]["type"] == "integer"
    assert (result.text, result.failed) == ("42", False)


async def test_wrong_arguments_are_a_result_that_the_policy_reads(servers):
    result = await servers.open().call("add", {"a": "x"})

    assert result.failed
    assert "add" in result.text


async def test_a_call_that_hangs_ends_at_its_limit_and_the_next_one_works(servers):
    server = servers.open(time_limit_s=1.0)
    await server.tools()

    hung, added = await asyncio.gather(server.call("hang", {}), server.call("add", {"a": 1, "b": 2}))

    assert (hung.failed, hung.text) == (True, "hang gave no result within 1 s")
    assert added.text == "3"
    assert (await server.call("add", {"a": 2, "b": 2})).text == "4"


async def test_a_long_result_loses_its_middle(servers):
    result = await servers.open(result_characters=100).call("long", {})

    assert result.text == "a" * 50 + "\n[99900 characters left out]\n" + "a" * 50


async def test_only_named_tools_are_offered_and_an_unknown_name_is_an_error(servers):
    assert [tool.name for tool in await servers.open(only=["add"]).tools()] == ["add"]
    with pytest.raises(FunctionError, match=r"tools.it.only names sub; the server has add, "):
        await servers.open(only=["sub"]).tools()


async def test_equal_calls_of_a_pure_tool_reach_its_server_once(servers):
    server = servers.open(pure=["add"])

    results = [await server.call("add", arguments) for arguments in ({"a": 1, "b": 2}, {"b": 2, "a": 1})]

    assert [result.text for result in results] == ["3", "3"]
    [log] = [path for path in servers.folder.iterdir() if path.name.endswith("calls")]
    assert len(log.read_text().splitlines()) == 1


@pytest.mark.parametrize("pure", [[], ["die"]])
async def test_a_server_that_dies_in_a_call_is_started_again_and_repeats_only_pure_calls(tmp_path, pure):
    server = ToolServer("it", settings_of("stdio", tmp_path, pure=pure), tmp_path)

    died = await server.call("die", {})
    added = await server.call("add", {"a": 1, "b": 2})
    await server.close()

    assert died.failed == (not pure)
    assert died.text.startswith("lives" if pure else "the server of die ended during the call")
    assert added.text == "3"


async def test_a_server_that_dies_between_two_calls_is_started_again(tmp_path):
    server = ToolServer("it", settings_of("stdio", tmp_path), tmp_path)
    await server.call("add", {"a": 1, "b": 2})
    process = int((tmp_path / "calls").read_text().split()[0])
    os.kill(process, signal.SIGKILL)
    server._used_at = 0.0  # it was idle

    assert (await server.call("add", {"a": 2, "b": 2})).text == "4"
    await server.close()


async def test_an_http_server_that_dies_in_a_call_is_a_result_and_cancels_no_caller(tmp_path):
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    port = free_port()
    server = ToolServer("it", settings_of("http", tmp_path, port), tmp_path)
    with served(tmp_path, port) as process:
        await until(lambda: answers(port), "the server answers")
        hung = asyncio.ensure_future(server.call("hang", {}))
        await until(lambda: bool(server._running), "the call runs")
        await asyncio.sleep(0.3)
        process.kill()
        died = await asyncio.wait_for(hung, 30)
    with served(tmp_path, port):
        await until(lambda: answers(port), "the server answers")
        added = await server.call("add", {"a": 1, "b": 2})
        await server.close()

    assert died.failed
    assert "ended during the call" in died.text
    assert added.text == "3"


async def test_a_server_that_does_not_start_is_a_fault_of_the_environment_with_its_reason(tmp_path):
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    absent = ToolServer("it", McpSettings(command=["no-such-program"]), tmp_path)
    silent = ToolServer("it", McpSettings(url=f"http://127.0.0.1:{free_port()}/mcp"), tmp_path)

    for server in (absent, silent):
        with pytest.raises(ToolsUnavailable, match=r"tools.it: 4 connections failed, the last one: "):
            await server.call("add", {})


async def test_a_fault_of_a_function_is_a_result_and_one_without_types_is_an_error(tmp_path):
    server = ToolServer("it", settings_of("python", tmp_path), tmp_path)

    assert await server.call("fails", {"unit": "m"}) == ("ValueError: no m", True)
    assert "invalid arguments of fails" in (await server.call("fails", {"unit": "x"})).text
    for name, problem in (("bare", "the parameter a has no type"), ("odd", "values of JSON")):
        other = ToolServer("it", PythonToolsSettings(functions=[f"tools.py:{name}"]), tmp_path)
        with pytest.raises(FunctionError, match=problem):
            await other.tools()


async def test_no_more_calls_run_at_once_than_allowed(tmp_path):
    (tmp_path / "tools.py").write_text(
        "import asyncio\nrunning = most = 0\n"
        "async def wait() -> int:\n"
        "    global running, most\n"
        "    running += 1\n    most = max(most, running)\n    await asyncio.sleep(0.01)\n    running -= 1\n"
        "    return most\n"
    )
    server = ToolServer("it", PythonToolsSettings(functions=["tools.py:wait"], concurrency=3), tmp_path)

    results = await asyncio.gather(*(server.call("wait", {}) for _ in range(12)))

    assert max(int(result.text) for result in results) == 3
