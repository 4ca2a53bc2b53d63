"""Rows within a band of pass rates, from the logs of a run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.errors import AsyncRLError
from asyncrl.state.learnability import Band, Selection, Which, select_rows
from harness.runs import command
from harness.stage import Stage
from topics.batches import BatchGroup, BatchMember, BatchPacked
from topics.evals import EvalScored
from topics.groups import GroupDropped
from topics.ids import stage_of
from topics.prompts import PromptIssued, PromptRow
from topics.trajectories import Reference

RESULT = Reference(1, "00", 1)
TRAINING = Which()
BY_KEEPER = {"writer": "test"}
FOUR = (1.0, 0.0, 1.0, 1.0)  # 3 of 4 pass


class Log:
    """Issues, batches and ends, as keepers would publish them."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._step = 0

    async def issued(self, prompt_id: str, *rows: str, task: str = "task", size: int = 4, member: int = 0) -> None:
        own = [PromptRow(row, row.upper(), {"tools": []}) for row in rows]
        message = PromptIssued(prompt_id, member, size, own, stage=stage_of(prompt_id), task=task)
        await publish(self._bus, message, headers=BY_KEEPER)

    async def packed(self, **rewards: tuple[float, ...]) -> None:
        self._step += 1
        groups = [BatchGroup(name, members(name, own)) for name, own in rewards.items()]
        stage = stage_of(groups[0].prompt_id)
        await publish(self._bus, BatchPacked(self._step, stage, groups, 0), headers=BY_KEEPER)

    async def dropped(self, prompt_id: str, reason: str, *rewards: float) -> None:
        await publish(self._bus, GroupDropped(prompt_id, reason, 4, rewards=list(rewards)), headers=BY_KEEPER)

    async def scored(self, eval_id: str, version: int, rewards: dict[int, float], *, samples: int) -> None:
        found = [BatchMember(f"{eval_id}-{number}", 0, RESULT, own, 1) for number, own in rewards.items()]
        message = EvalScored(eval_id, version, {}, 0.5, 3, 0, 1.0, found, dataset="pool", samples=samples)
        await publish(self._bus, message, headers=BY_KEEPER)


def members(prompt_id: str, rewards: tuple[float, ...]) -> list[BatchMember]:
    # What counts is the reward before it was shaped: a right answer that is long is right.
    return [
        BatchMember(f"{prompt_id}-{number}", 0, RESULT, reward - 0.5, 1, unshaped=reward)
        for number, reward in enumerate(rewards)
    ]


@pytest.fixture
async def log(bus: Bus) -> Log:
    """One row of each kind, and one whose rate changed."""
    made = Log(bus)
    for number, row in enumerate(["sometimes", "never", "always", "failed", "changes", "sometimes"]):
        await made.issued(f"p{number:06d}", row)
    await made.issued("w000000", "taught", size=1)
    await made.packed(w000000=(0.0,))
    await made.packed(p000000=(0.0, 0.0, 0.0, 0.0), p000004=FOUR)
    await made.dropped("p000001", "pass_rate", 0.0, 0.0, 0.5, 0.9)
    await made.dropped("p000002", "zero_variance", 1.0, 1.0, 1.0, 1.0)
    await made.dropped("p000003", "failed")
    await made.packed(p000005=(1.0, 0.0, 0.0, 0.0))
    await made.issued("p000006", "changes")
    await made.packed(p000006=(1.0, 0.0, 0.0, 0.0))
    return made


async def chosen(bus: Bus, band: Band, which: Which = TRAINING) -> tuple[Selection, list[str]]:
    rows: list[PromptRow] = []
    selection = await select_rows(bus, band, which, rows.append)
    return selection, [str(row.prompt) for row in rows]


async def test_rows_are_chosen_once_by_their_newest_group_in_the_order_of_their_issue(bus: Bus, log: Log):
    assert await chosen(bus, Band()) == (Selection(2, 1, 1, 1), ["sometimes", "changes"])


async def test_a_row_leaves_the_band_and_comes_in_again(bus: Bus, log: Log):
    await log.issued("p000007", "sometimes")
    await log.packed(p000007=FOUR)  # 0.75
    assert await chosen(bus, Band()) == (Selection(1, 1, 2, 1), ["changes"])
    assert (await chosen(bus, Band(at_most=0.75)))[1] == ["sometimes", "changes"]
    await log.issued("r000000", "sometimes")
    await log.packed(r000000=(1.0, 1.0, 0.0, 0.0))
    assert (await chosen(bus, Band()))[1] == ["sometimes", "changes"]


async def test_the_answers_of_several_groups_count_together_and_bounds_are_above_and_at_most(bus: Bus, log: Log):
    # "changes": 3 of 4, then 1 of 4; "sometimes": 0 of 4, then 1 of 4.
    assert (await chosen(bus, Band(above=0.125, at_most=0.5, groups=2)))[1] == ["changes"]
    assert (await chosen(bus, Band(above=0.124, at_most=0.5, groups=2)))[1] == ["sometimes", "changes"]
    assert (await chosen(bus, Band(above=0.124, at_most=0.49, groups=2)))[1] == ["sometimes"]
    assert (await chosen(bus, Band(passing=0.5)))[1] == ["sometimes", "never", "changes"]


async def test_rows_of_one_of_several_tasks(bus: Bus, log: Log):
    await log.issued("p000007", "other", task="words")
    await log.packed(p000007=(1.0, 0.0))
    assert await chosen(bus, Band(), Which("words")) == (Selection(1, 0, 0, 0), ["other"])


async def test_rows_are_measured_by_an_evaluation_whose_every_prompt_has_several_answers(bus: Bus, log: Log):
    for member in range(6):  # two answers of each row
        await log.issued("e000000", ("first", "second", "third")[member // 2], size=6, member=member)
    await log.scored("e000000", 0, {0: 1.0, 1: 0.0, 2: 1.0, 3: 1.0}, samples=2)
    assert await chosen(bus, Band(), Which(version=0)) == (Selection(1, 0, 1, 1), ["first"])
    with pytest.raises(AsyncRLError, match="no evaluation of version 7 on pool; there are: 0"):
        await chosen(bus, Band(), Which(version=7, dataset="pool"))


async def test_the_command_writes_a_file_that_a_task_can_have(
    bus: Bus, log: Log, stage: Callable[..., Stage], tmp_path: Path
):
    await stage().open()
    credentials = next((tmp_path).rglob("credentials/monitor.json"))
    words = ["select", bus.run, "--credentials", str(credentials)]

    code, output = await command(tmp_path, *words, "--output", "band.jsonl")
    assert code == 0, output
    assert "2 of 4 rows are in the band; 1 too hard, 1 too easy, 1 issued and not measured" in output
    rows = [json.loads(line) for line in (tmp_path / "band.jsonl").read_text().splitlines()]
    assert rows[0] == {"prompt": "sometimes", "label": "SOMETIMES", "metadata": {"tools": []}}
    assert [row["prompt"] for row in rows] == ["sometimes", "changes"]

    for options, error in (
        (["--output", "band.jsonl"], "the file is there"),
        (["--output", "band.csv"], "ends in .jsonl"),
        (["--output", "new.jsonl", "--above", "0.7"], "0 <= above < at-most <= 1"),
        (["--output", "new.jsonl", "--set", "pool"], "give the evaluated version"),
        (["--output", "new.jsonl", "--above", "0.9", "--at-most", "0.95"], "0 of 4 rows are in the band"),
    ):
        code, output = await command(tmp_path, *words, *options)
        assert (code != 0, error in output) == (True, True), output
    assert not list(tmp_path.glob("*new.jsonl*"))
