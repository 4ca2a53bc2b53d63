"""The rule by which pools grow and shrink, on loads made by hand."""

import pytest

from asyncrl.config.process_settings import AutoscaleSettings, PoolBounds
from asyncrl.state.autoscale import Change, Look, changes, held
from asyncrl.state.loads import PoolLoad, pool_loads
from asyncrl.state.records import Scaling
from asyncrl.state.screen import render
from asyncrl.state.status import run_status
from harness.states import FLEET, NOW_S, MadeState
from topics.actors import (
    ActorStarted,
    AutoscaleFailed,
    FleetScaled,
    RunOpened,
)

PLACES = 10
SETTINGS = AutoscaleSettings(pools={"rollout": PoolBounds(min=1, max=8)})


def load(wanted: int, demand: int, *, live: int | None = None, under_way: int | None = None) -> PoolLoad:
    """A pool that works on as much of the demand as it has places for."""
    live = wanted if live is None else live
    under_way = min(demand, live * PLACES) if under_way is None else under_way
    return PoolLoad("rollout", wanted, live, PLACES, demand - under_way, under_way)


def decide(
    *loads: PoolLoad,
    settings: AutoscaleSettings = SETTINGS,
    last: Scaling | None = None,
    answer: dict[str, int] | None = None,
    every_s: float = 5.0,
) -> list[Change]:
    """Return the changes after looks that lie five seconds apart, the newest at 1000 s."""
    looks = [Look(1000.0 - every_s * ago, {one.pool: one}) for ago, one in enumerate(reversed(loads))]
    return changes(settings, looks[::-1], {"rollout": last} if last is not None else {}, answer)


def scaled(by: str, ago_s: float) -> Scaling:
    return Scaling(1, 2, by, "", int((1000.0 - ago_s) * 1e9))  # type: ignore[arg-type]


def test_a_pool_grows_to_what_waited_through_the_whole_window():
    [change] = decide(*[load(2, 35)] * 4)

    assert change == Change("rollout", 4, "15 wait for 20 places")


def test_it_at_most_doubles_and_stays_within_its_bounds():
    assert decide(*[load(2, 500)] * 4)[0].processes == 4
    [change] = decide(*[load(6, 500)] * 4)
    assert change == Change("rollout", 8, "440 wait for 60 places; autoscale.pools.rollout is 1 to 8")
    assert decide(*[load(8, 500)] * 4) == []


@pytest.mark.parametrize("looks", [[load(2, 35)] * 3, [load(2, 35), load(2, 35), load(2, 20), load(2, 35)]])
def test_nothing_changes_before_a_window_is_whole_or_where_the_load_left_it_once(looks: list[PoolLoad]):
    assert decide(*looks) == []


def test_a_pool_shrinks_to_what_holds_the_greatest_demand_of_the_window():
    [change] = decide(load(6, 12), load(6, 22), load(6, 5), load(6, 5))

    assert change == Change("rollout", 3, "63 % of 60 places idle")  # 22 of 30: a quarter to spare


def test_a_constant_demand_is_reached_and_then_never_left():
    for demand in range(0, 130):
        for start in range(1, 9):
            count, path = start, [start]
            while found := decide(*[load(count, demand)] * 4):
                count = found[0].processes
                path.append(count)
                assert len(path) < 6, f"demand {demand} from {start}: {path}"
            assert path in (sorted(path), sorted(path, reverse=True)), f"demand {demand} from {start}: {path}"


@pytest.mark.parametrize(
    ("last", "what"),
    [
        (scaled("autoscale", 10), "changed 10 s ago, left alone for 50 s more"),
        (scaled("command", 100), "left as asyncrl scale asked, for 500 s more"),
        (scaled("autoscale", 61), ""),
        (scaled("command", 601), ""),
    ],
)
def test_a_pool_is_left_alone_after_a_change_and_longer_after_a_users(last: Scaling, what: str):
    grows = [load(2, 35)] * 4

    assert held(SETTINGS, "rollout", grows[0], last, 1000.0) == what
    assert bool(decide(*grows, last=last)) == (not what)
    assert bool(decide(*grows, last=last, answer={"rollout": 5})) == (not what)


def test_a_pool_whose_processes_have_not_all_started_is_left_alone():
    assert decide(*[load(2, 35, live=1)] * 4) == []


def test_a_pool_outside_its_bounds_goes_there():
    assert decide(load(9, 90)) == [Change("rollout", 8, "autoscale.pools.rollout is 1 to 8")]


def test_a_users_function_decides_within_the_bounds():
    assert decide(load(2, 0), answer={"rollout": 3}) == [Change("rollout", 3, "your function answers 3")]
    [change] = decide(load(2, 0), answer={"rollout": 0})
    assert change == Change("rollout", 1, "your function answers 0; autoscale.pools.rollout is 1 to 8")
    assert decide(load(2, 0), answer={}) == []


def made(**pools: PoolBounds) -> MadeState:
    case = MadeState()
    text = {"pools": {pool: {"min": bounds.min, "max": bounds.max} for pool, bounds in pools.items()}}
    text["function"] = "mine.py:scale"
    tables = {"autoscale": text, "engine": {"max_running": 8}, "rollout": {"slots": 256}}
    case.publish(RunOpened(100, 0, tables), at_s=2.0)
    for role in (*FLEET, "supervisor"):
        case.publish(ActorStarted(role, f"{role}-1", "elsewhere", 1), at_s=3.0).vitals(f"{role}-1")
    return case


def test_loads_come_from_queues_and_from_what_engines_report():
    case = made().queue("rollout", waiting=7, under_way=200).vitals("engine-1", requests=11)

    loads = pool_loads(case.state)

    assert loads["rollout"] == PoolLoad("rollout", 1, 1, 256, 7, 200)
    assert loads["engine"] == PoolLoad("engine", 1, 1, 8, 3, 8)
    assert set(loads) == {"rollout", "reward", "engine"}
    assert loads["rollout"].idle_share == 1 - 200 / 256


def test_status_shows_the_last_change_with_its_reason_and_why_a_pool_is_left_alone():
    case = made(rollout=PoolBounds(), reward=PoolBounds())
    case.publish(FleetScaled({"rollout": 2}, "autoscale", "9 wait for 4 places", 3), at_s=NOW_S - 42)
    case.publish(FleetScaled({"engine": 3}, "command"), at_s=NOW_S - 10)
    case.publish(AutoscaleFailed("raised: no"))

    status = run_status(case.state, int(NOW_S * 1e9))

    by_pool = {one.pool: one for one in status.scalings}
    assert list(by_pool) == ["rollout", "reward", "engine"]
    first = by_pool["rollout"]
    assert (first.before, first.after, first.by, first.reason) == (1, 2, "autoscale", "9 wait for 4 places")
    assert first.held == "changed 42 s ago, left alone for 18 s more"
    assert (by_pool["reward"].at_s, by_pool["reward"].held) == (None, "")
    assert (by_pool["engine"].by, by_pool["engine"].held) == ("command", "")
    assert status.autoscale_fault == "raised: no"
    assert render(status) is not None
