"""Streams that servers break off in the middle of an update."""

import asyncio

from test_generator import Servers

from asyncrl.engine.answer import Generation
from asyncrl.engine.errors import EngineUnavailable
from asyncrl.engine.fleet import Wanted
from harness.stage import until


async def test_a_stream_that_breaks_off_behind_an_update_takes_no_requests_from_its_engine():
    """SGLang does that to a request with tokens to send when it is aborted."""
    servers = Servers()
    one = servers.start("one")

    def breaks() -> Generation:
        servers.start("one", 1)
        raise EngineUnavailable("one", "closed")

    one.answers = [breaks]
    pending = asyncio.create_task(servers.generate())
    await until(lambda: "broken_by_update" in servers.counts, "the stream is broken off")
    servers.fleet.release(servers.fleet.take(Wanted(1)))

    assert (await pending).versions.tolist() == [1] * 20
    assert servers.counts["broken_by_update"] == 1
    assert "engine_unavailable" not in servers.counts
