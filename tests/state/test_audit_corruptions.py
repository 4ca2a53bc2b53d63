"""Everything that can be wrong with a real run is found by its name, and nothing is found where nothing is wrong."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from actors.prompter.data_order import DataOrder
from asyncrl.bus.connection import Bus
from asyncrl.run.connect import FoundRun, opened
from asyncrl.state.audit.audit import Queue
from asyncrl.state.audit.reading import audit_run
from harness.corruptions import CORRUPTIONS, STEPS, remove_group
from harness.gated import closed_gate
from harness.recorded import Recorded
from harness.runs import GATED, UNTRAINED, address_of, command, up
from topics.actors import (
    DEAD_LETTER,
    DeadLetter,
    KeeperHeartbeat,
)
from topics.batches import BATCH_PACKED, BATCH_TRAINED
from topics.prompts import PROMPT_ISSUED
from topics.table import BY_NAME
from topics.trajectories import TRAJECTORY_GENERATED
from topics.wire import encode

pytestmark = pytest.mark.slow
MIDDLE = 3  # the batch that the run in the middle has packed last


class Finished:
    """A run that has ended, and what audits found while it went on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.live: list[str] = []  # what each audit of the live run found
        self.recorded: Recorded

    async def run(self) -> None:
        gate = closed_gate(self.folder, STEPS - 3)  # the run waits for the audits, two steps later at most
        async with up(
            self.folder, *UNTRAINED, "warmup.steps=4", GATED, f"learner.steps={STEPS}", "nats.keep=run"
        ) as run:
            await run.reaches(run.steps, "the first step")
            bus = await Bus.connect(address_of(run), "short")
            base = Path((run.root / "base").read_text())
            check = partial(DataOrder, base=base)
            going_on = True
            while going_on:
                going_on = len(run.steps()) < STEPS - 3
                audited = await audit_run(bus, deep=True, check_rows=check)
                self.live += [str(found) for found in audited.findings.violations]
            await bus.close()
            gate.unlink()
            assert await run.ended() == 0, run.story
        async with opened(FoundRun(run.root.name, run.root), "test") as bus:
            self.recorded = await Recorded.read(bus, base)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    made = Finished(tmp_path_factory.mktemp("finished"))
    asyncio.run(made.run())
    return made


@pytest.fixture
def whole(finished: Finished) -> Recorded:
    """The finished run."""
    return finished.recorded.copy()


@pytest.fixture
def middle(finished: Finished) -> Recorded:
    """The run when it had just issued something after a batch of RL."""
    recorded = finished.recorded
    packed_ns = recorded.records(BATCH_PACKED)[recorded.batch(MIDDLE)].time_ns
    return recorded.until(next(r.time_ns for r in recorded.records(PROMPT_ISSUED) if r.time_ns > packed_ns))


# --- nothing is wrong


async def test_a_run_is_clean_while_it_goes_on_and_when_it_has_ended(finished: Finished):
    assert finished.live == []
    code, output = await command(finished.folder, "audit", "short", "--deep")
    assert code == 0, output
    assert "run short: clean" in output.splitlines()
    assert "not compared" not in output
    rows = dict(line.split(maxsplit=1) for line in output.splitlines()[1:])
    issued, trained, dropped = (int(rows[name].split()[0]) for name in ("issued", "trained", "dropped"))
    assert issued == trained + dropped >= STEPS * 8 * 4 + 4 * 2
    assert rows["open"] == "0"
    assert rows["batches"].startswith(f"{STEPS + 4} packed, {STEPS + 4} trained")
    code, output = await command(finished.folder, "explain", "short", "p000000-0")
    assert code == 0, output
    whats = [line.split()[2] for line in output.split("\n\n")[0].splitlines()[1:]]
    assert whats == ["issued", "generated", "graded", "packed", "trained"]


