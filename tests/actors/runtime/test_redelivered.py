"""Work that comes again under the same delivery number, as after a crash of the server: its result may differ."""

from collections.abc import Callable
from pathlib import Path

from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import make_queue
from asyncrl.bus.publish import publish
from harness.results import counts, generated, is_done
from harness.stage import Stage, until
from topics.table import QUEUES
from topics.topic import GRADES
from topics.trajectories import TRAJECTORY_FAILED, TRAJECTORY_GRADED

NEVER_THE_SAME = """
import random

def reward(completion):
    if completion == "ba":
        raise ValueError(f"no reward {random.random()}")
    return random.random()
"""


async def deliver_again(bus: Bus, name: str) -> None:
    """Have all work of a queue delivered once more, as a first delivery: a crash may cost it what it knew."""
    queue = QUEUES[name]
    await bus.api(f"CONSUMER.DELETE.{queue.stream.full_name(bus.run)}.{queue.name}")
    await make_queue(bus, queue, 1.0)


async def test_a_reward_that_is_never_the_same_ends_no_worker(bus: Bus, stage: Callable[..., Stage], tmp_path: Path):
    (tmp_path / "reward.py").write_text(NEVER_THE_SAME)
    for number in range(6):
        await publish(bus, generated(number))
    process = await stage(reward={"function": f"{tmp_path / 'reward.py'}:reward"}).start("reward")
    await until(lambda: is_done(bus, "reward"), "all are graded")

    await deliver_again(bus, "reward")

    await until(lambda: is_done(bus, "reward"), "all are graded again")
    assert await counts(bus, GRADES) == {TRAJECTORY_GRADED.name: 6, TRAJECTORY_FAILED.name: 6}
    assert process.returncode is None
