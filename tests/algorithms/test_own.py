"""The user's own losses, advantages and filters: found by the config, tried out, used by all of a run."""

import sys
import textwrap
import threading
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import ADVANTAGES, Estimator, group_advantages
from asyncrl.algorithms.contract import advantage_problem, filter_problem, loss_problem
from asyncrl.algorithms.filters import FILTERS, filtered_by
from asyncrl.algorithms.losses import LOSSES, loss_of
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.algorithms.token_loss import Loss
from asyncrl.config.load import load_config, with_overrides
from asyncrl.config.settings import Config
from asyncrl.training.objective import objective_of
from harness.audited import audited_clean, messages_on, topics_left_by
from harness.configs import problems, the_problem
from harness.runs import command, up
from topics.batches import Objective
from topics.groups import GROUP_DROPPED
from topics.topic import BATCHES

MINE = '''
    import numpy as np

    from asyncrl import Loss


    class Gated(Loss, frozen=True):
        """As CONTRIBUTING.md has it."""

        steepness: float = 1.0

        def __call__(self, logprobs, tokens):
            ratio = (logprobs - tokens.behaviour).clamp(-20.0, 20.0).exp()
            gate = (self.steepness * (ratio - 1.0)).sigmoid() * 4.0 / self.steepness
            trained = tokens.weights > 0
            return -(tokens.weights * gate * tokens.advantages).sum(), {"tokens": trained.sum()}


    def plain(logprobs, tokens):
        return -(tokens.weights * tokens.advantages * logprobs).sum(), {"tokens": (tokens.weights > 0).sum()}


    def mean_of_batch(logprobs, tokens):
        return -(tokens.advantages * logprobs).mean(), {"tokens": (tokens.weights > 0).sum()}


    def ranks(groups):
        return [np.argsort(np.argsort(rewards)) - (len(rewards) - 1) / 2 for rewards in groups]


    def one_for_all(groups):
        return [0.0 for _ in groups]


    def too_good(members):
        return min(member.reward for member in members) == 1.0


    def share(members):
        return sum(member.reward for member in members)


    def rooted(members):
        return min(member.reward for member in members) ** 0.5 > 1.0


    def of_dictionary(groups):
        return {}["rewards"]


    class Raising(Loss, frozen=True):
        def __call__(self, logprobs, tokens):
            raise KeyError("reference")


    class Bare(Loss, frozen=True):
        strength: float

        def __call__(self, logprobs, tokens):
            return -self.strength * (tokens.weights * logprobs).sum(), {"tokens": (tokens.weights > 0).sum()}


    number = 3
'''


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(textwrap.dedent(MINE))
    config = tmp_path / "own.toml"
    config.write_text(
        'run = "own"\n[learner]\nloss = "mine.py:Gated"\nloss_options = { steepness = 2.0 }\n'
        'advantage = "mine.py:ranks"\nfilters = ["mine.py:too_good", "zero_variance"]\n'
    )
    return config


def test_a_config_names_ones_own_and_the_run_finds_them_from_anywhere(mine: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir("/")
    stored = msgspec.to_builtins(load_config(str(mine)).config)
    config = msgspec.convert(stored, Config)
    objective = objective_of(config, 1)

    folder = mine.parent
    assert (objective.loss, objective.loss_options) == (f"{folder}/mine.py:Gated", {"steepness": 2.0})
    assert loss_of(msgspec.convert(msgspec.to_builtins(objective), Objective)).steepness == 2.0
    assert group_advantages([[3.0, 1.0, 2.0]], [config.learner.advantage])[0].tolist() == [1.0, -1.0, 0.0]
    assert filtered_by([Member(1.0)] * 2, objective.filters, {}) == "too_good"
    assert filtered_by([Member(0.0)] * 2, objective.filters, {}) == "zero_variance"
    assert filtered_by([Member(0.0), Member(1.0)], objective.filters, {}) == ""
    monkeypatch.chdir(folder)
    changed = with_overrides(config, ["learner.loss=mine.py:plain", "learner.loss_options={}"], base=folder)
    assert changed.learner.loss == f"{folder}/mine.py:plain"
    assert sorted(LOSSES) == sorted(name for name in LOSSES if ":" not in name)  # no list of names has them


class Member(msgspec.Struct):
    reward: float


def test_what_ones_own_raises_names_it_and_is_no_invalid_message(mine: Path):
    folder = mine.parent
    with pytest.raises(AlgorithmError, match=r"rooted raised[\s\S]*TypeError: '>' not supported") as raised:
        filtered_by([Member(-0.2)] * 2, [f"{folder}/mine.py:rooted"], {})
    with pytest.raises(
        AlgorithmError, match=r"of_dictionary raised[\s\S]*KeyError: 'rewards'\nit gets a list of arrays, the rew"
    ):
        group_advantages([[0.0, 1.0]], [f"{folder}/mine.py:of_dictionary"])
    with pytest.raises(AlgorithmError, match=r"Raising.__call__ raised[\s\S]*KeyError: 'reference'"):
        loss_of(Objective(loss=f"{folder}/mine.py:Raising"))(None, None)

    # A reader takes these for the message's fault, and would refuse a valid grade.
    assert not isinstance(raised.value, LookupError | ValueError)
    assert raised.value.fatal
    mine.write_text('run = "own"\n[learner]\nfilters = ["mine.py:rooted"]\n')
    assert "rooted raised" in the_problem(str(mine), files=True).message


def test_what_a_config_cannot_find_is_one_problem_at_its_line(mine: Path):
    text = mine.read_text()
    mine.write_text(text.replace("mine.py:ranks", "mine.py:rank").replace("mine.py:too_good", "other.py:f"))
    found = problems(str(mine))

    assert [(problem.key, problem.line) for problem in found] == [("learner.advantage", 5), ("learner.filters", 6)]
    assert found[0].message.endswith("mine.py has no function 'rank'; it has ranks")
    assert "no file" in found[1].message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.loss=mine.py:number", "'number' is no function but int"),
        ("learner.loss=mine.py:Path", "has no function 'Path'"),
        ("learner.advantage=mine.py:Gated", "it is a class, expected a function of the rewards of groups"),
        ("learner.loss=mine.py:Bare", "its option strength has no default; give it one"),
        ("learner.loss=mine.py", '"ppo", "reinforce", "sapo", "sft", "path/to/file.py:name"'),
        ("learner.loss_options.cap=3", 'has no option "cap", its options are steepness'),
        ("learner.loss_options.steepness=high", 'found "high" (string), expected number'),
        ("learner.filters=['mine.py:too_good', 'mine.py:too_good']", None),
    ],
)
def test_what_is_none_of_the_kind_is_refused(mine: Path, override: str, expected: str | None):
    if expected is None:
        assert load_config(str(mine), overrides=[override])
    else:
        assert expected in the_problem(str(mine), override).message


