"""The prompter beside slow data: it issues each group as soon as its row is made, and its signs of life never stop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import psutil
import pytest

from actors.prompter.actor import decide
from actors.prompter.fold import PrompterFold, Wanted
from actors.prompter.sources import TaskSource
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.process import FATAL
from harness import gyms
from harness.stage import Stage, until
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, Activity, ActorStopped, Vitals
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.table import BY_NAME
from topics.topic import ACTORS, PROMPTS, VITALS
from topics.wire import decode

SIZE = 2
SLOWEST = ("futoshiki", "knight_swap", "quantum_lock", "sokoban", "zebra_puzzles")


class Received:
    """Return what prompters published, and when the server stored it."""

    def __init__(self) -> None:
        self.issued: list[tuple[int, PromptIssued]] = []
        self.beats: list[int] = []
        self.started: list[int] = []
        self.last_error: list[str] = []
        self.vitals: list[Vitals] = []

    @property
    def names(self) -> list[str]:
        return [message.trajectory_id for _, message in self.issued]

    def take(self, record: Record) -> None:
        topic = ".".join(record.subject.split(".")[2:4])
        if topic == PROMPT_ISSUED.name:
            self.issued.append((record.time_ns, decode(PromptIssued, record.data)))
        elif topic == BY_NAME["prompter.heartbeat"].name:
            self.beats.append(record.time_ns)
        elif topic == ACTOR_STARTED.name:
            self.started.append(record.time_ns)
        elif topic == ACTOR_STOPPED.name:
            self.last_error.append(decode(ActorStopped, record.data).reason)

    def take_vitals(self, record: Record) -> None:
        self.vitals.append(msgspec.json.decode(record.data, type=Vitals))


@pytest.fixture
async def received(bus: Bus) -> AsyncIterator[Received]:
    received = Received()
    readers = [LogReader(bus, stream, received.take) for stream in (PROMPTS, ACTORS)]
    readers.append(LogReader(bus, VITALS, received.take_vitals))
    for reader in readers:
        await reader.start()
    yield received
    for reader in readers:
        await reader.close()


def slow(stage: Callable[..., Stage], how: str = "slow", lease_s: float = 10.0, **task: object) -> Stage:
    return stage(
        task={"source": f"reasoning-gym:{how}", **task},
        rollout={"group_size": SIZE},
        buffer={"batch_groups": 64},
        supervision={"silence_s": lease_s},
    )


@pytest.mark.parametrize("dataset", SLOWEST)
async def test_the_slowest_data_sets_start_within_ten_seconds_of_their_first_row(
    stage: Callable[..., Stage], received: Received, dataset: str
):
    prompter = await slow(stage, dataset).start("prompter")

    await until(lambda: len(received.issued) >= SIZE, "the first group is issued", 120)

    assert prompter.returncode is None
    waited_s = (received.issued[0][0] - received.started[0]) / 1e9
    row_s = max((vitals.values.get("doing_s", 0.0) for vitals in received.vitals), default=0.0)
    assert waited_s < 10 + row_s


async def test_each_group_is_issued_as_soon_as_its_row_is_made_and_heartbeats_go_on(
    stage: Callable[..., Stage], received: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gyms.put_in_place(tmp_path, monkeypatch)
    await slow(stage, lease_s=1.0, options={"seconds": 1.0}).start("prompter")

    await until(lambda: len(received.issued) >= 3 * SIZE, "three groups are issued")

    assert received.names[: 3 * SIZE] == [f"p{number:06d}-{member}" for number in range(3) for member in range(SIZE)]
    firsts = [received.issued[number * SIZE][0] for number in range(3)]
    for before, after in pairwise(firsts):
        assert after - before > 0.5e9
        assert any(before < beat < after for beat in received.beats)
    assert {vitals.doing for vitals in received.vitals} >= {Activity("making row", 1), Activity("making row", 2)}


async def test_a_prompter_killed_in_the_middle_of_a_row_goes_on_with_that_row(
    stage: Callable[..., Stage], received: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gyms.put_in_place(tmp_path, monkeypatch)
    made = slow(stage, options={"seconds": 0.5})
    first = await made.start("prompter")
    await until(lambda: len(received.issued) >= 2 * SIZE, "two groups are issued")
    [child] = psutil.Process(first.pid).children()

    first.kill()
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "its child is gone")
    await made.start("prompter")
    await until(lambda: len(received.issued) >= 5 * SIZE, "five groups are issued")

    nothing = PrompterFold(made.config).state
    for place, (_, message) in enumerate(received.issued[: 5 * SIZE]):
        number, member = divmod(place, SIZE)
        rows = [PromptRow(f"^{number}=", str(number), {"source_dataset": "slow", "source_options": {"seconds": 0.5}})]
        wanted = Wanted(TaskSource(made.config).group(nothing, number), member, 0)
        expected = decide(wanted, made.config.seed, rows if member == 0 else [])
        message.v = 0
        assert message == expected


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "data 'reasoning-gym:raises': row 2 cannot be made: "),
        ("hangs", "data 'reasoning-gym:hangs': row 2 was not made within task.row_limit_s = 1; raise it, or"),
    ],
)
async def test_a_row_that_cannot_be_made_ends_the_run_with_one_error(
    stage: Callable[..., Stage],
    received: Received,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    words: str,
):
    gyms.put_in_place(tmp_path, monkeypatch)
    prompter = await slow(stage, how, row_limit_s=1.0).start("prompter")

    assert await asyncio.wait_for(prompter.wait(), 120) == FATAL

    await until(lambda: bool(received.last_error), "its last word")
    assert received.last_error[0].startswith(words)
    assert received.names == [f"p{number:06d}-{member}" for number in range(2) for member in range(SIZE)]
