"""What a reward claims about itself holds, and the name of each opens a grader."""

from pathlib import Path
from pkgutil import resolve_name

import pytest

from asyncrl.environment_names import EnvironmentCapability, kinds_that_can
from asyncrl.rewards.graders import GraderError, GroupGrader, GroupReward, open_grader
from asyncrl.rewards.instructions import INSTRUCTION_REWARDS
from asyncrl.rewards.kinds import BUILT_IN, FORMS, reward_of
from asyncrl.rewards.serving import reward_setup
from harness.child_graders import asked

OWN = "mine.py:reward"
SERVER = "http://127.0.0.1:9/judge"
SPECS = (*BUILT_IN, *(f"{kind}:leg_counting" for kind in kinds_that_can(EnvironmentCapability.SCORE)), OWN, SERVER)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text("def reward(completion):\n    return [1.0] * len(completion)\n")
    return tmp_path


@pytest.mark.parametrize("spec", SPECS)
def test_a_reward_has_a_grader_and_runs_in_one_place(spec: str, base: Path):
    reward = reward_of(spec)

    assert reward is not None
    assert callable(resolve_name(reward.grader))
    in_child = reward_setup(spec, base=base, time_limit_s=5.0, memory_mb=0) is not None
    assert [in_child, reward.compares, reward.remote].count(True) == 1
    if in_child and not reward.lists:
        assert callable(resolve_name(reward.spec))
    assert in_child or not (reward.lists or reward.loaded)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in INSTRUCTION_REWARDS])
async def test_a_reward_is_opened_by_its_name(spec: str, base: Path):
    grader = await open_grader(spec, base=base, time_limit_s=5.0, batch=2)

    assert grader.at_once >= 1
    await grader.close()


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec not in INSTRUCTION_REWARDS])
async def test_only_a_reward_that_takes_lists_grades_a_group(spec: str, base: Path):
    reward = reward_of(spec)
    opened = GroupGrader.open(GroupReward(spec), base=base, workers=1, time_limit_s=5.0, memory_mb=0, most=2)
    if reward is None or not reward.lists:
        with pytest.raises(GraderError, match="of a group is none"):
            await opened
        return
    grader = await opened
    try:
        assert len(await grader.grade([asked("a"), asked("b")])) == 2
    finally:
        await grader.close()


@pytest.mark.parametrize("spec", ["", "exakt", "math:sqrt 2", "http://", "https://[::1"])
async def test_what_names_no_reward_is_refused_with_all_forms(spec: str, base: Path):
    assert reward_of(spec) is None
    with pytest.raises(GraderError, match="known are exact, math, ") as refused:
        await open_grader(spec, base=base)
    assert str(refused.value).endswith(", ".join(FORMS))


def test_labels_are_read_by_rewards_that_are_known_to():
    reading = {spec for spec in SPECS if (reward := reward_of(spec)) and reward.reads_label}

    assert set(SPECS) - reading == {*INSTRUCTION_REWARDS, "random", OWN, SERVER}