def test_two_filters_with_one_reason_are_refused(mine: Path):
    (mine.parent / "other.py").write_text("def zero_variance(members): return False\n")

    problem = the_problem(str(mine), "learner.filters=['other.py:zero_variance', 'zero_variance']")

    assert problem.message.startswith('two filters are called "zero_variance"')


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("learner.loss=mine.py:mean_of_batch", "mine.py:mean_of_batch: its loss, gradient or sums depend on tokens of"),
        (
            "learner.advantage=mine.py:one_for_all",
            "rewards of [(4,), (1,), (2,), (8,), (3,)]; it is one number a member",
        ),
    ],
)
def test_check_tries_them_out(mine: Path, override: str, expected: str):
    with_model = ["model.path=none", override, *(["learner.loss_options={}"] if "loss" in override else [])]
    found = [problem.message for problem in problems(str(mine), *with_model, files=True)]

    assert [message for message in found if expected in message]
    assert len([message for message in found if "mine.py" in message]) == 1


def test_an_option_that_ones_own_has_not_is_the_one_problem_where_files_are_checked_too(mine: Path):
    found = [problem.message for problem in problems(str(mine), "learner.loss_options.cap=3", files=True)]

    assert [message for message in found if "mine.py" in message] == [
        f'loss "{mine.parent}/mine.py:Gated" has no option "cap", its options are steepness'
    ]


def test_ones_own_that_keep_the_contract_have_no_problem(mine: Path):
    for name in ("Gated", "plain"):
        assert loss_problem(LOSSES[f"{mine.parent}/mine.py:{name}"]()) == ""
    assert advantage_problem(ADVANTAGES[f"{mine.parent}/mine.py:ranks"]) == ""
    assert filter_problem(FILTERS[f"{mine.parent}/mine.py:too_good"](), [[Member(1.0)], [Member(0.0)] * 2]) == ""


def broken(call):
    return type("Broken", (Loss,), {"__call__": call}, frozen=True)()


def sums(tokens):
    return {"tokens": (tokens.weights > 0).sum()}


def weighted(logprobs, tokens):
    return -(tokens.weights * tokens.advantages * logprobs).sum()


def row_of_neighbours(self, logprobs, tokens):
    """Each token's gradient is scaled by that of the longest row of the micro-batch."""
    return weighted(logprobs, tokens) * torch.bincount(tokens.rows).max(), sums(tokens)


def raising(self, logprobs, tokens):
    raise KeyError("reference")


