"""Engines that answer those requests alone that ask for their weights."""

from asyncrl.engine.answer import Generation
from asyncrl.engine.errors import EngineUnavailable
from asyncrl.engine.fleet import Wanted
from harness.scripted_servers import Servers, failing, some
from topics.engines import EngineUpdating


async def test_a_reserved_engine_answers_those_alone_that_ask_for_its_weights_and_others_do_where_it_is_not_there():
    servers = Servers(reserved=lambda name: name == "canary")
    canary, live = servers.start("canary", 1), servers.start("live", 0)
    for first in ("", "0:1:made", "0:2:made"):
        await servers.generate(wanted=Wanted(first=first))
    assert (len(canary.asked), len(live.asked)) == (1, 2)

    canary.answers = [failing(EngineUnavailable("canary", "gone"))]
    answer = await servers.generate(wanted=Wanted(first="0:1:made"))
    assert answer.versions.tolist() == [0] * 20

    servers.start("canary", 1)

    def rolled_back() -> Generation:
        servers.fleet.apply(EngineUpdating("canary", 0, 0))
        return some(7, "0:1:made", finish="abort")

    canary.answers = [rolled_back]
    answer = await servers.generate(wanted=Wanted(first="0:1:made"))
    assert answer.versions.tolist() == [1] * 7 + [0] * 13  # in the middle of a reply
