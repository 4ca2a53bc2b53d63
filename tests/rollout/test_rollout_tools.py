"""The policy calls tools of servers: their schemas are in the prompt, results are recorded, and faults end nothing."""

import json
import string
import sys
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.harness_settings import KINDS, CommandSettings, MiniSettings, PythonSettings
from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.config.tool_settings import McpSettings, PythonToolsSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.errors import FunctionError
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.tools.protocol import ToolsUnavailable
from asyncrl.tools.server import Toolbox
from asyncrl.training.init_model import ModelShape, create_model
from harness.live_runs import WITH_TOOLS
from harness.lives import Life
from topics.prompts import PromptRow

SERVER = Path(__file__).parents[1] / "harness" / "mcp_server.py"
FUNCTIONS = '''
def add(a: int, b: int) -> int:
    """Add two numbers."""
    with open(__file__ + ".calls", "a") as file:
        file.write("+")
    return a + b
'''
AGENT = """
import json, os, urllib.request
def ask(**message):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    body = json.dumps({"jsonrpc": "2.0", "id": 1, **message}).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(os.environ["MCP_URL"], body, headers)))["result"]
ask(method="initialize", params={"protocolVersion": "2025-06-18"})
[tool] = ask(method="tools/list")["tools"]
result = ask(method="tools/call", params={"name": tool["name"], "arguments": {"a": 40, "b": 2}})
print(tool["description"], result["content"][0]["text"], result["isError"])
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = Path(tmp_path_factory.mktemp("model"))
    create_model(folder, alphabet=string.printable, seed=1, shape=ModelShape(context=4096), template=WITH_TOOLS)
    return TaskTokenizer.load(folder)


@pytest.fixture
def added(tmp_path: Path) -> Toolbox:
    (tmp_path / "tools.py").write_text(FUNCTIONS)
    return Toolbox({"sums": PythonToolsSettings(functions=["tools.py:add"])}, tmp_path)


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def rollout(row: PromptRow, context, *names: str) -> None:
    """Reply until a reply calls no tool."""
    tools, endpoint = await context.tools(*(names or ("sums",))), context.endpoint()
    messages = [{"role": "user", "content": row.prompt}]
    while True:
        reply = await endpoint.reply(messages, tools.schemas)
        messages.append(reply.message)
        if not reply.calls:
            context.completion = reply.text
            return
        messages += await tools.answer(reply.calls)


async def work(tokenizer, toolbox: Toolbox, *replies: str, function=rollout, recorded=()):
    life, prompts, left = Life(tokenizer, recorded, most=256), [], [*replies]

    def policy(ids):
        prompts.append(tokenizer.decode_all(ids))
        return [*tokenizer.encode(left.pop(0)).tolist(), tokenizer.eos_ids[0]]

    life.host.written, life.host.toolbox = policy, toolbox
    await life.run(partial(function, PromptRow("40+2?", metadata={"tests": {"any": ["true"]}})))
    return life, prompts


async def test_the_template_writes_schemas_calls_and_results_and_all_is_one_row(tokenizer, added):
    life, prompts = await work(tokenizer, added, call("add", a=40, b=2), "It is 42.")

    assert prompts[0] == "add40+2?"
    assert prompts[1] == prompts[0] + call("add", a=40, b=2) + "<eos>42"
    assert life.context.completion == "It is 42."
    [segment] = life.context.segments()
    sampled = tokenizer.decode(segment.tokens[segment.mask == 1])
    assert sampled == call("add", a=40, b=2) + "It is 42."


async def test_a_resumed_trajectory_gets_recorded_tools_and_results(tokenizer, added, tmp_path):
    first, _ = await work(tokenizer, added, call("add", a=1, b=2), "3")
    await first.host.checkpoint()
    gone = Toolbox({"sums": PythonToolsSettings(functions=["gone.py:add"])}, tmp_path)

    again, prompts = await work(tokenizer, gone, recorded=first.host.kept)

    assert prompts == []
    assert (tmp_path / "tools.py.calls").read_text() == "+"
    [mine], [theirs] = again.context.segments(), first.context.segments()
    assert mine.tokens.tolist() == theirs.tokens.tolist()


async def test_unknown_tools_and_wrong_arguments_are_results_that_the_policy_reads(tokenizer, added):
    replies = (call("sub", a=1), call("add", a="one", b=2), "Sorry.")

    life, prompts = await work(tokenizer, added, *replies)

    assert prompts[1].endswith("error: there is no tool 'sub'; there are add")
    assert "error: invalid arguments of add: Expected `int`, got `str` - at `$.a`" in prompts[2]
    assert life.context.completion == "Sorry."


async def test_two_servers_with_a_tool_of_one_name_are_an_error_that_names_both(tokenizer, added, tmp_path):
    table = PythonToolsSettings(functions=["tools.py:add"])
    both = Toolbox({"sums": table, "others": table}, tmp_path)

    with pytest.raises(FunctionError, match=r"tools.others and tools.sums both have a tool add"):
        await work(tokenizer, both, "x", function=partial_of("sums", "others"))
    with pytest.raises(FunctionError, match=r"the config has no \[tools.absent\]; it has sums, others"):
        await work(tokenizer, both, "x", function=partial_of("absent"))


def partial_of(*names: str):
    async def function(row, context) -> None:
        await rollout(row, context, *names)

    return function


def mcp(folder: Path, **options) -> Toolbox:
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    return Toolbox({"sums": McpSettings(command=[sys.executable, str(SERVER), str(folder)], **options)}, folder)


async def test_an_episode_continues_over_a_server_that_dies_hangs_and_changes_its_tools(tokenizer, tmp_path):
    toolbox = mcp(tmp_path, time_limit_s=2.0)
    replies = (call("die"), call("hang"), call("change"), call("add", a=1, b=2), "Done.")

    life, prompts = await work(tokenizer, toolbox, *replies)
    await toolbox.close()

    assert "error: the server of die ended during the call" in prompts[1]
    assert prompts[2].endswith("error: hang gave no result within 2 s")
    assert prompts[3].endswith("changed")
    assert prompts[4].endswith("error: Unknown tool: add")
    assert life.context.completion == "Done."
    assert len(life.context.segments()) == 1


async def test_an_episode_whose_server_cannot_be_reached_ends_with_its_reason_and_records_no_failure(
    tokenizer, tmp_path
):
    pytest.importorskip("mcp", reason="the package mcp is not installed")
    absent = Toolbox({"sums": McpSettings(command=["no-such-program"])}, tmp_path)

    with pytest.raises(ToolsUnavailable, match="no-such-program"):
        await work(tokenizer, absent, "x")


@pytest.mark.parametrize("kind", ["codex", "pi"])
def test_a_harness_that_takes_no_tools_refuses_them(kind):
    assert "take another harness" in KINDS[kind](tools=["sums"]).problem()


async def test_harnesses_give_their_tools_to_the_policy_and_to_programs(tokenizer, added, tmp_path):
    (tmp_path / "agent.py").write_text(
        "async def run(tools):\n    return (await tools.call('add', {'a': 40, 'b': 2})).text + str(tools.schemas[0])\n"
    )
    sandbox = SandboxSettings(kind="none", trusted=True)

    async def made_by(settings, *replies: str) -> str:
        made = harness_kind(settings).make(settings, tmp_path)
        function = harness_rollout(made, settings, partial(open_sandbox, sandbox))
        life, _ = await work(tokenizer, added, *replies, function=function)
        metrics = life.context.outcome_given().metrics
        assert metrics["failed"] == 0.0, life.context.outcome_given().artefacts
        assert (metrics["tool_calls"], metrics["tool_failures"]) == (1.0, 0.0)
        return life.context.completion

    command = CommandSettings(command=[sys.executable, "agent"], files={"agent": AGENT}, tools=["sums"])
    assert await made_by(MiniSettings(tools=["sums"]), call("add", a=40, b=2), "42!") == "42!"
    assert "'name': 'add'" in await made_by(PythonSettings(function="agent.py:run", tools=["sums"]))
    assert await made_by(command) == "Add two numbers. 42 False\n"
