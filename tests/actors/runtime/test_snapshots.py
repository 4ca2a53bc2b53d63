"""A keeper that starts from a snapshot knows what one knows that folded everything, and never trusts a broken one."""

import asyncio
import random
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

import msgspec
import pytest

from actors.buffer.fold import BufferFold
from actors.buffer.state import Plan
from actors.prompter.fold import PrompterFold
from actors.recorder.actor import main as record
from actors.runtime.keeper import Keeper
from asyncrl.bus.acks import MESSAGE_ID
from asyncrl.bus.blobs import BLOB
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record, read_last
from asyncrl.bus.provision import stream_states
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.settings import Config
from benchmarks.history import History
from harness.folds import Feed
from harness.stage import Connect, Stage, until
from topics.actors import DEAD_LETTER, KeeperSnapshot, ReissueRequested
from topics.batches import BATCH_PACKED
from topics.groups import GroupDropped
from topics.ids import PromptIdSet
from topics.prompts import PromptIssued, PromptRow
from topics.table import BUILT_IN, BY_NAME
from topics.topic import BATCHES, GRADES, PROMPTS
from topics.wire import decode, encode

SNAPSHOT = BY_NAME["prompter.snapshot"]
SMALL = {"rollout": {"group_size": 4}, "buffer": {"batch_groups": 2, "max_lag": 1}, "learner": {"steps": 1000}}


# --- what a snapshot holds is all there is


class Log(Feed):
    """Keeps what it feeds, so that it can be fed again."""

    def __init__(self, fold):
        super().__init__(fold)
        self.messages = []

    def publish(self, message, *, at_s=0.0, headers=None):
        self.messages.append((message, at_s))
        return super().publish(message, at_s=at_s, headers=headers)


class _Both:
    """Prompter and buffer over the same messages."""

    def __init__(self, config):
        self.prompter, self.buffer = PrompterFold(config), BufferFold(Plan.of(config))

    def apply(self, topic, message, record):
        self.prompter.apply(topic, message, record)
        self.buffer.apply(topic, message, record)


def story(config, chance, length):
    """Messages of a run: members fail, come late, are too old and issued again; dropped groups are asked for anew."""
    both = _Both(config)
    log, open_work, now_s = Log(both), [], 0.0
    while len(log.messages) < length:
        now_s += 10.0
        for wanted in both.prompter.wanted():
            name = f"{wanted.prompt_id}-{wanted.member}"
            log.issued(name, size=wanted.group.size, at_s=now_s, attempt=wanted.attempt)
            open_work.append((name, wanted.attempt, wanted.min_version))
        for name, attempt, version in [open_work.pop(chance.randrange(len(open_work))) for _ in open_work[:5]]:
            if chance.random() < 0.05:
                log.failed(name, size=4)
            elif chance.random() < 0.9:  # the rest come to their deadline
                versions = [(chance.randint(version, version + 1), 3)]
                log.graded(name, chance.random(), versions=versions, size=4, attempt=attempt)
        for decision in log.read_back(both.buffer.decide(now_s), at_s=now_s):
            if isinstance(decision, GroupDropped) and chance.random() < 0.2:
                log.publish(ReissueRequested(decision.prompt_id))
        if both.buffer.state.packed > both.buffer.state.trained and chance.random() < 0.5:
            log.trained(both.buffer.state.trained + 1)
    return log.messages


def interleaved(output, chance):
    """The same messages in the order of their logs, the logs in any order."""
    logs: dict[str, list] = {}
    for entry in output:
        logs.setdefault(BUILT_IN.topic_for(entry[0]).stream.name, []).append(entry)
    turns = [name for name, entries in logs.items() for _ in entries]
    chance.shuffle(turns)
    readers = {name: iter(entries) for name, entries in logs.items()}
    return [next(readers[name]) for name in turns]


def folded(make, output, cut=None):
    """A fold of messages; with `cut`, one that was put down after so many and taken up again from its snapshot."""
    feed = Feed(make())
    for number, (message, at_s) in enumerate(output):
        if number == cut:
            feed.fold, before = make(), feed.fold.state
            feed.fold.state = decode(type(before), encode(before))
        if isinstance(feed.fold, BufferFold) or BUILT_IN.topic_for(message).stream is not GRADES:
            feed.publish(message, at_s=at_s)
    return feed.fold


