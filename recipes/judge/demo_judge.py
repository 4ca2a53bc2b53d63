"""A judge for the demo: an endpoint of OpenAI's API that reads the criteria, and decides each by a rule.

A language model takes its place with another `[judge]` in rubric.toml.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from asyncrl import Context, Role

ROLE = Role("demojudge", "service", stops=1)
TOPICS: list[Any] = []  # it neither reads nor publishes messages

RULES: dict[str, Callable[[str, str], bool]] = {
    "has at most ten words": lambda _task, answer: 0 < len(answer.split()) <= 10,
    "ends with a full stop": lambda _task, answer: answer.rstrip().endswith("."),
    "names the topic": lambda task, answer: topic(task) in answer.lower(),
    "speaks of its author": lambda _task, answer: bool(re.search(r"\b(I|I'm|my|me)\b", answer)),
}


def topic(task: str) -> str:
    """Return the last word of the first sentence of a task."""
    return re.split(r"[?.]", task)[0].split()[-1].lower()


def verdicts(system: str, user: str) -> str:
    """Return one line for each criterion of a question."""
    mark = re.search(r"with the mark (\w+)", system)
    criteria = re.findall(r"^(\d+)\. (.*) \(", system, re.MULTILINE)
    assert mark is not None
    parts = dict(re.findall(rf"===== {mark[1]} (task|answer) =====\n(.*?)\n===== {mark[1]} end", user, re.DOTALL))
    lines = []
    for number, text in criteria:
        met = next(rule for words, rule in RULES.items() if words in text)(parts["task"], parts["answer"])
        lines.append(f"CRITERION {mark[1]} {number}: {'yes' if met else 'no'}")
    return "\n".join(lines)


async def answer(request: web.Request) -> web.Response:
    """Answer a request for a chat completion."""
    system, user = (message["content"] for message in (await request.json())["messages"])
    message = {"role": "assistant", "content": verdicts(system, user)}
    return web.json_response({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})


async def main(context: Context) -> None:
    """Serve the judge of rubric.toml until the run stops."""
    rubric = tomllib.loads(Path(__file__).with_name("rubric.toml").read_text(encoding="utf-8"))
    address = urlsplit(rubric["judge"]["url"])
    app = web.Application()
    app.router.add_post(f"{address.path}/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, address.hostname, address.port).start()
    await context.stop.wait()
    await runner.cleanup()
