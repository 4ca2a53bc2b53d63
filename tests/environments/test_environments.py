"""Environments of each kind make rows by number and seed; they score answers or play episodes."""

import asyncio
import os
import string
import threading
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from asyncrl.data.sources import open_source
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.environment_names import (
    KINDS,
    EnvironmentCapability,
    environment_can,
    is_environment,
    kinds_that_can,
    split_path,
)
from asyncrl.environments.kinds import environment_kind, make
from asyncrl.environments.protocol import DataError, Environment, Problem
from asyncrl.environments.verifiers.process import close_processes
from asyncrl.errors import EnvironmentFault
from asyncrl.examples.environment_server import application
from asyncrl.examples.guess import Guess
from asyncrl.functions import is_function
from asyncrl.harnesses.episode import ProblemChanged, episode_rollout
from asyncrl.rewards.graders import open_grader
from asyncrl.rewards.score import GradeRequest
from asyncrl.training.init_model import ModelShape, create_model
from harness.configs import the_problem
from harness.live_runs import WITH_TOOLS
from harness.lives import Life
from topics.prompts import PromptRow

ROOT = Path(__file__).parents[2] / "asyncrl" / "environments"
PYTHON = os.environ.get("ASYNCRL_VERIFIERS_PYTHON", "")
GUESS = f"{ROOT.parent}/examples/guess.py:Guess"
DIGITS = f"{ROOT.parent}/examples/digits"
ABSENT = pytest.mark.skipif(not PYTHON, reason="ASYNCRL_VERIFIERS_PYTHON names no Python with verifiers")
ALL = [pytest.param(kind, marks=[ABSENT] if kind == "verifiers" else []) for kind in KINDS]
SCORING = [kind for kind in ALL if kind.values[0] in kinds_that_can(EnvironmentCapability.SCORE)]
EPISODES = kinds_that_can(EnvironmentCapability.EPISODE)


class Sample(NamedTuple):
    """An environment, and a problem of it."""

    name: str
    parameters: dict[str, Any]
    replies: tuple[str, ...] = ()  # that begin an episode


@asynccontextmanager
async def no_server():
    yield ""