@pytest.mark.parametrize("stale", ["mask", "reissue"])
@pytest.mark.parametrize("seed", range(5))
def test_a_fold_taken_up_from_a_snapshot_is_the_fold_of_everything(seed: int, stale: str):
    chance = random.Random(seed)
    buffer = {"stale": stale, "group_deadline_s": 200.0}
    config = msgspec.convert({**SMALL, "buffer": {**SMALL["buffer"], **buffer}}, Config)
    output = story(config, chance, 1500)
    assert {BUILT_IN.topic_for(message).name for message, _ in output} >= {
        "group.dropped",
        "batch.trained",
        "reissue.requested",
    }

    for _ in range(5):
        output = interleaved(output, chance)
        cut = chance.randrange(1, len(output))
        whole, rest = [folded(partial(PrompterFold, config), output, at) for at in (None, cut)]
        assert rest.state == whole.state
        assert rest.wanted() == whole.wanted()
        whole, rest = [folded(partial(BufferFold, Plan.of(config)), output, at) for at in (None, cut)]
        assert rest.state == whole.state
        for stage in rest.state.issued:
            assert list(rest.state.issued[stage]) == list(whole.state.issued[stage])
        for now_s in (0.0, 1000.0, 1e6):
            assert rest.decide(now_s) == whole.decide(now_s)


def test_what_the_prompter_knows_does_not_depend_on_the_order_between_logs():
    chance = random.Random(1)
    config = msgspec.convert({**SMALL, "buffer": {**SMALL["buffer"], "stale": "reissue"}}, Config)
    output = story(config, chance, 1500)

    states = [folded(partial(PrompterFold, config), interleaved(output, chance)).state for _ in range(5)]

    assert all(state == states[0] for state in states)


def test_what_is_known_of_a_long_run_stays_small():
    sizes = []
    for length in (1000, 8000):
        config = msgspec.convert({**SMALL, "buffer": {**SMALL["buffer"], "stale": "reissue"}}, Config)
        output = story(config, random.Random(3), length)
        prompter, buffer = [
            folded(make, output) for make in (partial(PrompterFold, config), partial(BufferFold, Plan.of(config)))
        ]
        sizes.append(len(encode(prompter.state)) + len(encode(buffer.state)))

    assert sizes[1] < 2 * sizes[0] + 2000


def test_names_are_a_set_that_lies_in_few_spans():
    chance, names, numbers = random.Random(0), PromptIdSet(), [*range(7, 500), *range(600, 900)]
    ahead = sorted(numbers, key=lambda number: number + chance.random() * 20)

    for count, number in enumerate(ahead):
        names.add(f"p{number:06d}")
        names.add(f"p{number:06d}")
        if count % 50 == 0:
            assert {n for n in range(1000) if f"p{n:06d}" in names} == set(ahead[: count + 1])

    assert names.spans == {"p": [[7, 500], [600, 900]]}
    assert "w000007" not in names
    assert names.least_missing("p") == 0
    names.add("w000000")
    assert names.least_missing("w") == 1


# --- real keepers on a real log


Open = Callable[..., Awaitable[Keeper]]


@pytest.fixture
async def opened(connect: Connect, bus: Bus, stage: Callable[..., Stage]) -> AsyncIterator[Open]:
    """Opens prompters' keepers over the same logs, each with a connection of its own."""
    keepers: list[Keeper] = []

    async def open_one(every: int = 50) -> Keeper:
        config = {**SMALL, "supervision": {"snapshot_every": every}}
        context = stage(**config).context("prompter", await connect(bus.run))
        keepers.append(Keeper(context, PROMPTS, PrompterFold(context.config)))
        await keepers[-1].start()
        return keepers[-1]

    yield open_one
    for keeper in keepers:
        await leave(keeper)


async def leave(keeper: Keeper) -> None:
    keeper.context.stop.set()
    await keeper.close()


async def issue(keeper: Keeper) -> list[str]:
    """Return what the keeper issues until its credit is used up."""
    names = []
    while wanted := keeper._fold.wanted():
        decisions = []
        for item in wanted:
            message = PromptIssued(
                prompt_id=item.prompt_id, member=item.member, group_size=item.group.size, rows=[PromptRow("x")]
            )
            decisions.append(message)
        assert await keeper.append(decisions)
        names += [decision.trajectory_id for decision in decisions]
    return names


async def drop(bus: Bus, *numbers: int) -> None:
    for number in numbers:
        key = f"p{number:06d}"
        await publish(bus, GroupDropped(key, "failed"), headers={WRITER: "buffer"})


async def lead(keeper: Keeper, bus: Bus, groups: int, first: int = 0) -> Record:
    """Let so many groups begin and end; returns the newest snapshot."""
    await issue(keeper)
    for number in range(first, first + groups):
        await drop(bus, number)
        await until(lambda number=number: keeper._fold.open_groups < 4, "the end is folded")
        await issue(keeper)
    await until(lambda: snapshots(bus), "a snapshot is on the log")
    newest = await read_last(bus, SNAPSHOT)
    assert newest is not None
    return newest


async def snapshots(bus: Bus) -> bool:
    return await read_last(bus, SNAPSHOT) is not None


