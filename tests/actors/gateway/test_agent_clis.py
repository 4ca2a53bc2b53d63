"""Claude Code and Codex, as npm gives them, finish a loop of tools with nothing but the gateway's address and a key.

An optional check: `npm i @openai/codex @anthropic-ai/claude-code` in some folder, whose `node_modules/.bin` the
environment variable ASYNCRL_AGENT_CLIS names.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.ports import free_port
from harness.agent_programs import CALLS, DONE, SAID, model_of_bytes
from harness.gateways import Served, ready, stored_turns
from harness.sglang_like import Asked, LikeSGLang
from harness.stage import Stage
from harness.workers import KEY
from topics.turns import TurnFinished, TurnStarted

CLIS = os.environ.get("ASYNCRL_AGENT_CLIS", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not CLIS, reason="ASYNCRL_AGENT_CLIS names no folder of command-line agents"),
]
LIMIT_S = 300.0


def answering(inference: LikeSGLang, tokenizer: TaskTokenizer) -> None:
    """Have the server call the client's shell, and end once it sees what that said."""

    async def serve(asked: Asked) -> dict[str, Any]:
        text = tokenizer.decode_all(asked.ids)
        found = next((call for call in CALLS if text.startswith(call[0]) or call[0] in text[:2000]), None)
        reply = DONE
        if found is not None and SAID not in text.replace(f"{SAID} >", ""):  # which stands in the call itself
            reply = f'<tool_call>{{"name": "{found[0]}", "arguments": {found[1]}}}</tool_call>'
        return inference.answer(asked, [*tokenizer.encode(reply).tolist(), tokenizer.eos_ids[0]], "stop")

    inference.serve = serve


def claude(address: str, key: str, home: Path) -> tuple[list[str], dict[str, str]]:
    words = ["claude", "-p", "Write a file.", "--model", "any", "--output-format", "json", "--allowedTools", "Bash"]
    return words, {
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_AUTH_TOKEN": key,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex(address: str, key: str, home: Path) -> tuple[list[str], dict[str, str]]:
    (home / ".codex").mkdir()
    (home / ".codex" / "config.toml").write_text(
        f'model = "any"\nmodel_provider = "here"\n[model_providers.here]\nname = "here"\n'
        f'base_url = "{address}/v1"\nenv_key = "HERE_KEY"\nwire_api = "responses"\n'
    )
    words = ["codex", "exec", "--skip-git-repo-check", "--json", "--sandbox", "danger-full-access", "Write a file."]
    return words, {"HERE_KEY": key}


@pytest.mark.parametrize("agent", [claude, codex])
async def test_an_agent_finishes_a_loop_of_tools(
    agent: Any, bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    model = model_of_bytes(tmp_path / "model")
    inference.weight_version = KEY
    engine = {"kind": "external", "addresses": ["http://127.0.0.1:1"]}
    made = stage(model={"path": str(model)}, engine=engine, gateway={"count": 1, "port": free_port()})
    served = Served(bus, made)
    await served.start()
    await publish(bus, ready(inference))
    answering(inference, TaskTokenizer.load(model))
    home = tmp_path / "home"
    home.mkdir()
    words, environment = agent(served.address, served.key, home)
    process = await asyncio.create_subprocess_exec(
        str(Path(CLIS) / words[0]),
        *words[1:],
        cwd=home,
        env={"HOME": str(home), "PATH": os.environ["PATH"], **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            output = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await served.stop()
    assert process.returncode == 0 and DONE in output, output[-4000:]
    assert (home / "made.txt").read_text().strip() == SAID
    turns = await stored_turns(bus)
    assert all(turn.finish == "stop" for turn in turns if isinstance(turn, TurnFinished))
    assert any(turn.parent for turn in turns if isinstance(turn, TurnStarted)), "the second turn follows the first"
