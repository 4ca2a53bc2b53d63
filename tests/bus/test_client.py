"""The client reads and writes headers as that of nats-py does."""

import pytest
from nats.aio.client import Client as PlainClient

from asyncrl.bus.client import Client


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
