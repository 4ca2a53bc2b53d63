"""Environments of each kind make rows by number and seed, and score answers to them."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncrl.data.sources import open_source
from asyncrl.environments.kinds import KINDS, is_environment, make
from asyncrl.environments.protocol import DataError
from asyncrl.functions import is_function
from asyncrl.rewards.graders import open_grader
from asyncrl.rewards.score import GradeRequest

ROOT = Path(__file__).parents[2] / "asyncrl" / "environments"


class Sample(NamedTuple):
    """An environment whose label is the answer."""

    name: str
    parameters: dict[str, Any]


SAMPLES = {"reasoning-gym": Sample("leg_counting", {"max_animals": 4})}


def test_the_kinds_are_the_files_that_make_environments_and_have_a_sample_here():
    found = {path.stem.replace("_", "-") for path in ROOT.glob("*.py") if "\nmake = " in path.read_text()}

    assert found == set(KINDS) == SAMPLES.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_depends_on_seed_and_number_alone_and_names_its_environment(kind: str):
    name, parameters = SAMPLES[kind]
    one, other, another = (make(kind, name, parameters, seed) for seed in (1, 1, 2))

    assert [one.row(number) for number in (3, 0, 600)] == [other.row(number) for number in (3, 0, 600)]
    assert one.row(3) != another.row(3)
    assert one.row(3).metadata["source_dataset"] == name
    assert one.row(3).metadata["source_options"] == parameters
    assert name in one.describe()


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_scored_also_by_an_environment_of_another_seed(kind: str):
    row = make(kind, *SAMPLES[kind], 1).row(3)
    scorer = make(kind, *SAMPLES[kind], 0)

    assert scorer.score(str(row.label), row) == 1.0
    assert scorer.score("nonsense", row) < 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_name_and_an_unknown_parameter_are_refused(kind: str):
    name, parameters = SAMPLES[kind]

    with pytest.raises(DataError, match=f"close: .*{name}"):
        make(kind, name[:-1], {}, 0)
    with pytest.raises(DataError, match="has no option colour; it takes "):
        make(kind, name, {**parameters, "colour": "red"}, 0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_task_takes_its_rows_and_its_reward_from_an_environment(kind: str, tmp_path: Path):
    name, parameters = SAMPLES[kind]
    spec = f"{kind}:{name}"
    assert is_environment(spec)
    assert is_environment(kind)
    assert not is_environment(f"{kind}.py:{name}")
    assert not is_function(spec)
    row = open_source(spec, options=parameters, seed=1, base=tmp_path).row(3)

    for reward in (kind, spec):
        grader = await open_grader(reward, base=tmp_path)
        try:
            graded = await grader.grade(GradeRequest(str(row.label), row.prompt, row.label, row.metadata, "p000000-0"))
        finally:
            await grader.close()
        assert graded.reward == 1.0
