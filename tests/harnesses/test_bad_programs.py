"""Programs that are not installed, that never call or call too late, and sessions of many turns."""

import asyncio
import string
from functools import partial
from pathlib import Path

import aiohttp
import pytest

from asyncrl.config.harness_settings import CommandSettings, HarnessSettings, MiniSettings
from asyncrl.config.sandbox_settings import SandboxSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.training.init_model import ModelShape, create_model
from harness.live_runs import TEMPLATE
from harness.lives import Life
from topics.prompts import PromptRow

SANDBOX = SandboxSettings(kind="none", trusted=True)
ROW = PromptRow("Count.", metadata={"files": {"note": "zero\n"}, "tests": {"any": ["true"]}})
TURNS = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = Path(tmp_path_factory.mktemp("model"))
    create_model(folder, alphabet=string.printable, seed=1, shape=ModelShape(context=8192), template=TEMPLATE)
    return TaskTokenizer.load(folder)


def life_of(tokenizer: TaskTokenizer, reply: str) -> Life:
    """Return a life whose policy always writes the same reply."""
    life = Life(tokenizer, most=64)
    life.host.written = lambda _ids: [*tokenizer.encode(reply).tolist(), tokenizer.eos_ids[0]]
    return life


async def work(life: Life, settings: HarnessSettings) -> None:
    harness = harness_kind(settings).make(settings, Path())
    await life.run(partial(harness_rollout(harness, settings, partial(open_sandbox, SANDBOX)), ROW))


async def test_a_session_of_40_turns_trains_no_more_tokens_than_its_final_history(tokenizer):
    life = life_of(tokenizer, "```sh\necho one >> note; wc -l note\n```")

    await work(life, MiniSettings(turns=TURNS))

    [segment] = life.context.segments()
    final = life.context._in_order()[-1]
    assert len(life.context._in_order()) == TURNS
    assert len(segment.tokens) == len(final.ids) + len(final.answer.tokens)
    assert int(segment.mask.sum()) == life.host.sampled


async def test_a_program_that_is_not_installed_is_a_failure_that_names_it(tokenizer):
    life = life_of(tokenizer, "x")

    await work(life, CommandSettings(command=["no-such-agent"]))

    failure = life.context.outcome_given().artefacts["failure"]
    assert failure == b"no-such-agent: exit code 127: no-such-agent: No such file or directory"


async def test_a_program_that_never_calls_leaves_nothing_to_train_on(tokenizer):
    life = life_of(tokenizer, "x")

    await work(life, CommandSettings(command=["true"]))

    assert not life.context.segments()


async def test_a_call_after_the_end_of_a_program_reaches_nothing(tokenizer):
    life, address = life_of(tokenizer, "x"), ""

    async def rollout(context) -> None:
        nonlocal address
        async with context.endpoint() as endpoint:
            address = endpoint.base_url

    await asyncio.wait_for(life.run(rollout), 60)

    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.post(f"{address}/chat/completions", json={})
