"""The size of the stream of turns is that of its setting, and counts with the others."""

import msgspec

from asyncrl.config.settings import Config
from asyncrl.config.stream_capacity import MB, Progress, needs, needs_of_the_rest
from asyncrl.run.sizing import Plan
from harness.configs import the_problem


def test_turns_have_the_room_that_their_setting_gives_them():
    without = Config()
    config = msgspec.convert({"gateway": {"count": 1, "turns_mb": 3}, "nats": {"ledger_max_mb": 1}}, Config)

    assert needs(without, 300)["TURNS"].ample == MB
    made = Plan(config, 300, needs(config, 300))
    assert (made.needs["TURNS"].least, made.sizes["TURNS"]) == (3 * MB, 3 * MB)
    keys = made.needs["SECRETS"].least - MB  # data keys, which no run without a gateway has
    assert keys > 0 and made.least - Plan(config, 300, needs(without, 300)).least == 2 * MB + keys
    assert "then turns are answered and not recorded" in made.table()
    rest = needs_of_the_rest(made.needs, Progress({"TURNS": 2 * MB}, {}, trained=1, left=100))
    assert rest["TURNS"] == made.needs["TURNS"]


def test_a_run_with_a_gateway_that_cannot_fit_is_told_to_keep_fewer_turns():
    served = ("gateway.count=1", "model.create.template={{ messages }}")
    found = the_problem("demo", *served, "nats.disk_max_mb=100", files=True)

    assert "lower gateway.turns_mb, or set learner.steps to what fits" in found.message
