"""The prompter beside slow data: it issues each group as soon as its row is made, and its signs of life never stop."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import psutil
import pytest

from actors.prompter.actor import decide
from actors.prompter.fold import PrompterFold, Wanted
from actors.prompter.sources import TaskSource
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.process import FATAL, living_descendants, process_cpu_s
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


@pytest.mark.parametrize(
    "dataset", [SLOWEST[0], *(pytest.param(one, marks=pytest.mark.nightly) for one in SLOWEST[1:])]
)
async def test_the_slowest_data_sets_start_with_little_work_beside_their_first_row(
    stage: Callable[..., Stage], received: Received, dataset: str
):
    prompter = await slow(stage, dataset).start("prompter")

    await until(lambda: len(received.issued) >= SIZE, "the first group is issued")

    assert prompter.returncode is None
    worked_s = sum(process_cpu_s(pid) for pid in (prompter.pid, *living_descendants(prompter.pid)))
    row_s = max((vitals.values.get("doing_s", 0.0) for vitals in received.vitals), default=0.0)
    assert worked_s < 20 + row_s


async def test_each_group_is_issued_as_soon_as_its_row_is_made_and_heartbeats_go_on(
    stage: Callable[..., Stage], received: Received, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gyms.put_in_place(tmp_path, monkeypatch)
    await slow(stage, "waits", lease_s=1.0).start("prompter")
    await until(lambda: bool(received.vitals), "it has started")

    for row in range(3):
        making = Activity("making row", row)
        await until(lambda one=making: received.vitals[-1].doing == one, "the row is under way")
        vitals, beats = len(received.vitals), len(received.beats)
        await until(lambda at=beats: len(received.beats) >= at + 2, "heartbeats go on while it is made")
        await until(lambda at=vitals: len(received.vitals) >= at + 2, "and vital signs")
        assert len(received.issued) == row * SIZE
        gyms.let_make(tmp_path, row)
        await until(lambda end=row + 1: len(received.issued) >= end * SIZE, "its group is issued")

    assert received.names == [f"p{number:06d}-{member}" for number in range(3) for member in range(SIZE)]


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
