"""The client reads and writes headers as that of nats-py does, and gives up in time."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path

import pytest
from nats.aio.client import Client as PlainClient
from nats.aio.transport import TcpTransport

from asyncrl.bus.address import BusAddress
from asyncrl.bus.client import Client
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusUnreachable
from asyncrl.bus.server import EmbeddedServer


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\r\n",
        b"Nats-Msg-Id: prompt.issued:p000001-3:0\r\nwriter: 1a2b\r\ntemperature: 0.7\r\n\r\n",
        b"none:\r\ntight:value\r\n spaced :\t value \t\r\nwithout a colon\r\ntwo words: dropped\r\na: b: c\r\n",
        "text: Grüße, \u00a0 kept\u00a0\r\nnämé: dropped\r\n".encode(),
        b"damaged: \xff\xfe\r\n\xff: dropped\r\nlast: one",
    ],
)
def test_headers_are_read_as_by_the_plain_client(raw):
    assert Client._parse_header_lines(raw) == PlainClient._parse_header_lines(raw)


@pytest.mark.parametrize(
    "headers",
    [None, {}, {"by": "rollout-2"}, {"by": "rollout-2", "text": "Grüße: ü"}, {"text": "two\nlines", "by": "x\r\ny: z"}],
)
async def test_headers_are_written_as_by_the_plain_client(headers):
    written = []
    for client in (Client(), PlainClient()):
        sent = []

        async def keep(command, sent=sent):
            sent.append(command)

        client._send_command = keep
        await client._send_publish("a.subject", "a.reply", b"body", 4, headers)
        written.append((sent, client.stats))
    assert written[0] == written[1] and len(written[0][0]) == 1


async def test_a_server_that_refuses_in_the_moment_of_the_deadline_is_named(monkeypatch: pytest.MonkeyPatch):
    async def refused(*_: object, **__: object) -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:  # as wait_for does it where both come at once
            raise ConnectionRefusedError("refused") from None

    monkeypatch.setattr(TcpTransport, "connect", refused)
    async with asyncio.timeout(60):
        with pytest.raises(BusUnreachable, match=r"did not answer within 0 s .*refused"):
            await Bus.connect(BusAddress("nats://127.0.0.1:1"), "a-run", deadline_s=0.1)


async def test_a_client_ends_although_its_cancellation_arrives_as_the_server_refuses_a_connection(tmp_path: Path):
    server = EmbeddedServer(tmp_path)
    bus = await Bus.connect(await server.start(), "a-run")
    cancelled = asyncio.get_running_loop().create_future()

    def cancel(reconnecting: asyncio.Task) -> None:
        if not cancelled.done():
            reconnecting.cancel()
            cancelled.set_result(reconnecting)

    def make_task(loop: asyncio.AbstractEventLoop, work: Coroutine, **options: object) -> asyncio.Task:
        task = asyncio.Task(work, loop=loop, **options)
        if work.__name__ == "open_connection":
            dialling = asyncio.current_task()
            task.add_done_callback(lambda _: cancel(dialling))
        return task

    asyncio.get_running_loop().set_task_factory(make_task)
    await server.stop()
    async with asyncio.timeout(60):
        reconnecting = await cancelled
    await asyncio.wait({reconnecting}, timeout=10)
    assert reconnecting.done()
    await bus.close()
