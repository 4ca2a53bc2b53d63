"""The loop of all workers: leases, acknowledgements, dead letters, and leaving without losing work."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.worker import WorkerLoop
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusGone
from asyncrl.bus.log import LogReader, Record, read_message
from asyncrl.bus.provision import make_queue, queue_states, stream_states
from asyncrl.bus.publish import Unpublishable, pack, publish, read
from harness.results import dead_letters, generated
from harness.stage import DEADLINE_S, LEASE_S, Connect, Stage, until
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, ActorStopped
from topics.ids import EVALUATION, prompt_name
from topics.prompts import PROMPT_ISSUED, PromptIssued, PromptRow
from topics.table import QUEUES
from topics.topic import ACTORS, GRADES, PROMPTS
from topics.trajectories import TRAJECTORY_GRADED, TrajectoryGraded
from topics.wire import headers_of

Handle = Callable[[PromptIssued, Delivery[PromptIssued]], Awaitable[Any]]
Work = Callable[..., Any]


def issued(number: int) -> PromptIssued:
    return PromptIssued(prompt_id=f"p{number:06d}", member=0, group_size=1, rows=[PromptRow("^ab=", "ba")])


async def issue(bus: Bus, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        message = issued(number)
        await publish(bus, message)


@pytest.fixture
async def work(bus: Bus, stage: Callable[..., Stage]) -> AsyncIterator[Work]:
    """Starts a worker's loop inside the test; returns its context and the task it runs in."""
    running: list[tuple[Context, asyncio.Task[None]]] = []

    def begin(handle: Handle, *, slots: int = 8) -> tuple[Context, asyncio.Task[None]]:
        context = stage(workers={"lease_s": LEASE_S}).context("rollout", bus)
        loop: WorkerLoop[PromptIssued] = WorkerLoop(context, handle, slots)
        running.append((context, asyncio.create_task(loop.run())))
        return running[-1]

    yield begin
    for context, task in running:
        context.stop.set()
        await asyncio.wait_for(task, 120)


async def queue(bus: Bus) -> tuple[int, int]:
    """Messages that wait for a worker, and those leased."""
    state = (await queue_states(bus))["rollout"]
    return state["waiting"], state["under_way"]


async def nothing_is_left(bus: Bus) -> bool:
    return await queue(bus) == (0, 0)


async def test_work_that_is_done_is_acknowledged_and_never_comes_again(bus: Bus, work: Work):
    done: list[str] = []

    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        done.append(message.trajectory_id)
        return []

    await issue(bus, 50)
    work(handle, slots=4)

    await until(lambda: nothing_is_left(bus), "all work is acknowledged")
    assert sorted(done) == [f"p{number:06d}-0" for number in range(50)]


async def test_a_worker_holds_no_more_than_its_slots(bus: Bus, work: Work):
    held = most = 0
    release = asyncio.Event()

    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        nonlocal held, most
        held += 1
        most = max(most, held)
        await release.wait()
        held -= 1
        return []

    await issue(bus, 12)
    work(handle, slots=3)
    await until(lambda: held == 3, "the slots are full")
    assert await queue(bus) == (9, 3)

    release.set()

    await until(lambda: nothing_is_left(bus), "all work is acknowledged")
    assert most == 3


async def test_work_under_way_keeps_its_lease(bus: Bus, work: Work):
    deliveries: list[int] = []

    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        deliveries.append(delivery.at.num_delivered)
        await asyncio.sleep(LEASE_S * 2)
        return []

    await issue(bus, 1)
    work(handle)

    await until(lambda: nothing_is_left(bus), "the work is acknowledged")
    assert deliveries == [1]
    assert (await queue_states(bus))["rollout"]["redelivered"] == 0


async def test_an_unreadable_message_becomes_a_dead_letter_and_later_work_goes_on(bus: Bus, work: Work):
    done: list[str] = []

    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        done.append(message.trajectory_id)
        return []

    context, _ = work(handle)
    wrong = msgspec.msgpack.encode({"prompt_id": 7, "member": "x"})
    first = await bus.store(PROMPT_ISSUED.subject(bus.run, "p1-0"), b"garbage", {"trajectory": "p1-0", "attempt": "0"})
    second = await bus.store(PROMPT_ISSUED.subject(bus.run, "p1-1"), wrong, {})
    third = await bus.store(PROMPT_ISSUED.subject(bus.run, "p1-2"), b"", {"blob": "gone:9:00:1"})
    other = PROMPT_ISSUED.subject(bus.run, "p000009-0")
    fourth = await bus.store(other, pack(issued(8), PROMPT_ISSUED), headers_of(issued(8)))
    await issue(bus, 1)

    async def all_are_judged() -> bool:
        return len(await dead_letters(bus)) == 4 and bool(done)

    await until(all_are_judged, "four dead letters are stored")
    await until(lambda: nothing_is_left(bus), "everything is acknowledged")
    letters = {letter.sequence: letter for letter in await dead_letters(bus)}
    assert sorted(letters) == [first.seq, second.seq, third.seq, fourth.seq]
    assert letters[first.seq].topic == "prompt.issued"
    assert letters[first.seq].stream == "PROMPTS"
    assert letters[first.seq].body == b"garbage"
    assert letters[first.seq].headers == {"trajectory": "p1-0", "attempt": "0"}
    assert letters[first.seq].reason.startswith("not a PromptIssued")
    assert "not a PromptIssued: Expected `str`, got `int`" in letters[second.seq].reason
    assert letters[third.seq].reason == "blob gone: chunk 0 of 1 is gone"
    assert letters[fourth.seq].reason == "its subject names trajectory_id 'p000009-0', its body 'p000008-0'"
    assert done == ["p000000-0"]
    assert context.vitals["dead_letters"] == 4
    assert not context.faults


