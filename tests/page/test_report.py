"""The data of a report, and what the page's own server gives."""

import base64
import gzip
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import ClientSession

from asyncrl.bus.address import BusAddress
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.page.pieces import pieces_of
from asyncrl.page.report import write_report
from asyncrl.page.serve import NoWebsocket, browser_login, served_page
from asyncrl.run.connect import FoundRun
from harness.models import made_model
from harness.page_feed import RUN, FedRun, fed_run
from topics.topic import HISTORY, TRAJECTORIES, VITALS

HOSTILE = "</script><script>alert(1)</script>"


@pytest.fixture
async def fed(tmp_path: Path) -> AsyncIterator[FedRun]:
    async with fed_run(tmp_path / "run") as run:
        yield run


async def report_of(fed: FedRun, folder: Path, metrics: Path | None = None) -> tuple[bytes, dict[str, Any]]:
    """Write a report; returns the page and the data inside."""
    path = folder / "report.html"
    await write_report(path, fed.owner, await fed.state(), None, metrics)
    page = path.read_bytes()
    found = re.search(rb'id="data">([A-Za-z0-9+/=]+)</script>', page)
    assert found is not None
    assert path.stat().st_mode & 0o777 == 0o600
    return page, msgspec.msgpack.decode(gzip.decompress(base64.b64decode(found[1])), strict=False)


def of_topic(data: dict[str, Any], topic: str) -> list[Any]:
    return [record for record in data["records"] if record[0] == topic]


async def test_a_report_has_the_state_the_steps_and_the_newest_texts(fed: FedRun, tmp_path: Path):
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"event":"step","step":1,"loss":0.5}\n{"event":"eval","version":1}\n{"event":"st')
    await fed.train(range(1, 8))
    await fed.moments(3)
    await fed.vitals(range(1, 4), 1000.0)
    await fed.trajectory("p000001-0", completion=HOSTILE)

    page, data = await report_of(fed, tmp_path, metrics)

    counts = {"run.state": 1, "batch.trained": 7, "run.history": 3, "vitals.taken": 3, "trajectory.graded": 1}
    counts |= {"trajectory.generated": 1, "metrics.row": 1}
    assert {topic: len(of_topic(data, topic)) for topic in counts} == counts
    assert HOSTILE.encode() not in page
    assert HOSTILE.encode() in of_topic(data, "trajectory.generated")[0][3]


async def test_a_report_is_written_without_streams_that_ended_with_their_server(fed: FedRun, tmp_path: Path):
    await fed.train(range(1, 3))
    await fed.trajectory("p000001-0")
    for stream in (VITALS, HISTORY):
        await fed.owner.api(f"STREAM.DELETE.{stream.full_name(RUN)}")
    await fed.owner.api(f"STREAM.PURGE.{TRAJECTORIES.full_name(RUN)}")
    await fed.provision_again()
    await fed.owner.api(f"STREAM.DELETE.{HISTORY.full_name(RUN)}")

    _, data = await report_of(fed, tmp_path)

    assert len(of_topic(data, "batch.trained")) == 2
    assert not of_topic(data, "run.history")
    assert not of_topic(data, "trajectory.generated")


async def test_the_page_is_served_on_loopback_with_the_login_in_the_fragment_alone(fed: FedRun):
    login = fed.login("observer")
    with served_page(fed.found("observer"), "observer") as url:
        assert url.startswith("http://127.0.0.1:")
        assert login.password in url.split("#")[1]
        async with ClientSession(url.split("#")[0]) as client:
            async with client.get("/") as answer:
                page = await answer.text()
                assert answer.status == 200
            async with client.get("/pieces.json") as answer:
                assert await answer.json() is None  # a run on another machine
            async with client.get("/../credentials/monitor.json") as answer:
                assert answer.status == 404
    assert f"connect-src 'self' {login.websocket};" in page
    assert login.password not in page


def test_a_login_without_a_websocket_is_named():
    with pytest.raises(NoWebsocket, match=r"nats\.websocket"):
        browser_login(FoundRun(RUN, None, BusAddress("nats://127.0.0.1:1")), "monitor")


def test_the_pieces_of_a_text_are_the_text(tmp_path: Path):
    tokenizer = TaskTokenizer.load(made_model(tmp_path / "model"))
    ids = tokenizer.encode("^abc=cba").tolist()

    pieces = pieces_of(tokenizer, set(ids))

    assert "".join(pieces[token] for token in ids) == tokenizer.decode_all(ids)
