"""A program continues its session by its own flag, in the workspace as it was before its newest call."""

from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.harness_settings import CommandSettings, MiniSettings, PythonSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.errors import EnvironmentFault
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.sandboxes.kinds import open_sandbox
from asyncrl.training.init_model import ModelShape, create_model
from harness.live_runs import TEMPLATE
from harness.lives import Life
from harness.sandboxes import settings_of
from topics.prompts import PromptRow

# It keeps its session in a file, works between its calls, and continues from the file with --resume.
AGENT = """
import json, os, sys, urllib.request
session = ".agent/session.json"
if "--resume" in sys.argv:
    messages = json.load(open(session))
else:
    os.makedirs(".agent")
    messages = [{"role": "user", "content": sys.stdin.read()}]
while sum(one["role"] == "assistant" for one in messages) < 3:
    json.dump(messages, open(session, "w"))
    body = json.dumps({"model": "any", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    said = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    open("work", "a").write(said)
    if os.path.exists("old"):
        os.remove("old")
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And " + said + "?"}]
print(len(sys.argv))
"""
ROW = PromptRow("Go.", metadata={"files": {"old": "x"}, "tests": {"all": ["sh", "-c", "grep -qx abc work"]}})
PYTHON = "python3"  # of the sandbox
SETTINGS = CommandSettings(
    command=[PYTHON, "agent.py"],
    resume_command=[PYTHON, "agent.py", "--resume"],
    files={"agent.py": AGENT},
    resume="snapshot",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = Path(tmp_path_factory.mktemp("model"))
    alphabet = "".join(chr(code) for code in range(32, 127)) + "\n"
    create_model(folder, alphabet=alphabet, seed=1, shape=ModelShape(context=4096), template=TEMPLATE)
    return TaskTokenizer.load(folder)


async def lived(tokenizer: TaskTokenizer, replies: list[str], recorded=(), sandbox: str = "none") -> Life:
    """Return a life in which the program asked for these replies; without a further one its worker dies."""
    life = Life(tokenizer, recorded, most=16)
    life.prompts = []

    def written(ids):
        life.prompts.append(tokenizer.decode_all(ids))
        if not replies:
            raise EnvironmentFault("the worker died")
        return [*tokenizer.encode(replies.pop(0)).tolist(), tokenizer.eos_ids[0]]

    life.host.written = written
    own = settings_of(sandbox)
    rollout = harness_rollout(harness_kind(SETTINGS).make(SETTINGS, Path()), SETTINGS, partial(open_sandbox, own))
    try:
        await life.run(partial(rollout, ROW))
    except EnvironmentFault as error:
        assert str(error) == "the worker died"
    return life


@pytest.mark.parametrize("sandbox", ["none", "bubblewrap"])
async def test_a_program_continues_its_session_on_another_worker(sandbox: str, tokenizer):
    whole = await lived(tokenizer, ["a", "b", "c"], sandbox=sandbox)
    first = await lived(tokenizer, ["a", "b"], sandbox=sandbox)

    again = await lived(tokenizer, ["c"], first.host.kept, sandbox=sandbox)

    assert whole.context.outcome_given().reward == again.context.outcome_given().reward == 1.0
    assert (whole.context.completion, again.context.completion) == ("1\n", "2\n")
    assert (len(whole.prompts), len(again.prompts)) == (3, 1)  # the program asks for no reply again
    assert again.prompts == whole.prompts[2:] == first.prompts[2:]
    assert b"-x" in again.context.outcome_given().artefacts["diff"]  # the file that it removed is gone
    found, expected = (life.context.segments() for life in (again, whole))
    assert [one.tokens.tolist() for one in found] == [one.tokens.tolist() for one in expected]
    assert [one.mask.tolist() for one in found] == [one.mask.tolist() for one in expected]


async def test_an_answer_after_the_newest_snapshot_is_given_again(tokenizer):
    first = await lived(tokenizer, ["a"])
    kept = first.host.kept  # the second call has a snapshot and no answer
    second = await lived(tokenizer, ["b"], kept)

    again = await lived(tokenizer, ["c"], [*kept, *second.host.kept])

    assert again.context.outcome_given().reward == 1.0
    assert len(again.prompts) == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (MiniSettings(resume="snapshot"), "its program continues no session from files"),
        (PythonSettings(function="a.py:b", resume="snapshot"), "its program continues no session from files"),
        (CommandSettings(command=["true"], resume="snapshot"), "needs resume_command"),
    ],
)
def test_a_program_without_sessions_is_not_resumed_from_a_snapshot(settings, words: str):
    assert words in settings.problem()
