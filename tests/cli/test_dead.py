"""Poison, dead letters, and bringing back what came to nothing."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from actors.prompter.actor import decide
from actors.prompter.fold import PrompterFold
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last, read_message
from asyncrl.bus.publish import publish, read
from asyncrl.config.settings import Config
from asyncrl.data.sources import open_source
from asyncrl.errors import AsyncRLError
from asyncrl.state.dead_letters import read_letters, reissue
from harness.audited import messages_on, topics_left_by
from harness.folds import Feed
from harness.runs import WITHOUT_MODEL, address_of, command, up
from harness.stage import until
from topics.actors import REISSUE_REQUESTED, DeadLetter, ReissueRequested
from topics.batches import BATCH_PACKED
from topics.groups import GROUP_DROPPED, GroupDropped
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.topic import BATCHES, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED
from topics.wire import encode, headers_of

SLOW = pytest.mark.slow

# --- the prompter


def prompter(**tables: Any) -> Feed:
    given = {"buffer": {"batch_groups": 2, "max_lag": 0}, "rollout": {"group_size": 2}, "learner": {"steps": 4}}
    return Feed(PrompterFold(msgspec.convert(given | tables, Config)))


def names(fed: Feed) -> list[str]:
    return [f"{wanted.prompt_id}-{wanted.member}" for wanted in fed.fold.wanted()]


def issue(fed: Feed, *wanted: str) -> Feed:
    for name in wanted:
        fed.issued(name)
    return fed


def asked(fed: Feed, prompt_id: str) -> Feed:
    return fed.publish(ReissueRequested(prompt_id))


FIRST = ("p000000-0", "p000000-1", "p000001-0", "p000001-1")


def test_a_reissued_prompt_takes_the_next_credit_and_the_order_of_the_data_goes_on():
    fed = asked(issue(prompter(), *FIRST), "p000000")
    assert names(fed) == []

    fed.dropped("p000000")
    assert names(fed) == ["r000000-0", "r000000-1"]

    issue(fed, "r000000-0")
    assert names(fed) == ["r000000-1"]  # cut short by a crash: it is open already

    issue(fed, "r000000-1")
    assert names(fed) == []
    assert fed.fold.open_groups == 2

    fed.packed(1, "p000001", "r000000").trained(1)
    assert names(fed) == ["p000002-0", "p000002-1", "p000003-0", "p000003-1"]


def test_each_request_is_a_group_of_its_own_on_the_row_of_the_first():
    fed = asked(asked(prompter(), "p000041"), "r000000")
    wanted = [item for item in fed.fold.wanted() if item.places]
    assert [(item.prompt_id, item.group.origin, item.places) for item in wanted] == [
        ("r000000", "p000041", range(41, 42)),
        ("r000001", "p000041", range(41, 42)),
    ]

    row = open_source("reverse", options={"letters": 4}, seed=1, base=Path()).row(41)
    messages = [decide(item, 1, [row]) for item in wanted]
    assert [message.rows for message in messages] == [[row], [row]]
    assert len({message.seed for message in messages}) == 2
    assert headers_of(messages[0])["origin"] == "p000041"


def test_only_prompts_of_rl_are_issued_again():
    with pytest.raises(ValueError, match="'w000001' is no prompt of RL"):
        asked(prompter(), "w000001")


# --- the command


async def issued(bus: Bus, prompt_id: str) -> None:
    message = PromptIssued(prompt_id=prompt_id, member=0, group_size=1, rows=[PromptRow("^ab=", "ba")])
    await publish(bus, message)


async def test_a_prompt_is_issued_again_once_it_came_to_nothing(bus: Bus):
    await issued(bus, "p000007")
    with pytest.raises(AsyncRLError, match="p000007 is not issued again: neither it nor one of its trajectories was"):
        await reissue(bus, "p000007-0")
    with pytest.raises(AsyncRLError, match="p000008 was never issued"):
        await reissue(bus, "p000008")
    with pytest.raises(AsyncRLError, match="'w000001' is no prompt of RL"):
        await reissue(bus, "w000001")

    await publish(bus, GroupDropped("p000007", "failed", 1))

    assert await reissue(bus, "p000007-0") == "p000007 is issued again as a new group, as soon as there is credit"
    newest = await read_last(bus, REISSUE_REQUESTED)
    assert newest is not None
    assert (await read(bus, ReissueRequested, newest)).prompt_id == "p000007"


async def test_an_unreadable_message_of_many_writers_is_published_again_as_it_was(bus: Bus):
    headers = {"trajectory": "p000007-0", "attempt": "0", "Nats-Msg-Id": "once"}
    subject = TRAJECTORY_GENERATED.subject(bus.run, "p000007-0")
    ack = await bus.store(subject, b"garbage", headers)
    kept = DeadLetter("trajectory.generated", "TRAJECTORIES", ack.seq, "not a TrajectoryGenerated", headers, b"garbage")
    await publish(bus, kept)

    assert await reissue(bus, "1") == "message 1 of TRAJECTORIES is published again as message 2"

    again = await read_message(bus, TRAJECTORIES, 2)
    assert again is not None
    assert (again.subject, again.data, again.headers["trajectory"]) == (subject, b"garbage", "p000007-0")
    assert again.headers["Nats-Msg-Id"].startswith("trajectory.generated:again:1:")


async def test_nobody_but_its_keeper_writes_to_a_log(bus: Bus):
    kept = DeadLetter("batch.packed", "BATCHES", 3, "not a BatchPacked", {}, b"garbage")
    await publish(bus, kept)

    with pytest.raises(
        AsyncRLError, match="message 3 of BATCHES is not published again: only the keeper of a log writes it"
    ):
        await reissue(bus, "1")
    with pytest.raises(AsyncRLError, match="there is no dead letter 2"):
        await reissue(bus, "2")


async def test_a_dead_letter_of_an_issue_is_shown_with_the_row_of_its_group(bus: Bus):
    await issued(bus, "p000007")
    member = PromptIssued(prompt_id="p000007", member=1, group_size=2)
    kept = DeadLetter(
        "prompt.issued", "PROMPTS", 2, "poison: 5 deliveries", {"trajectory": "p000007-1"}, encode(member), True
    )
    await publish(bus, kept)

    [letter] = await read_letters(bus)

    shown = (await letter.in_full(bus))["message"]
    assert (shown["member"], shown["rows"]) == (1, [PromptRow("^ab=", "ba")])


# --- poison


KILLER = '''
"""A rollout that kills its process for the first prompt it sees while the file `armed` is there."""
import os
import signal
from pathlib import Path

from asyncrl.rollout.context import single_turn

HERE = Path(__file__).parent

async def rollout(row, context):
    if (HERE / "armed").exists():
        marked = HERE / "marked"
        if not marked.exists():
            marked.write_text(row.prompt)
        if marked.read_text() == row.prompt:
            os.kill(os.getpid(), signal.SIGKILL)
    await single_turn(row, context)
'''


async def letters(folder: Path) -> list[dict[str, Any]]:
    code, output = await command(folder, "dead", "--json")
    assert code == 0, output
    found: list[dict[str, Any]] = json.loads(output)
    return found


async def ends(bus: Bus) -> tuple[set[str], set[str]]:
    """Return the groups that were packed, and those that were dropped for their age."""
    said = await messages_on(bus, BATCHES)
    packed = {group.prompt_id for batch in said.on(BATCH_PACKED) for group in batch.groups}
    return packed, {group.prompt_id for group in said.on(GROUP_DROPPED) if group.reason == "lag"}


@SLOW
async def test_a_prompt_that_kills_its_workers_ends_as_poison_and_healthy_ones_never_do(tmp_path: Path):
    (tmp_path / "killer.py").write_text(KILLER)
    settings = ["task.rollout=killer.py:rollout", "rollout.group_size=1", "workers.lease_s=1.0"]
    settings += ["learner.advantage=none", "buffer.batch_groups=8"]
    async with up(tmp_path, *settings, *WITHOUT_MODEL, "learner.steps=3000", "learner.checkpoint_every=5000") as run:
        await run.reaches(lambda: len(run.steps()) >= 2, "two steps")
        (tmp_path / "armed").touch()
        await run.reaches(lambda: '"reason": "poison"' in run.log("rollout-1"), "the poison is found")
        [letter] = await letters(tmp_path)
        (tmp_path / "armed").unlink()
        prompt_id = letter["trajectory"].rsplit("-", 1)[0]
        code, shown = await command(tmp_path, "dead", "--show", str(letter["number"]))
        assert code == 0, shown
        code, output = await command(tmp_path, "dead", "--reissue", str(letter["number"]))
        assert code == 0, output
        bus = await Bus.connect(address_of(run), "short")

        async def has_ended() -> bool:
            return any("r000000" in groups for groups in await ends(bus))

        # Steps follow so fast on one another here that it may be too old for the next batch.
        await until(has_ended, "its group is packed, or dropped for its age")
        await bus.close()
        code, explained = await command(tmp_path, "explain", "r000000-0")
        assert code == 0 and (" packed" in explained or " dropped" in explained), explained
        run.interrupt()
        assert await run.ended() == 0, run.story
        code, audited = await command(tmp_path, "audit")
        assert code == 0, audited

    assert (letter["topic"], letter["stream"]) == ("prompt.issued", "PROMPTS")
    assert letter["reason"] == "poison: 3 runs without progress, then 2 alone that ended in exit code -9"
    assert json.loads(shown)["message"]["rows"][0]["prompt"] == (tmp_path / "marked").read_text()
    assert output.startswith(f"{prompt_id} is issued again as a new group")
    assert run.summary["failed_trajectories_by_reason"] == {"poison": 1}
    async with topics_left_by(run) as bus:
        first, again = [await read_last(bus, PROMPT_ISSUED, f"{name}-0") for name in (prompt_id, "r000000")]
        assert first is not None and again is not None
        assert (await read(bus, PromptIssued, again)).rows == (await read(bus, PromptIssued, first)).rows