@asynccontextmanager
async def server(made: Callable[[], Any] = Guess):
    runner = web.AppRunner(application(made), shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


SAMPLES = {
    "reasoning-gym": Sample("leg_counting", {"max_animals": 4}),
    "text": Sample(GUESS, {"largest": 7}, ("0", "x")),
    "harbor": Sample(DIGITS, {"host": False}),
    "verifiers": Sample("sums_taskset", {"python": PYTHON, "folder": f"{ROOT.parent}/examples"}),
    "openenv": Sample("ADDRESS", {"observation": "message"}, ("0", "x")),
}
SERVERS: dict[str, Callable[[], AbstractAsyncContextManager[str]]] = {"openenv": server}
WRONG_NAMES = {
    "reasoning-gym": "close: .*leg_counting",
    "text": "has no function 'Gues'; it has Guess",
    "harbor": "examples/digit has no folder with a task.toml",
    "verifiers": "'sums_tasket' not found|No module|sums_taskse",
    "openenv": "openenv:ADDRES: expected the address of a server",
}


async def using(kind: str, use: Callable[[Sample], Awaitable[None]]) -> None:
    """Use the sample of a kind, with the server that it needs."""
    sample = SAMPLES[kind]
    async with SERVERS.get(kind, no_server)() as address:
        await use(sample._replace(name=address or sample.name))


def answer_to(row: PromptRow) -> str:
    """Return the right answer: its label, or the sum of the example for verifiers."""
    return str(row.label if row.label is not None else sum(map(int, row.prompt[-1]["content"].split("+"))))


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    yield
    close_processes()


async def row_of(environment: Environment, number: int) -> PromptRow:
    return await asyncio.to_thread(environment.row, number)  # as in the process that makes rows, which has no loop


def test_the_kinds_are_the_folders_and_have_a_sample_here():
    found = {path.parent.name.replace("_", "-") for path in ROOT.glob("*/kind.py")}

    assert found == set(KINDS) == SAMPLES.keys()


@pytest.mark.parametrize("kind", ALL)
async def test_a_row_depends_on_seed_and_number_alone_and_names_its_environment(kind: str):
    async def use(sample: Sample) -> None:
        name, parameters, _ = sample
        one, other, another = (make(kind, name, parameters, seed) for seed in (1, 1, 2))
        numbers = (3, 0, 600)

        rows = [await row_of(one, number) for number in numbers]
        assert rows == [await row_of(other, number) for number in numbers]
        assert rows != [await row_of(another, number) for number in numbers]
        if "environment" in rows[0].metadata:
            problem = Problem.of(rows[0])
            assert (problem.kind, problem.name) == (kind, name)
            assert parameters.items() <= problem.parameters.items()
        else:
            assert rows[0].metadata["source_dataset"] == name
            assert rows[0].metadata["source_options"] == parameters
        assert name in one.describe()

    await using(kind, use)


@pytest.mark.parametrize("kind", SCORING)
def test_an_answer_is_scored_also_by_an_environment_of_another_seed(kind: str):
    name, parameters, _ = SAMPLES[kind]
    row = make(kind, name, parameters, 1).row(3)
    scorer = make(kind, name, parameters, 0)

    assert scorer.score(answer_to(row), row) == 1.0
    assert scorer.score("nonsense", row) < 0.5


@pytest.mark.parametrize("kind", EPISODES)
async def test_the_problem_of_a_row_is_the_same_on_every_worker(kind: str):
    async def use(sample: Sample) -> None:
        row = await row_of(make(kind, sample.name, sample.parameters, 1), 3)
        played = []
        for _ in range(2):
            episode = environment_kind(kind).episode(Problem.of(row), Path())
            try:
                assert await episode.reset() == row.prompt
                played.append([await episode.step(reply) for reply in sample.replies])
            finally:
                await episode.close()

        assert played[0] == played[1]
        assert [step.done for step in played[0]] == [False] * len(sample.replies)

    await using(kind, use)


@pytest.mark.parametrize("kind", ALL)
def test_an_unknown_name_and_an_unknown_parameter_are_refused(kind: str):
    known = "http://127.0.0.1:9" if kind == "openenv" else SAMPLES[kind].name

    with pytest.raises(DataError, match=WRONG_NAMES[kind]):
        make(kind, SAMPLES[kind].name[:-1], {}, 0)
    with pytest.raises(DataError, match="colour"):
        make(kind, known, {"colour": "red"}, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_no_function_and_a_path_keeps_its_kind(kind: str):
    spec = f"{kind}:{SAMPLES[kind].name}"

    assert is_environment(spec)
    assert is_environment(kind)
    assert not is_environment(f"{kind}.py:NAME")
    assert not is_function(spec)
    has_path = environment_can(spec, EnvironmentCapability.PATH)
    assert split_path(spec) == ((f"{kind}:", SAMPLES[kind].name) if has_path else ("", spec))


@pytest.mark.parametrize("kind", SCORING)
async def test_a_task_takes_its_rows_and_its_reward_from_an_environment(kind: str, tmp_path: Path):
    name, parameters, _ = SAMPLES[kind]
    spec = f"{kind}:{name}"
    row = open_source(spec, options=parameters, seed=1, base=tmp_path).row(3)

    for reward in (kind, spec):
        grader = await open_grader(reward, base=tmp_path)
        try:
            graded = await grader.grade(GradeRequest(answer_to(row), row.prompt, row.label, row.metadata, "p000000-0"))
        finally:
            await grader.close()
        assert graded.reward == 1.0


def tokenizer_of(folder: Path) -> TaskTokenizer:
    create_model(folder, alphabet=string.printable, seed=1, shape=ModelShape(context=256))
    return TaskTokenizer.load(folder)


class Digits:
    """Replies with given digits, one after the other."""

    def __init__(self, tokenizer, *replies: str) -> None:
        self._tokenizer, self._replies, self.prompts = tokenizer, [*replies], []

    def __call__(self, ids) -> list[int]:
        self.prompts.append(self._tokenizer.decode_all(ids))
        return self._tokenizer.encode(self._replies.pop(0)).tolist()


@pytest.mark.parametrize("kind", EPISODES)
async def test_an_episode_is_one_segment_and_a_resumed_one_repeats_its_replies(kind: str, tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path)

    async def use(sample: Sample) -> None:
        parameters = {**sample.parameters, **({"tries": 3} if kind == "text" else {})}
        row = await row_of(make(kind, sample.name, parameters, 1), 3)
        lives = []
        for recorded in ((), "first"):
            life = Life(tokenizer, lives[0].host.kept if recorded else (), most=4)
            life.host.written = Digits(tokenizer, *(() if recorded else ("m", "m", "m")))
            await life.run(partial(episode_rollout(Path()), row))
            await life.host.checkpoint()
            lives.append(life)

        first, again = lives
        outcome = first.context.outcome_given()
        assert (outcome.reward, outcome.turn_rewards, outcome.metrics["turns"]) == (0.0, [0.0] * 3, 3.0)
        assert first.host.written.prompts[1] == f"{row.prompt}m>"
        [segment] = first.context.segments()
        assert segment.mask.sum() == 3
        assert segment.tokens.tolist() == again.context.segments()[0].tokens.tolist()

    await using(kind, use)


async def test_a_problem_that_changed_is_an_error_that_shows_both(tmp_path: Path):
    tokenizer = tokenizer_of(tmp_path)
    row = await row_of(make("text", GUESS, {}, 1), 3)
    life = Life(tokenizer)

    with pytest.raises(ProblemChanged, match=r"of seed .* is '9:'; the row has '8:'"):
        await life.run(partial(episode_rollout(Path()), PromptRow("8:", metadata=row.metadata)))


async def test_a_server_that_is_away_hangs_or_refuses_is_a_fault_of_the_environment():
    class Slow(Guess):
        def step(self, action):
            raise KeyError("no such board")

        def reset(self, *, seed):
            if seed == 1:
                threading.Event().wait(0.5)
            return super().reset(seed=seed)

    async def reset(address: str, seed: int, **options: Any):
        episode = environment_kind("openenv").episode(Problem("openenv", address, seed, options), Path())
        try:
            await episode.reset()
            return await episode.step("1")
        finally:
            await episode.close()

    with pytest.raises(EnvironmentFault, match="cannot be reached"):
        await reset("http://127.0.0.1:9", 0)
    async with server(Slow) as address:
        with pytest.raises(EnvironmentFault, match=r"no answer to a reset within limit_s = 0\.1"):
            await reset(address, 1, limit_s=0.1)
        with pytest.raises(EnvironmentFault, match="refused a step: KeyError: 'no such board'"):
            await reset(address, 2)
        with pytest.raises(EnvironmentFault, match="an observation with message; the option observation names 'text'"):
            await reset(address, 2, observation="text")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("class Played:\n    def reset(self, seed): return 'a'\n", "has no method step"),
        ("class Played:\n    def step(self, text): ...\n    def reset(self, seed): raise KeyError('x')\n", "KeyError"),
        ("class Played:\n    def step(self, text): ...\n    def reset(self, seed): return 7\n", "reset returned int"),
    ],
)
def test_a_class_that_cannot_serve_is_refused_before_the_run(code: str, reason: str, tmp_path: Path):
    (tmp_path / "played.py").write_text(code)
    source = f"task.source=text:{tmp_path}/played.py:Played"

    problem = the_problem("guess", "eval.prompts=0", source, files=True)

    assert problem.key == "--set task.source"
    assert reason in problem.message


