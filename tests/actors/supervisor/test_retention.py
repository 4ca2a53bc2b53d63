"""A clock that jumps forward erases no data keys; one that goes on evenly does, whatever is started again."""

import asyncio
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from actors.supervisor.retention import Clock, retain
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish
from asyncrl.live.tenant_keys import new_secret, owner_of
from asyncrl.run.purge import purge
from asyncrl.state.live_facts import AHEAD
from harness.stage import Stage, until
from topics.secrets import SECRET_MADE, SecretMade

DAY_S, YEAR_S = 86_400.0, 365 * 86_400.0
START_S = 1e9


class Machine:
    """A machine whose clocks go on as the test says, and its runs' file."""

    def __init__(self, path: Path) -> None:
        self.path, self.wall_s, self.steady_s, self.boot = path, START_S, 50.0, "a"
        self.clock = self.started()

    def started(self) -> Clock:
        """Return the clock of a process that is started."""
        self.clock = Clock(self.path, wall=lambda: self.wall_s, steady=lambda: self.steady_s, boot=lambda: self.boot)
        return self.clock

    def look(self, *, after_s: float = 0.0, jump_s: float = 0.0, server_s: float | None = None) -> float:
        self.wall_s, self.steady_s = self.wall_s + after_s + jump_s, self.steady_s + after_s
        return self.clock.ahead_s(self.wall_s if server_s is None else server_s)

    def restart(self, down_s: float) -> None:
        self.wall_s, self.steady_s, self.boot = self.wall_s + down_s, 1.0, self.boot + "a"
        self.started()


def test_a_clock_that_goes_on_evenly_is_believed_over_days_and_starts_of_its_process(tmp_path: Path):
    machine = Machine(tmp_path / "clock.json")
    assert machine.look() == machine.look(after_s=600) == machine.look(after_s=3 * DAY_S) == 0
    machine.started()
    assert machine.look(after_s=30 * DAY_S) == 0  # the process was away, the machine counted
    machine.restart(down_s=600)
    assert machine.look() == machine.look(after_s=600, jump_s=-YEAR_S) == 0  # what is set back erases less


def test_a_jump_forward_is_believed_after_a_day_of_even_time_and_not_by_a_new_process(tmp_path: Path):
    machine = Machine(tmp_path / "clock.json")
    machine.look()
    assert machine.look(after_s=600, jump_s=YEAR_S) == YEAR_S
    machine.started()
    assert machine.look(after_s=600) == YEAR_S
    assert machine.look(after_s=DAY_S / 2, jump_s=YEAR_S) == 2 * YEAR_S  # another jump: the day begins anew
    assert machine.look(after_s=DAY_S - 600) == 2 * YEAR_S
    assert machine.look(after_s=600) == machine.look(after_s=600) == 0

    machine.restart(down_s=YEAR_S)  # nothing tells whether it was down for so long
    assert machine.look() == YEAR_S and machine.look(after_s=DAY_S) == 0


def test_a_jump_that_is_taken_back_leaves_no_trace_and_the_servers_clock_must_agree(tmp_path: Path):
    machine = Machine(tmp_path / "clock.json")
    machine.look()
    assert machine.look(after_s=600, jump_s=YEAR_S) == YEAR_S
    assert machine.look(after_s=600, jump_s=-YEAR_S) == 0
    assert machine.look(after_s=600, jump_s=YEAR_S, server_s=START_S + 1800) == YEAR_S
    assert machine.look(after_s=DAY_S, server_s=START_S + DAY_S) > 0  # for as long as they differ


async def test_a_supervisor_erases_nothing_behind_a_jump_nor_what_the_server_stored_today(
    bus: Bus, stage: Callable[..., Stage]
):
    context = stage(live={"retention_days": 1}, gateway={"count": 1}).context("supervisor", bus)
    secret = new_secret(owner_of("anna", ""), START_S)  # a day long ago, by the clock of its gateway
    await publish(bus, SecretMade(secret, secrets.token_bytes(32)))

    async def looked() -> float:
        context.vitals.clear()
        retaining = asyncio.create_task(retain(context))
        await until(lambda: AHEAD in context.vitals, "it looked at the clock")
        if not context.vitals[AHEAD]:
            await until(lambda: "keys_erased" in context.vitals, "it looked at the keys")
        retaining.cancel()
        return context.vitals[AHEAD]

    assert await looked() == 0 and context.vitals["keys_erased"] == 0
    known = msgspec.json.decode(context.files.clock.read_bytes())
    context.files.clock.write_bytes(msgspec.json.encode(known | {"wall_s": known["wall_s"] - YEAR_S}))
    assert await looked() > YEAR_S - DAY_S
    assert await read_last(bus, SECRET_MADE) is not None
    tomorrow = time.strftime("%Y%m%d", time.gmtime(time.time() + DAY_S))
    assert (await purge(bus, "", tomorrow, "retention")).keys == [secret]
