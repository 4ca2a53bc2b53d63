"""A run whose groups are all dropped ends with the counts by reason, and goes on with other settings."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from actors.buffer.fold import BufferFold
from actors.buffer.state import Plan
from asyncrl.cli.runs import runs_in
from asyncrl.config.settings import BufferSettings, Config
from asyncrl.state.screen import render
from asyncrl.state.status import run_status
from harness.folds import Feed
from harness.runs import WITHOUT_MODEL, resume, up
from harness.states import MadeState
from topics.actors import RunOpened
from topics.groups import GroupDropped
from topics.stages import StageBegan


@pytest.mark.slow
async def test_a_filter_that_drops_everything_ends_the_run_with_the_counts_and_others_let_it_go_on(tmp_path: Path):
    (tmp_path / "users.py").write_text("def flat(completion):\n    return 1.0\n")
    settings = ["reward.function=users.py:flat", "learner.filters=['zero_variance']", "buffer.max_dropped_groups=3"]
    async with up(tmp_path, *WITHOUT_MODEL, *settings) as run:
        assert await run.ended() == 1, run.story

    pattern = r"buffer-1: (\d+) groups in a row were dropped \((\d+) for zero_variance\)"
    found = re.search(pattern, run.error)
    assert found is not None and found[1] == found[2] and int(found[1]) >= 3 * 8, run.error
    assert "buffer.max_dropped_groups allows 3 for each" in run.error
    assert re.search(r"dropped  \d+ for zero_variance", run.out), run.out
    assert [row.state for row in runs_in(run.root.parent)] == ["failed"]
    async with resume(tmp_path, "short") as run:
        assert await run.ended() == 1, run.story
    assert re.search(pattern, run.error), run.error
    async with resume(tmp_path, "short", "--set", "learner.filters=[]") as run:
        assert await run.ended() == 0, run.story
    assert [row.state for row in runs_in(run.root.parent)] == ["finished"]
    assert run.steps() == [1, 2, 3, 4, 5]


def a_dropping_buffer(count: int, *, reason: str = "zero_variance", stage: str = "p", most: int = 2) -> Feed:
    """A buffer of three groups in a batch, after so many dropped groups, a second apart."""
    fed = Feed(BufferFold(Plan.of(Config(buffer=BufferSettings(batch_groups=3, max_dropped_groups=most)))))
    fed.publish(RunOpened(steps=5, warmup_steps=0, settings={}), at_s=9)
    for number in range(count):
        fed.publish(GroupDropped(f"{stage}{number:06d}", reason, 2), at_s=10 + number)
    return fed


def test_a_buffer_gives_up_after_so_many_dropped_groups_without_a_batch():
    assert a_dropping_buffer(5).fold.should_give_up() == ""
    found = a_dropping_buffer(6).fold.should_give_up()
    assert found.startswith("6 groups in a row were dropped (6 for zero_variance)")
    assert a_dropping_buffer(600, reason="lag").fold.should_give_up() == ""  # of those that wait for a learner
    assert a_dropping_buffer(600, most=0).fold.should_give_up() == ""
    assert a_dropping_buffer(600, stage="l").fold.should_give_up() == ""
    assert a_dropping_buffer(6).packed(1, "p000100").fold.should_give_up() == ""


def test_a_filter_that_keeps_one_of_many_lets_a_run_go_on():
    fed = a_dropping_buffer(5)
    for number in range(20, 60, 10):
        kept(fed, f"p{number:06d}", at_s=number)
        for place in range(1, 6):
            fed.publish(GroupDropped(f"p{number + place:06d}", "zero_variance", 2), at_s=number + place)
        assert fed.fold.should_give_up() == ""
    fed.publish(GroupDropped("p000099", "zero_variance", 2), at_s=99)
    assert fed.fold.should_give_up().startswith("6 groups in a row")


def test_a_group_that_was_kept_counts_in_whatever_order_its_grades_and_the_drops_are_read():
    fed = kept(a_dropping_buffer(0), "p000020", at_s=13.5)
    for number in range(6):
        fed.publish(GroupDropped(f"p{number:06d}", "zero_variance", 2), at_s=10 + number)
    assert fed.fold.state.dropped == {"zero_variance": 2}


def test_live_turns_and_evaluations_that_are_graded_keep_nothing():
    assert kept(a_dropping_buffer(6), "l000020", at_s=50).fold.should_give_up()
    assert kept(a_dropping_buffer(6), "e000020", at_s=50, stage="eval").fold.should_give_up()


def test_a_stage_that_begins_lets_the_count_begin_anew():
    fed = a_dropping_buffer(6).publish(StageBegan(name="hard", prompt=6, request=1), at_s=100)
    assert fed.fold.should_give_up() == ""


def kept(fed: Feed, prompt_id: str, *, at_s: float, stage: str = "rl") -> Feed:
    """A buffer whose group of this name is graded and passes its filters then."""
    for member in range(2):
        fed.issued(f"{prompt_id}-{member}", stage=stage, at_s=at_s)
    for member in range(2):
        fed.graded(f"{prompt_id}-{member}", float(member), stage=stage, at_s=at_s)
    return fed


def test_groups_dropped_before_a_run_went_on_do_not_count_in_whatever_order_its_logs_are_read():
    opened = RunOpened(steps=5, warmup_steps=0, settings={})
    assert a_dropping_buffer(6).publish(opened, at_s=100).fold.should_give_up() == ""

    fed = a_dropping_buffer(0).publish(opened, at_s=100)
    for number in range(6):
        fed.publish(GroupDropped(f"p{number:06d}", "zero_variance", 2), at_s=10 + number)
    assert fed.fold.should_give_up() == ""


def test_the_panel_counts_dropped_groups_by_reason_until_a_batch_is_packed():
    case = MadeState()
    for number, reason in enumerate(["zero_variance", "zero_variance", "lag"]):
        case.publish(GroupDropped(f"p{number:06d}", reason, 2))
    assert "2 dropped for zero_variance   1 dropped for lag" in panel(case)

    case.packed(6)
    assert "dropped for" not in panel(case)


def panel(case: MadeState) -> str:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(render(run_status(case.state, case.state.now_ns)))
    return console.file.getvalue()
