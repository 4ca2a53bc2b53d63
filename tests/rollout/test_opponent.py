"""A frozen model answers a rollout function: its answers are recorded, and not trained."""

import string
from functools import partial
from pathlib import Path

import pytest

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.examples.nim import rollout
from asyncrl.training.init_model import ModelShape, create_model
from harness.configs import the_problem
from harness.lives import Life
from topics.prompts import PromptRow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TaskTokenizer:
    folder = Path(tmp_path_factory.mktemp("model"))
    create_model(folder, alphabet=string.printable, seed=1, shape=ModelShape(context=64))
    return TaskTokenizer.load(folder)


def life_of(tokenizer: TaskTokenizer, own: list[str], others: list[str], recorded=()) -> Life:
    life = Life(tokenizer, recorded, most=2)
    life.host.written = lambda _ids: [*tokenizer.encode(own.pop(0)).tolist(), tokenizer.eos_ids[0]]
    life.host.asked = []

    async def opponent(ids, limits):
        life.host.asked.append((tokenizer.decode(ids), limits.max_new_tokens))
        text = others.pop(0)
        return tokenizer.encode(text).tolist(), "stop", text

    life.host.opponent = opponent
    return life


async def test_moves_of_the_opponent_are_in_no_row_and_are_repeated_on_another_worker(tokenizer):
    first = life_of(tokenizer, ["3", "1"], ["2"])
    await first.run(partial(rollout, PromptRow("6:")))
    await first.host.checkpoint()
    again = life_of(tokenizer, [], [], first.host.kept)
    await again.run(partial(rollout, PromptRow("6:")))

    assert first.host.asked == [("3:", 2)]
    assert again.host.asked == []
    for life in (first, again):
        assert life.context.outcome_given().reward == 1.0
        sampled = [segment.tokens[segment.mask == 1] for segment in life.context.segments()]
        assert [life.context.tokenizer.decode(tokens) for tokens in sampled] == ["3", "1"]


@pytest.mark.parametrize(("own", "others", "reward"), [(["4"], [], 0.0), (["1"], ["x"], 1.0), (["1"], ["2"], 0.0)])
async def test_an_impossible_move_loses_and_the_last_stick_wins(own, others, reward: float, tokenizer):
    life = life_of(tokenizer, own, others)

    await life.run(partial(rollout, PromptRow("3:")))

    assert life.context.outcome_given().reward == reward


def test_engines_of_an_opponent_are_not_those_of_training():
    problem = the_problem("self-play", "rollout.opponent_engines=other")

    assert problem.message == 'found "other", expected the name of a group of engine.groups; there is train, frozen'
