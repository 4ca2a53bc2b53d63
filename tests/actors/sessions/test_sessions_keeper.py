"""The keeper of sessions on a real server: what it decides is read back by it and by others."""

from collections.abc import Callable

import numpy as np

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record, last_sequence
from asyncrl.bus.publish import publish, read
from harness.stage import Stage, until
from topics.topic import DEAD, SESSIONS
from topics.turns import TURN_ADMITTED, TURN_OVERRULED, FeedbackGiven, TurnFinished, TurnOverruled, TurnStarted

TOKENS = np.arange(3, dtype=np.int32)


async def test_what_a_user_says_of_an_admitted_turn_is_on_the_log_once_and_can_be_read(
    bus: Bus, stage: Callable[..., Stage]
):
    logged: list[Record] = []
    reader = LogReader(bus, SESSIONS, logged.append)
    await reader.start()

    def admitted() -> list[str]:
        return [record.key for record in logged if record.subject == TURN_ADMITTED.subject(bus.run, record.key)]

    def overruled() -> list[Record]:
        return [record for record in logged if record.subject == TURN_OVERRULED.subject(bus.run, record.key)]

    async def say(turn: str, score: float) -> None:
        await publish(bus, FeedbackGiven(f"feedback_{turn}{score}", turn, "anna", score))

    async def serve(turn: str) -> None:
        at = {"turn_id": turn, "session": "s"}
        await publish(bus, TurnStarted(**at, tenant="anna", api="chat", tokens=TOKENS))
        reals = np.zeros(3, np.float32)
        await publish(bus, TurnFinished(**at, finish="stop", tokens=TOKENS, logprobs=reals, versions=0 * TOKENS))
        await say(turn, 1.0)

    await stage(gateway={"count": 1}, live={"fraction": 1.0}).start("sessions")
    await serve("a")
    await until(lambda: admitted() == ["a"], "the turn is admitted")
    await say("a", -1.0)
    await until(lambda: bool(overruled()), "its user's grade is on the log")
    await serve("b")
    await until(lambda: admitted() == ["a", "b"], "another turn is admitted")
    await reader.close()
    (record,) = overruled()
    found = await read(bus, TurnOverruled, record)
    assert (found.turn_id, found.prompt_id, found.member, found.reward) == ("a", "l000000", 0, -1.0)
    assert not await last_sequence(bus, DEAD)
