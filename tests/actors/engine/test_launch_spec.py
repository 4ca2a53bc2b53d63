"""What an engine actor starts its server with."""

from collections.abc import Callable
from typing import Any

import pytest

from actors.engine.launch_spec import home_of
from asyncrl.bus.connection import Bus
from harness.stage import Stage


@pytest.mark.parametrize(
    ("gateway", "seconds"),
    [
        ({"count": 0}, 0.0),
        ({"count": 1}, 0.5),
        ({"count": 1, "engines": "other"}, 0.0),
        ({"count": 1, "engines": "own"}, 0.5),
    ],
    ids=["no gateway", "all answer", "others answer", "it alone answers"],
)
def test_an_engine_waits_before_an_update_where_clients_wait_for_it(
    bus: Bus, stage: Callable[..., Stage], gateway: dict[str, Any], seconds: float
):
    groups = {name: {"kind": "embedded"} for name in ("own", "other", "third")}
    made = stage(engine={"groups": groups}, gateway={"idle_wait_s": 0.5, **gateway})
    made.make_model()

    assert home_of(made.context("engine-own", bus), None, "").gap_s == seconds