BROKEN = {
    "returned Tensor": lambda self, logprobs, tokens: weighted(logprobs, tokens),
    "expected a finite tensor without dimensions": lambda self, logprobs, tokens: (-logprobs, sums(tokens)),
    "returned the loss nan": lambda self, logprobs, tokens: (weighted(logprobs, tokens) * np.nan, sums(tokens)),
    "of torch.float16, expected torch.float32": lambda self, logprobs, tokens: (
        weighted(logprobs, tokens).half(),
        sums(tokens),
    ),
    'its sum "turn" is': lambda self, logprobs, tokens: (
        weighted(logprobs, tokens),
        sums(tokens) | {"turn": tokens.weights.sum() * 1j},
    ),
    "a sum is called 3": lambda self, logprobs, tokens: (
        weighted(logprobs, tokens),
        sums(tokens) | {3: tokens.weights.sum()},
    ),
    'its sums are none; expected "tokens"': lambda self, logprobs, tokens: (weighted(logprobs, tokens), {}),
    'its sum "mean" is': lambda self, logprobs, tokens: (
        weighted(logprobs, tokens),
        sums(tokens) | {"mean": weighted(logprobs, tokens)},
    ),
    "no gradient": lambda self, logprobs, tokens: (weighted(logprobs.detach(), tokens), sums(tokens)),
    "depend on tokens of weight 0": lambda self, logprobs, tokens: (
        -(tokens.advantages * logprobs).sum(),
        sums(tokens),
    ),
    "do not add up to that of all their rows": row_of_neighbours,
    'its sums "mean" of three': lambda self, logprobs, tokens: (
        weighted(logprobs, tokens),
        sums(tokens) | {"mean": (tokens.weights * logprobs.detach()).sum() / (tokens.weights > 0).sum()},
    ),
    "for the same tokens; a step that is made again": lambda self, logprobs, tokens: (
        weighted(logprobs, tokens) * float(torch.rand(())),
        sums(tokens),
    ),
    "it raised\n": raising,
    "SystemExit: 3": lambda self, logprobs, tokens: sys.exit(3),
    "it changes the advantages": lambda self, logprobs, tokens: (
        weighted(logprobs, tokens._replace(advantages=tokens.advantages.clamp_(-1.0, 1.0))),
        sums(tokens),
    ),
}


@pytest.mark.parametrize("expected", BROKEN)
def test_the_contract_names_what_a_loss_breaks(expected: str):
    assert expected in loss_problem(broken(BROKEN[expected]))


def test_the_contract_names_what_an_advantage_or_a_filter_breaks():
    def in_place(groups):
        groups[0][:] = 0.0
        return groups

    infinite = Estimator(lambda groups: [rewards / rewards.std() for rewards in groups])
    with np.errstate(all="ignore"):
        assert "not all advantages are finite" in advantage_problem(infinite)
    assert "it changes the rewards" in advantage_problem(Estimator(in_place))
    assert "of shapes [(1,)" in advantage_problem(Estimator(lambda groups: [rewards[:1] for rewards in groups]))
    answers = iter([True, False])
    drawn = count()
    noisy = Estimator(lambda groups: [rewards + next(drawn) for rewards in groups])
    assert "to one group; a step that is made again, a replay" in advantage_problem(noisy)
    assert "answers True and then False" in filter_problem(lambda members: next(answers), [[Member(1.0)]])
    assert filter_problem(lambda members: np.bool_(members[0].reward > 0), [[Member(1.0)]]) == ""
    assert "answers 1.0 about a group, expected True or False" in filter_problem(
        lambda members: members[0].reward, [[Member(1.0)]]
    )
    assert "it changes the members" in filter_problem(lambda members: members.clear() is not None, [[Member(1.0)]])


def test_the_contract_does_not_wait_for_one_that_hangs(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asyncrl.algorithms.contract._LIMIT_S", 0.2)
    ended = threading.Event()
    hanging = Estimator(lambda groups: ended.wait() and groups)

    assert "did not return within 0.2 s" in advantage_problem(hanging)
    ended.set()


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("0.0", r"advantage of shapes \[\(\)\] for rewards of \[\(2,\)\]"),
        ("group * 1j", "values of type complex128, expected real numbers"),
        ("group.astype(str)", "values of type <U32, expected real numbers"),
        ("group + 1e300", "must be a finite number, in float32"),
    ],
)
def test_an_advantage_that_breaks_its_contract_in_a_run_is_named(tmp_path: Path, advantage: str, expected: str):
    (tmp_path / "mine.py").write_text(f"def mine(groups):\n    return [{advantage} for group in groups]\n")
    with pytest.raises(AlgorithmError, match=expected):
        group_advantages([[0.0, 1.0]], [f"{tmp_path}/mine.py:mine"])


@pytest.mark.slow
async def test_a_run_trains_with_ones_own_and_is_audited_and_replayed(tmp_path: Path, mine: Path):
    own = [
        "learner.steps=3",
        f"learner.loss={tmp_path}/mine.py:Gated",
        "learner.loss_options.steepness=2.0",
        f"learner.advantage={tmp_path}/mine.py:ranks",
        f"learner.filters=['{tmp_path}/mine.py:each_fourth']",
    ]
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\n\ndef each_fourth(members):\n    return int(members[0].trajectory_id[1:7]) % 4 == 3\n")
    async with up(tmp_path, *own) as run:
        assert await run.ended(120) == 0, run.story
        async with topics_left_by(run) as bus:
            dropped = (await messages_on(bus, BATCHES)).on(GROUP_DROPPED)
    await audited_clean(tmp_path)
    code, output = await command(tmp_path, "replay", "short")

    by_filter = [drop.prompt_id for drop in dropped if drop.reason == "each_fourth"]
    assert by_filter
    assert all(int(name[1:]) % 4 == 3 for name in by_filter)
    assert code == 0, output
    assert "bit-equal" in output
