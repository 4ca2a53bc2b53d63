"""Tasksets of verifiers, in a separate Python: ASYNCRL_VERIFIERS_PYTHON names one that has verifiers 0.4."""

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.harness_settings import MiniSettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.environments.kinds import make
from asyncrl.environments.protocol import DataError
from asyncrl.environments.verifiers.process import close_processes
from asyncrl.errors import EnvironmentFault
from asyncrl.harnesses.episode import episode_rollout
from asyncrl.harnesses.kinds import harness_kind
from asyncrl.harnesses.rollout import harness_rollout
from asyncrl.sandboxes.kinds import open_sandbox
from harness.lives import Life, printable_tokenizer
from harness.sandboxes import settings_of

EXAMPLES = Path(__file__).parents[2] / "asyncrl" / "examples"
PYTHON = os.environ.get("ASYNCRL_VERIFIERS_PYTHON", "")
OPTIONS = {"python": PYTHON, "folder": str(EXAMPLES)}
installed = pytest.mark.skipif(not PYTHON, reason="ASYNCRL_VERIFIERS_PYTHON names no Python with verifiers")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    return printable_tokenizer(Path(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left():
    yield
    close_processes()


def test_a_python_without_verifiers_and_an_absent_python_are_named_with_the_installation():
    with pytest.raises(DataError, match=f"{sys.executable} has no package verifiers; install it: .* verifiers==0"):
        make("verifiers", "sums_taskset", {"python": sys.executable, "folder": str(EXAMPLES)}, 1)
    with pytest.raises(DataError, match=r"the option python = '/no/python' cannot start"):
        make("verifiers", "sums_taskset", {"python": "/no/python"}, 1)
    with pytest.raises(DataError, match=r"the option folder names no folder: /no/folder"):
        make("verifiers", "sums_taskset", {"python": sys.executable, "folder": "/no/folder"}, 1)
    with pytest.raises(DataError, match="missing required field `python`; its options are python, folder"):
        make("verifiers", "sums_taskset", {}, 1)


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("raise KeyError('no data')", "KeyError: 'no data'"),
        ("import os; os._exit(3)", "its process ended with exit code 3"),
    ],
)
@installed
def test_a_taskset_that_cannot_be_loaded_is_named(code: str, fault: str, tmp_path: Path):
    (tmp_path / "broken.py").write_text(code)

    with pytest.raises(DataError, match=fault):
        make("verifiers", "broken", {"python": PYTHON, "folder": str(tmp_path)}, 1)


@installed
def test_a_taskset_that_hangs_ends_at_its_limit(tmp_path: Path):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(600)\n")

    with pytest.raises(DataError, match="verifiers:hanging was not loaded within the option start_limit_s = 8"):
        make("verifiers", "hanging", {"python": PYTHON, "folder": str(tmp_path), "start_limit_s": 8.0}, 1)


@installed
async def test_a_task_plays_its_episode_with_the_policy_as_its_model(tokenizer):
    row = make("verifiers", "sums_taskset", OPTIONS, 1).row(0)
    answer = str(sum(map(int, row.prompt[-1]["content"].split("+"))))
    rewards = []
    for reply in (answer, "x"):
        life = Life(tokenizer, most=64)
        life.host.written = lambda _ids, reply=reply: [*tokenizer.encode(reply).tolist(), tokenizer.eos_ids[0]]
        await life.run(partial(episode_rollout(Path()), row))
        outcome = life.context.outcome_given()
        rewards.append(outcome.reward)
        assert not outcome.artefacts
        assert (outcome.metrics["right"], outcome.metrics["failed"]) == (outcome.reward, 0.0)
        assert life.context.completion == reply
        [segment] = life.context.segments()
        assert tokenizer.decode(segment.tokens[segment.mask == 1]) == reply

    assert rewards == [1.0, 0.0]


@installed
async def test_a_harness_works_on_a_task_whose_reward_is_that_of_the_taskset(tokenizer):
    source = make("verifiers", "sums_taskset", OPTIONS, 1)
    row, settings, life = source.row(0), MiniSettings(), Life(tokenizer, most=64)
    life.host.written = lambda _ids: [*tokenizer.encode("7").tolist(), tokenizer.eos_ids[0]]
    rollout = harness_rollout(
        harness_kind(settings).make(settings, Path()), settings, partial(open_sandbox, settings_of("bubblewrap"))
    )

    await life.run(partial(rollout, row))

    assert life.context.outcome_given().reward is None
    assert source.score(life.context.sampled_text(), row) == float(row.prompt[-1]["content"] in ("3+4", "4+3"))


@installed
def test_a_task_that_raises_is_a_fault_of_the_environment(tmp_path: Path):
    code = (
        (EXAMPLES / "sums_taskset.py")
        .read_text()
        .replace("return float(len(trace.last_reply))", "raise OSError('down')")
    )
    (tmp_path / "raising.py").write_text(code)
    source = make("verifiers", "raising", {"python": PYTHON, "folder": str(tmp_path)}, 1)

    with pytest.raises(EnvironmentFault, match=r"verifiers:raising: .*down"):
        source.score("1", source.row(0))
