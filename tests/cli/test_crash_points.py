"""Every place where a process can die between two effects is in the table, in the code and on the page."""

import re
from pathlib import Path

import pytest

from asyncrl.cli.chaos.targets import SERVER, Target, TargetError, all_targets, drawn, each_point, parse_targets
from asyncrl.crash import POINTS, arm

ROOT = Path(__file__).parents[2]
CALL = re.compile(r'crash_point\("([\w.]+)"\)')


def calls() -> set[str]:
    files = [file for folder in ("actors", "asyncrl") for file in (ROOT / folder).rglob("*.py")]
    return {name for file in files for name in CALL.findall(file.read_text())}


def table() -> list[list[str]]:
    """The points as docs/delivery.md shows them: name, roles, what has happened and what has not, the survivor."""
    page = (ROOT / "docs" / "delivery.md").read_text()
    _, rest = page.split("| point | roles | has happened, has not | the survivor |\n|---|---|---|---|\n")
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rest.split("\n\n")[0].splitlines()]


def test_every_point_is_passed_somewhere_and_every_call_names_a_point():
    assert calls() == set(POINTS)


def test_the_page_names_for_every_point_who_passes_it_and_what_the_survivor_does():
    rows = table()

    assert {name: roles.split(", ") for name, roles, _, _ in rows} == {
        name: list(roles) for name, roles in POINTS.items()
    }
    assert [name for name, *_ in rows] == list(POINTS)
    assert all(cell for row in rows for cell in row)


def test_a_point_cannot_be_armed_for_a_role_that_never_passes_it(tmp_path: Path):
    with pytest.raises(ValueError, match=r"learner\.stepped for rollout: passed by learner"):
        arm(tmp_path, "learner.stepped", "rollout")
    with pytest.raises(ValueError, match=r"nowhere for rollout: expected one of publish\.before"):
        arm(tmp_path, "nowhere", "rollout")


# --- who is struck


def test_targets_are_named_by_role_by_kind_and_by_point():
    assert parse_targets("nats:kill, learner@learner.stepped") == [
        Target("nats", "kill"),
        Target("learner", "learner.stepped"),
    ]
    assert {target.role for target in parse_targets("@work.published")} == set(POINTS["work.published"])
    assert {target.family for target in parse_targets("learner@")} == {"crash"}
    assert {target.kind for target in parse_targets(SERVER)} == {"kill", "freeze", "wake"}
    assert parse_targets("") == all_targets()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner,writer", "--targets writer: no role is called 'writer'; expected one of prompter, rollout"),
        ("nats:melt", "--targets nats:melt: expected one of nats:kill, nats:freeze, nats:wake"),
        ("up:freeze", "--targets up:freeze: expected one of up:kill, up:wake"),
        ("engine@work.published", "expected one of engine:kill, .*engine@engine.swapped"),
        ("@nowhere", "--targets @nowhere: expected one of publish.before"),
    ],
)
def test_a_target_that_is_none_is_refused_with_what_is_allowed(text: str, message: str):
    with pytest.raises(TargetError, match=message):
        parse_targets(text)


def test_a_seed_draws_the_same_targets_and_every_family_as_often():
    first, second = (drawn(all_targets(), 7) for _ in range(2))
    found = [next(first) for _ in range(4000)]

    assert found == [next(second) for _ in found]
    families = [target.family for target in found]
    assert all(900 < families.count(family) < 1100 for family in ("kill", "freeze", "wake", "crash"))
    assert set(found) == set(all_targets())


def test_each_point_is_visited_as_often_as_asked_and_its_roles_take_turns():
    found = list(each_point(all_targets(), 3, 7))

    assert sorted(target.kind for target in found) == sorted([*POINTS] * 3)
    assert {target.role for target in found if target.kind == "work.published"} == {"rollout", "reward"}
