"""Runs with a gateway: a small model that holds conversations, and the key of a client."""

from __future__ import annotations

import json
import string
from pathlib import Path

from aiohttp import ClientError, ClientSession

from asyncrl.config.settings import Config
from asyncrl.data.tokenizer import SPECIAL_TOKENS
from asyncrl.ports import free_port
from asyncrl.training.init_model import ModelShape, create_model, write_tokenizer
from harness.mixtures import MIXTURE, write_transformers_model
from harness.runs import command
from harness.stage import until

TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"


WITH_TOOLS = """
{%- for t in tools or [] %}{{ t.function.name }}{% endfor %}
{%- for m in messages %}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] -%}
<tool_call>{{ {'name': c.function.name, 'arguments': c.function.arguments} | tojson }}</tool_call>
{%- endfor %}
{%- if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"""


def conversing_model(folder: Path, *, tools: bool = False, experts: bool = False) -> Path:
    """Write an untrained model of 512 tokens with a chat template; one for tools has all characters, and reasons."""
    if experts:
        alphabet = Config().model.create.alphabet
        sizes = {"vocab_size": len(alphabet) + len(SPECIAL_TOKENS), "max_position_embeddings": 512}
        write_transformers_model(folder, "qwen3_moe", {**MIXTURE, **sizes})
        write_tokenizer(folder, alphabet, context=512)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        return folder
    alphabet = Config().model.create.alphabet
    more = "".join(letter for letter in string.printable[:95] + "\n" if letter not in alphabet) if tools else ""
    create_model(folder, alphabet=alphabet + more, seed=1, shape=ModelShape(context=512))
    (folder / "chat_template.jinja").write_text(WITH_TOOLS if tools else TEMPLATE)
    return folder


def with_gateway(folder: Path, *, experts: bool = False) -> tuple[list[str], str]:
    """Return settings of a run with a gateway, and its address."""
    port = free_port()
    model = conversing_model(folder / "conversing", experts=experts)
    settings = [f"model.path={model}", "gateway.count=1", f"gateway.port={port}"]
    # With the defaults, other work on the machine would come before what the test waits for, and an engine that starts
    # beside it would take longer than requests are held.
    return [*settings, "gateway.nice=1", "gateway.queue_timeout_s=180"], f"http://127.0.0.1:{port}"


async def answers(address: str, path: str = "/health", key: str = "") -> bool:
    """Return whether a gateway listens there, and takes a key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        async with ClientSession(headers=headers) as session, session.get(f"{address}{path}") as response:
            return response.status == 200
    except ClientError:
        return False


async def new_key(folder: Path, address: str, tenant: str = "anna") -> str:
    """Wait for the gateway, and return a new key as `asyncrl keys add` prints it, once the gateway takes it."""
    await until(lambda: answers(address), "the gateway listens")
    code, output = await command(folder, "keys", "add", "--tenant", tenant)
    assert code == 0, output
    key = output.strip()
    await until(lambda: answers(address, "/v1/models", key), "the gateway has read of the key")
    return key


async def newest(folder: Path) -> int:
    code, output = await command(folder, "weights", "list", "--json")
    assert code == 0, output
    return int(json.loads(output)[-1]["version"])


async def moved(folder: Path, *words: str) -> int:
    """Move the channel; returns the version that is live then."""
    code, output = await command(folder, "weights", *words)
    assert code == 0, output
    return int(output.split("version ")[1].split()[0])
