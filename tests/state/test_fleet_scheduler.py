"""Runs that cannot share a pool, on states made by hand."""

import msgspec
import pytest

from asyncrl.config.settings import Config
from asyncrl.state.fleet_scheduler import gpus_that_meet, why_not
from asyncrl.state.run_state import RunState
from harness.states import MadeState
from topics.actors import FleetScaled


def made(**tables: object) -> RunState:
    case = MadeState()
    case.state.config = msgspec.convert({"placement": {"lent": ["engine", "rollout"]}} | tables, Config)
    return case.publish(FleetScaled(dict.fromkeys(case.state.config.engine.pools, 0))).state


def on_gpus(*gpus: int, lent: tuple[str, ...] = ("engine",)) -> RunState:
    engine = {"kind": "sglang", "count": len(gpus), "gpus": list(gpus)}
    return made(engine=engine, placement={"lent": list(lent)})


@pytest.mark.parametrize(
    ("state", "pool", "words"),
    [
        (made(), "engine-large", "it has no pool of that name; name one of "),
        (made(), "learner", "it has no pool of that name"),
        (made(autoscale={"pools": {"rollout": {}}}), "rollout", "its config has autoscale.pools.rollout"),
        (on_gpus(0, 1, 2), "engine", "its config has GPUs or addresses for 3 of 4; name all 4 there"),
        (on_gpus(0, 1, 2, 3, lent=()), "engine", "its config keeps it; put engine into its placement.lent"),
        (made(), "reward", "put reward into its placement.lent"),
    ],
)
def test_a_run_that_cannot_share_is_refused_with_what_to_do(state: RunState, pool: str, words: str):
    assert words in why_not(state, pool, 4)


def test_runs_on_cpus_or_with_cards_in_reverse_share():
    assert why_not(made(), "engine", 4) == why_not(on_gpus(0, 1, 2, 3), "engine", 4) == ""
    assert gpus_that_meet(made(), made(), "engine") == ""
    assert gpus_that_meet(on_gpus(0, 1), on_gpus(1, 0), "engine") == ""
    assert gpus_that_meet(on_gpus(0, 1), on_gpus(1, 0), "rollout") == ""


def test_runs_whose_engines_would_meet_on_a_card_do_not():
    assert "take the first GPUs of [0, 1] and of [0, 1]" in gpus_that_meet(on_gpus(0, 1), on_gpus(0, 1), "engine")
    assert "expected each list to be the other in reverse" in gpus_that_meet(on_gpus(0, 1), made(), "engine")
    servers = [made(engine={"kind": "external", "addresses": [f"http://{name}:1" for name in "ab"]}) for _ in range(2)]
    assert "'http://a:1'" in gpus_that_meet(servers[0], servers[1], "engine")