async def test_a_keeper_that_starts_again_begins_at_its_newest_snapshot(opened: Open, bus: Bus, monkeypatch):
    first = await opened()
    newest = await lead(first, bus, 40)
    await leave(first)
    await drop(bus, 41)

    read: list[Record] = []
    take = Keeper._take
    monkeypatch.setattr(
        Keeper, "_take", lambda keeper, *received: (read.append(received[-1]), take(keeper, *received))[1]
    )
    second = await opened()

    snapshot = decode(KeeperSnapshot, newest.data)
    assert all(record.sequence > snapshot.positions[record.stream.name] for record in read)
    assert 0 < len([record for record in read if record.stream is PROMPTS]) < 80
    assert await issue(second) == [f"p000044-{member}" for member in range(4)]
    assert int((await stream_states(bus))["DEAD"]["messages"]) == 0


async def test_a_keeper_publishes_a_snapshot_at_intervals(opened: Open, bus: Bus):
    keeper = await opened()
    sequences = {(await lead(keeper, bus, 20)).sequence, (await lead(keeper, bus, 20, first=20)).sequence}

    assert len(sequences) == 2


async def broken(kind: str, good: Record, bus: Bus) -> None:
    """Put a snapshot on the log that cannot be used."""
    message = decode(KeeperSnapshot, good.data)
    headers = {MESSAGE_ID: kind, WRITER: "stranger"}
    if kind == "of another format":
        message.format = "1"
    elif kind == "beyond the end of a log":
        message.positions[BATCHES.name] = 10_000
    elif kind == "of other logs":
        del message.positions[BATCHES.name]
    elif kind == "not a state":
        message.state = b"\xc1"
    elif kind == "in a blob that is gone":
        headers[BLOB] = "aa:5:bb00:1"
    await bus.store(SNAPSHOT.subject(bus.run), b"" if BLOB in headers else encode(message), headers)


@pytest.mark.parametrize(
    "kind",
    ["of another format", "beyond the end of a log", "of other logs", "not a state", "in a blob that is gone"],
)
async def test_a_snapshot_that_cannot_be_used_costs_time_and_nothing_else(opened: Open, bus: Bus, kind: str, capfd):
    first = await opened()
    await broken(kind, await lead(first, bus, 20), bus)
    await leave(first)
    await drop(bus, 21)

    second = await opened()

    assert "snapshot unusable" in "".join(capfd.readouterr())
    assert await issue(second) == [f"p000024-{member}" for member in range(4)]


async def test_a_snapshot_in_a_blob_is_restored_and_troubles_no_one(opened: Open, bus: Bus, monkeypatch, capfd):
    monkeypatch.setattr("asyncrl.bus.blobs.INLINE_BYTES", 100)
    first = await opened()
    newest = await lead(first, bus, 20)
    await leave(first)
    assert BLOB in newest.headers
    monkeypatch.undo()

    second = await opened()

    assert "snapshot restored" in "".join(capfd.readouterr())
    assert second._fold.open_groups == 4
    assert await read_last(bus, DEAD_LETTER) is None


# --- and processes


async def test_a_killed_buffer_goes_on_from_its_snapshot(bus: Bus, stage: Callable[..., Stage]):
    stand = stage(**SMALL, supervision={"snapshot_every": 20})
    history = History(bus, stand.config)
    await history.write(32)
    process = await stand.start("buffer")
    await history.grade(2)
    await until(lambda: packed(bus, 5), "the batch after those of the history")
    process.kill()
    await process.wait()
    await history.train()
    await history.grade(2)

    recording = stand.context("recorder", bus)
    reading = asyncio.create_task(record(recording))
    await stand.start("buffer")

    await until(lambda: packed(bus, 6), "the next batch, of the groups that are left")
    assert "snapshot restored" in (stand.files.logs / "buffer-1.log").read_text()
    recording.stop.set()
    await reading
    assert "dead_letters" not in recording.vitals


async def loaded(*roles: str) -> set[str]:
    """Modules that actors of these roles load before they start."""
    names = ", ".join(f"actors.{role}.actor" for role in roles)
    words = f"import sys, actors.main, {names}; print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", words, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return set(output.decode().split())


async def test_who_holds_a_run_together_starts_without_torch_and_keepers_without_http():
    keepers = await loaded("prompter", "buffer", "recorder", "supervisor")
    others = await loaded("engine", "rollout", "reward")
    assert keepers & {"torch", "transformers", "aiohttp", "rich"} == set()
    assert others & {"torch", "transformers", "rich"} == set()
    assert {"nats.aio.client", "structlog"} <= keepers & others


async def packed(bus: Bus, step: int) -> bool:
    newest = await read_last(bus, BATCH_PACKED)
    return newest is not None and int(newest.headers["step"]) == step
