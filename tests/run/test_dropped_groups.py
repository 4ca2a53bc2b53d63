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


@pytest.mark.slow
async def test_a_filter_that_drops_everything_ends_the_run_with_the_counts_and_others_let_it_go_on(tmp_path: Path):
    (tmp_path / "users.py").write_text("def flat(completion):\n    return 1.0\n")
    settings = ["reward.function=users.py:flat", "learner.filters=['zero_variance']", "buffer.most_dropped=3"]
    async with up(tmp_path, *WITHOUT_MODEL, *settings) as run:
        assert await run.ended() == 1, run.story

    pattern = r"buffer-1: (\d+) groups were dropped \((\d+) for zero_variance\) and no batch was packed"
    found = re.search(pattern, run.error)
    assert found is not None and found[1] == found[2] and int(found[1]) >= 3 * 8, run.error
    assert "buffer.most_dropped allows 3 for each" in run.error
    assert re.search(r"dropped  \d+ for zero_variance", run.out), run.out
    assert [row.state for row in runs_in(run.root.parent)] == ["failed"]
    async with resume(tmp_path, "short", "--set", "learner.filters=[]") as run:
        assert await run.ended() == 0, run.story
    assert [row.state for row in runs_in(run.root.parent)] == ["finished"]
    assert run.steps() == [1, 2, 3, 4, 5]


def a_dropping_buffer(count: int, *, reason: str = "zero_variance", stage: str = "p", most: int = 2) -> Feed:
    """A buffer of three groups in a batch, after so many dropped groups, a second apart."""
    fed = Feed(BufferFold(Plan.of(Config(buffer=BufferSettings(batch_groups=3, most_dropped=most)))))
    fed.publish(RunOpened(steps=5, warmup_steps=0, settings={}), at_s=9)
    for number in range(count):
        fed.publish(GroupDropped(f"{stage}{number:06d}", reason, 2), at_s=10 + number)
    return fed


def test_a_buffer_gives_up_after_so_many_dropped_groups_without_a_batch():
    assert a_dropping_buffer(5).fold.should_give_up() == ""
    assert a_dropping_buffer(6).fold.should_give_up().startswith("6 groups were dropped (6 for zero_variance)")
    assert a_dropping_buffer(6, reason="lag").fold.should_give_up().startswith("6 groups were dropped (6 for lag)")
    assert a_dropping_buffer(600, most=0).fold.should_give_up() == ""
    assert a_dropping_buffer(600, stage="l").fold.should_give_up() == ""
    assert a_dropping_buffer(6).packed(1, "p000100").fold.should_give_up() == ""


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
