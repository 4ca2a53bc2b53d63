"""Timed clients of a gateway for measurements, with streamed replies over its three APIs, and a model for them."""

from __future__ import annotations

import asyncio
import itertools
import string
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
from safetensors.numpy import load_file, save_file

from asyncrl.bus.publish import publish
from asyncrl.live.keys import make_key
from asyncrl.training.init_model import ModelShape, create_model, write_tokenizer
from benchmarks.stage import BenchError, Stage

CONTEXT = 4096
ALPHABET = string.printable[:95]
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
LETTERS = "abcdefghijklmnopqrstuvwxyz >"  # of messages; the template puts the last one after each message
SPECIAL = 3  # tokens of the made model: padding, begin, end
_UP_S = 120.0
_SILENT_S = 120.0


class Reply(NamedTuple):
    """A streamed reply as its client received it; seconds are of the monotonic clock."""

    asked_s: float
    whole_s: float  # from the request to the end of the stream
    came: list[tuple[float, int]]  # when each text came, and its characters
    status: int  # of HTTP; 0: no connection
    broken: bool  # the stream did not end, or reported a failure
    events: int = 0
    text: str = ""
    turn: str = ""

    @property
    def first_s(self) -> float:
        """Return the seconds from the request to its first text; infinite if there was none."""
        return self.came[0][0] - self.asked_s if self.came else float("inf")

    @property
    def silence_s(self) -> float:
        """Return the longest time between two texts."""
        return max((later[0] - one[0] for one, later in itertools.pairwise(self.came)), default=0.0)

    @property
    def failed(self) -> bool:
        """Return whether the client got no whole reply."""
        return self.broken or self.status != 200


def talking_model(directory: Path) -> Path:
    """Write an untrained model whose replies do not end before their limit; returns the directory.

    One dimension is the same in all embeddings, and the head's rows of the special tokens have the opposite sign there.
    """
    create_model(directory, alphabet=ALPHABET, seed=1, shape=ModelShape(context=CONTEXT), template=TEMPLATE)
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][:, 0] = 0.1
    weights["lm_head.weight"][:SPECIAL, 0] = -4.0
    save_file(weights, file, metadata={"format": "pt"})
    return directory


def write_talking_tokenizer(directory: Path, vocabulary: int) -> None:
    """Write a tokenizer with one character per token, for a model without one, and the template of `talking_model`.

    The characters after `LETTERS` are private or rare ones.
    """
    rare = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE), *range(0x20000, 0x2A6E0)]))
    write_tokenizer(directory, (LETTERS + rare)[: vocabulary - SPECIAL], context=CONTEXT, template=TEMPLATE)


async def gateway_key(stage: Stage, http: aiohttp.ClientSession, address: str) -> str:
    """Create a key, and return it once the gateway accepts it.

    Raises:
        BenchError: the gateway did not accept it in time.
    """
    key, added = make_key("bench")
    await publish(stage.bus, added)
    headers = {"Authorization": f"Bearer {key}"}
    try:
        async with asyncio.timeout(_UP_S):
            while True:
                try:
                    async with http.get(f"{address}/v1/models", headers=headers) as response:
                        if response.status == 200:
                            return key
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)  # no event announces that the gateway listens
    except TimeoutError:
        raise BenchError(f"the gateway at {address} did not answer within {_UP_S:.0f} s") from None


class Talk:
    """One conversation over one of the APIs."""

    def __init__(self, http: aiohttp.ClientSession, address: str, key: str, api: str) -> None:
        self._http = http
        self._address = address
        self._headers = {"Authorization": f"Bearer {key}", "anthropic-version": "2023-06-01"}
        self._api = api
        self._messages: list[dict[str, str]] = []
        self._last = ""  # id of the last turn

    async def send(self, text: str, *, tokens: int, temperature: float = 1.0) -> Reply:
        """Send a message, and read the reply to its end."""
        self._messages.append({"role": "user", "content": text})
        path, body = self._request(text, tokens)
        raw = msgspec.json.encode({"model": "any", "stream": True, "temperature": temperature, **body})
        reply = await timed(self._http, f"{self._address}{path}", raw, self._headers, _DELTAS[self._api])
        self._messages.append({"role": "assistant", "content": reply.text})
        self._last = reply.turn
        return reply

    def _request(self, text: str, tokens: int) -> tuple[str, dict[str, Any]]:
        if self._api == "chat":
            return "/v1/chat/completions", {"messages": self._messages, "max_tokens": tokens}
        if self._api == "messages":
            return "/v1/messages", {"messages": self._messages, "max_tokens": tokens}
        before = {"previous_response_id": f"resp_{self._last}"} if self._last else {}
        return "/v1/responses", {"input": text, "max_output_tokens": tokens, **before}


async def timed(
    http: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str], deltas: Callable[[bytes], str | None]
) -> Reply:
    """Send a request, and time the events of its answer.

    Args:
        deltas: returns the text of an event, "" for an event without text, None for the last event; raises ValueError
            if the event reports a failure.
    """
    asked = time.monotonic()
    status, texts, events, turn, came = 0, list[str](), 0, "", list[tuple[float, int]]()
    ended = False
    try:
        timeout = aiohttp.ClientTimeout(sock_read=_SILENT_S)
        headers = {"Content-Type": "application/json", **headers}
        async with http.post(url, data=body, headers=headers, timeout=timeout) as response:
            status, turn = response.status, response.headers.get("x-asyncrl-turn", "")
            async for data in events_of(response):
                delta = deltas(data)
                if delta is None:
                    ended = True
                elif delta:
                    came.append((time.monotonic(), len(delta)))
                    texts.append(delta)
                events += 1
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
        ended = False
    whole = time.monotonic() - asked
    return Reply(asked, whole, came, status, not ended, events, "".join(texts), turn)


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """The data of server-sent events."""
    async for line in response.content:
        if line.startswith(b"data: "):
            yield line[6:].strip()


def _of_chat(data: bytes) -> str | None:
    if data == b"[DONE]":
        return None
    event = msgspec.json.decode(data)
    if "error" in event:
        raise ValueError(event["error"])
    choices = event["choices"]
    return (choices[0]["delta"].get("content") or "") if choices else ""


def _of_responses(data: bytes) -> str | None:
    event = msgspec.json.decode(data)
    kind = event["type"]
    if kind == "response.failed":
        raise ValueError(event)
    if kind in ("response.completed", "response.incomplete"):
        return None
    return str(event["delta"]) if kind == "response.output_text.delta" else ""


def _of_messages(data: bytes) -> str | None:
    event = msgspec.json.decode(data)
    kind = event["type"]
    if kind == "error":
        raise ValueError(event)
    if kind == "message_stop":
        return None
    return str(event["delta"].get("text", "")) if kind == "content_block_delta" else ""


_DELTAS = {"chat": _of_chat, "responses": _of_responses, "messages": _of_messages}
APIS = tuple(_DELTAS)


def percentile(values: list[float], share: float) -> float:
    """Return the value below which this share of the values is (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")