def test_a_setup_that_hangs_ends_at_the_limit_of_a_row(tmp_path: Path):
    code = "class Played:\n    def step(self, text): ...\n    def reset(self, seed):\n        while True: pass\n"
    (tmp_path / "played.py").write_text(code)
    source = f"task.source=text:{tmp_path}/played.py:Played"

    problem = the_problem("guess", "eval.prompts=0", "task.row_limit_s=1.0", source, files=True)

    assert "row 0 was not made within task.row_limit_s = 1" in problem.message


def test_the_rollout_of_environments_needs_rows_with_episodes():
    problem = the_problem("demo", "task.rollout=environment")

    assert "needs rows of an environment with episodes; task.source has none" in problem.message


async def test_an_environment_with_messages_and_tools_gets_the_calls_of_a_reply(tmp_path: Path):
    create_model(tmp_path, alphabet=string.printable, seed=1, shape=ModelShape(context=4096), template=WITH_TOOLS)
    tokenizer = TaskTokenizer.load(tmp_path)
    (tmp_path / "counted.py").write_text(
        "class Counted:\n"
        "    tools = [{'type': 'function', 'function': {'name': 'add', 'description': '', 'parameters': {}}}]\n"
        "    def reset(self, *, seed): return [{'role': 'user', 'content': 'count'}]\n"
        "    def step(self, text): self.seen = text; return text, float('add' in text), 'add' not in text, False, {}\n"
    )
    row = await row_of(make("text", f"{tmp_path}/counted.py:Counted", {}, 1), 0)
    life, replies = Life(tokenizer, most=200), ['<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', "done"]
    life.host.written = lambda _ids: [*tokenizer.encode(replies.pop(0)).tolist(), tokenizer.eos_ids[0]]

    await life.run(partial(episode_rollout(Path()), row))

    assert row.metadata["tools"][0]["function"]["name"] == "add"
    assert life.context.completion == '[{"name":"add","arguments":{"a":1}}]\ndone'
    assert life.context.outcome_given().turn_rewards == [1.0, 0.0]