async def test_a_handler_that_raises_ends_its_worker_aloud_and_the_work_stays(bus: Bus, work: Work):
    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        raise IndexError("no rows")

    await issue(bus, 1)
    context, task = work(handle)

    await asyncio.wait_for(task, 120)

    assert [str(fault) for fault in context.faults] == ["no rows"]
    assert await queue(bus) == (0, 1)
    assert await dead_letters(bus) == []


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (generated(0), "the handler of rollout returned TrajectoryGenerated "),
        ([issued(0), "p000000-0"], "the handler of rollout returned list "),
        (7, "the handler of rollout returned int 7; expected a list of messages, or None"),
    ],
)
async def test_a_handler_that_returns_no_list_of_messages_ends_its_worker_aloud(
    bus: Bus, work: Work, returned: object, words: str
):
    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        return returned

    await issue(bus, 1)
    context, task = work(handle)
    await asyncio.wait_for(task, DEADLINE_S)

    assert str(context.faults[0]).startswith(words)
    assert await dead_letters(bus) == [] and sum(await queue(bus)) == 1


async def test_a_handler_that_is_no_async_function_ends_its_worker_aloud(bus: Bus, work: Work):
    def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        return []

    await issue(bus, 1)
    context, task = work(handle)
    await asyncio.wait_for(task, DEADLINE_S)

    assert [str(fault) for fault in context.faults] == [
        "the handler of rollout is no async function: `async def handle(work, held)`"
    ]


async def test_a_worker_without_slots_is_refused(bus: Bus, stage: Callable[..., Stage]):
    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        return []

    with pytest.raises(ValueError, match="found slots = 0, expected 1 or more"):
        WorkerLoop(stage().context("rollout", bus), handle, 0)


async def test_a_result_that_cannot_be_published_ends_its_worker_and_is_not_blamed_on_the_work(bus: Bus, work: Work):
    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        return [msgspec.structs.replace(generated(0), trajectory_id="p000000 0")]

    await issue(bus, 1)
    context, task = work(handle)
    await asyncio.wait_for(task, DEADLINE_S)

    assert isinstance(context.faults[0], Unpublishable), context.faults
    assert "trajectory.generated cannot be published: its trajectory_id is 'p000000 0'; expected" in str(
        context.faults[0]
    )
    assert await dead_letters(bus) == []
    assert sum(await queue(bus)) == 1


async def test_a_worker_that_cannot_publish_gives_its_work_back_and_leaves(bus: Bus, work: Work):
    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        if delivery.at.num_delivered == 1:
            raise BusGone("no acknowledgement")
        return []

    await make_queue(bus, QUEUES["rollout"], 600)
    await issue(bus, 1)
    context, task = work(handle)
    await asyncio.wait_for(task, 120)
    assert [str(fault) for fault in context.faults] == ["no acknowledgement"]

    work(handle)

    await until(lambda: nothing_is_left(bus), "another worker does it at once, though the lease is long")


async def test_a_worker_that_is_asked_to_stop_gives_back_what_it_holds(bus: Bus, work: Work):
    begun: list[str] = []

    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        begun.append(message.trajectory_id)
        if delivery.at.num_delivered == 1:
            await asyncio.Event().wait()
        return []

    await make_queue(bus, QUEUES["rollout"], 600)
    await issue(bus, 4)
    context, task = work(handle)
    await until(lambda: len(begun) == 4, "everything is held")

    context.stop.set()
    await asyncio.wait_for(task, 120)  # a fifth of the lease
    work(handle)

    await until(lambda: nothing_is_left(bus), "another worker does it at once, though the lease is long")
    assert sorted(begun[4:]) == sorted(begun[:4])