def test_its_messages_are_clean_at_every_moment(finished: Finished):
    recorded = finished.recorded
    assert recorded.findings().violations == []
    events = [record.time_ns for topic in (BATCH_PACKED, BATCH_TRAINED) for record in recorded.records(topic)]
    assert [recorded.until(event).findings().violations for event in events] == [[]] * len(events)


# --- one corruption at a time


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_a_corruption_of_the_finished_run_is_found_by_its_name(whole: Recorded, corruption: str):
    corrupt, kind = CORRUPTIONS[corruption]

    corrupt(whole)

    assert kind in whole.kinds()


def test_tokens_that_every_checkpoint_has_are_lost_where_the_run_keeps_all(whole: Recorded):
    trained = whole.messages(BATCH_PACKED)[whole.batch(1)].groups[0].members[0].trajectory_id

    whole.remove(TRAJECTORY_GENERATED, lambda result: result.trajectory_id == trained)

    assert whole.kinds() == {"lost"}


# --- and of the run in the middle, where work is open


def everything_acknowledged(r: Recorded) -> dict[str, Queue]:
    return {"rollout": Queue(r.records(PROMPT_ISSUED)[-1].sequence), "reward": Queue(10**9)}


def letters(r: Recorded, reason: str) -> None:
    """Every issue has a dead letter."""
    log = [*r.records(PROMPT_ISSUED), *r.records(TRAJECTORY_GENERATED)]
    for number, record in enumerate(log, 1):
        letter = DeadLetter("any", record.stream.name, record.sequence, reason, {}, b"", reason.startswith("poison"))
        subject = DEAD_LETTER.subject(r.run, letter.place)
        body = encode(letter)
        r.logs["DEAD"].append(
            record._replace(stream=DEAD_LETTER.stream, sequence=number, subject=subject, data=body, headers={})
        )


def test_work_that_was_acknowledged_before_anything_came_of_it_is_lost(middle: Recorded):
    assert middle.kinds(queues=everything_acknowledged(middle)) == {"lost"}


def test_tokens_that_are_gone_before_a_checkpoint_has_them_are_lost(middle: Recorded):
    packed = middle.messages(BATCH_PACKED)[-1].groups[0].members[0].trajectory_id  # of a batch that is not trained yet

    middle.remove(TRAJECTORY_GENERATED, lambda result: result.trajectory_id == packed)

    assert middle.kinds() == {"lost"}


def test_a_dead_letter_hides_no_loss(middle: Recorded):
    letters(middle, "not a PromptIssued: truncated")
    assert middle.kinds(queues=everything_acknowledged(middle)) == {"hidden loss"}


def test_poison_is_excused_until_its_deadline_and_no_longer(middle: Recorded):
    letters(middle, "poison: 5 deliveries")
    assert middle.kinds(queues=everything_acknowledged(middle)) == set()

    middle.add(BY_NAME["buffer.heartbeat"], KeeperHeartbeat("0"))
    deadline_ns = int((middle.config.buffer.group_deadline_s + 60) * 1e9)
    middle.logs["BATCHES"][-1] = middle.logs["BATCHES"][-1]._replace(
        time_ns=middle.logs["BATCHES"][-1].time_ns + deadline_ns
    )
    assert middle.kinds(queues=everything_acknowledged(middle)) == {"overdue"}


def test_a_queue_that_may_lose_something_is_named(middle: Recorded):
    [found] = middle.findings(queues={"rollout": Queue(0, fault="max_deliver = 5")}).violations

    assert (found.kind, found.id, found.found) == ("wrong queue", "queue rollout", "max_deliver = 5")


def test_a_complete_group_that_later_batches_pass_over_is_left_over(finished: Finished):
    recorded = finished.recorded.until(finished.recorded.records(BATCH_TRAINED)[-2].time_ns)
    lose_group_of_the_first_batch(recorded)

    assert recorded.kinds() == {"left over", "wrong size"}


def lose_group_of_the_first_batch(r: Recorded) -> None:
    r.alter(BATCH_PACKED, r.batch(1), remove_group)
    r.train_again(1)