async def test_a_worker_that_is_asked_to_stop_gives_back_what_is_on_its_way_to_it(
    bus: Bus, connect: Connect, work: Work
):
    begun: list[int] = []

    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        begun.append(delivery.at.num_delivered)
        return []

    async def asks() -> bool:
        info = await bus.api(f"CONSUMER.INFO.{PROMPTS.full_name(bus.run)}.rollout")
        return int(info["num_waiting"]) == 1

    async def sent() -> bool:
        return await queue(other) == (0, 4)

    other = await connect(bus.run)
    await make_queue(bus, QUEUES["rollout"], 600)  # no lease ends while this runs
    context, task = work(handle)
    await until(asks, "it asks for work")
    socket = bus.client._transport._io_reader._transport
    socket.pause_reading()
    await issue(other, 4)
    await until(sent, "the server has sent it work")

    context.stop.set()
    socket.resume_reading()
    await asyncio.wait_for(task, DEADLINE_S)
    assert begun == []
    work(handle)

    await until(lambda: nothing_is_left(bus), "another worker does it at once")
    assert begun == [2] * 4


async def test_a_reward_process_grades_every_trajectory_and_drains_on_sigterm(bus: Bus, stage: Callable[..., Stage]):
    async def grades(count: int) -> bool:
        return int((await stream_states(bus))["GRADES"]["messages"]) >= count

    for number in range(20):
        await publish(bus, generated(number))
    process = await stage().start("reward")
    await until(lambda: grades(20), "all are graded")

    process.send_signal(signal.SIGTERM)

    assert await asyncio.wait_for(process.wait(), 120) == 0
    state = (await queue_states(bus))["reward"]
    assert (state["waiting"], state["under_way"]) == (0, 0)
    graded = await read_message(bus, GRADES, 1)
    assert graded is not None
    assert graded.subject.startswith(f"asyncrl.{bus.run}.{TRAJECTORY_GRADED.name}.")
    first = await read(bus, TrajectoryGraded, graded)
    assert first.reward == float(int(first.prompt_id[1:]) % 2)
    lives: list[Record] = []
    subjects = [topic.pattern(bus.run) for topic in (ACTOR_STARTED, ACTOR_STOPPED)]
    reader = LogReader(bus, ACTORS, lives.append, subjects=subjects)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), 120)
    await reader.close()
    assert [record.subject for record in lives] == [
        ACTOR_STARTED.subject(bus.run, "reward-1"),
        ACTOR_STOPPED.subject(bus.run, "reward-1"),
    ]
    assert (await read(bus, ActorStopped, lives[1])).reason == ""


async def test_work_of_a_killed_process_is_done_by_another(bus: Bus, stage: Callable[..., Stage]):
    async def grades() -> int:
        return int((await stream_states(bus))["GRADES"]["messages"])

    async def all_graded() -> bool:
        return (await queue_states(bus))["reward"]["under_way"] == 0 and await grades() >= 60

    stand = stage(reward={"in_flight": 8})
    first = await stand.start("reward", 1)
    for number in range(30):
        await publish(bus, generated(number))
    await until(lambda: some(grades), "the first has begun")

    first.kill()
    await stand.start("reward", 2)
    for number in range(30, 60):
        await publish(bus, generated(number))

    await until(all_graded, "all are graded")
    records: list[Record] = []
    reader = LogReader(bus, GRADES, records.append, headers_only=True)
    await reader.start()
    await asyncio.wait_for(reader.caught_up.wait(), 120)
    await reader.close()
    assert len({record.subject for record in records}) == 60


async def some(count: Callable[[], Awaitable[int]]) -> Any:
    return await count() > 0


async def test_evaluations_come_before_the_training_that_was_issued_first_and_take_no_more_than_their_share(
    bus: Bus, work: Work
):
    begun, release = list[str](), {stage: asyncio.Event() for stage in ("rl", "eval")}

    async def handle(message: PromptIssued, delivery: Delivery[PromptIssued]) -> Any:
        begun.append(message.trajectory_id)
        await release[message.stage].wait()
        return []

    await issue(bus, 20)
    for number in range(6):
        name = prompt_name(EVALUATION, number)
        await publish(bus, PromptIssued(prompt_id=name, member=0, group_size=1, rows=[PromptRow("x")], stage="eval"))
    work(handle, slots=4)

    await until(lambda: len(begun) >= 6, "all slots are taken")
    states = await queue_states(bus)
    assert [states[name]["under_way"] for name in ("rollout", "rollout-eval")] == [4, 2]
    assert [states[name]["waiting"] for name in ("rollout", "rollout-eval")] == [16, 4]
    release["eval"].set()
    await until(lambda: sum(name.startswith("e") for name in begun) == 6, "evaluations do not wait for training")
    assert sum(name.startswith("p") for name in begun) == 4
    release["rl"].set()
    await until(lambda: nothing_is_left(bus), "nor training for evaluations")
