"""Time that the gateway adds to a reply, compared with direct requests to the engine, and in long conversations."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from operator import attrgetter
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np

from asyncrl.config.settings import Config
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.control import read_key
from asyncrl.live.apis.chat import ChatCompletions
from asyncrl.live.conversation import Conversations, history_key
from asyncrl.live.difference import History, TurnBoundary
from asyncrl.live.stored import TurnReader
from benchmarks.stage import BenchError, Stage, bench_config, report
from benchmarks.talks import Reply, Talk, gateway_key, percentile, talking_model, timed
from topics.engines import ENGINE_READY, EngineReady
from topics.topic import ENGINES
from topics.wire import decode

_TURNS = 3  # turns of a conversation
_WORDS = "abcdefghijklmnopqrstuvwxyz "
_ASKED = 60  # characters of a message
_SHORT, _LONG = 8, 128  # tokens of the replies whose CPU times are compared
_MEASURED_S = 600.0
_STREAM_TOKENS = 4


async def bench_gateway(*, turns: int, tokens: int) -> dict[str, float]:
    """Measure turns of three-turn conversations; after each turn, send its ids directly to the engine.

    Both sample greedily with equal but separate prefix caches, so the tokens are the same.

    Args:
        turns: number of measured turns.
        tokens: of a reply.

    Returns:
        Milliseconds to the first text and to the end, of both and their difference; CPU time of the gateway per turn
        and per event of a stream; and the figures of `rendering`.

    Raises:
        BenchError: a reply failed, or an actor failed.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = talking_model(Path(scratch) / "model")
        figures = rendering(model)
        config = _config(model)
        async with Stage.open(config) as stage, aiohttp.ClientSession() as http:
            await stage.enter_all()
            pairs = Pairs(stage, http, tokens)
            await stage.until(pairs.open(), _MEASURED_S)
            await stage.until(pairs.run(turns), _MEASURED_S)
            figures |= pairs.figures()
            figures |= await stage.until(_cpu(stage, pairs, turns), _MEASURED_S)
    return figures


def _config(model: Path) -> Config:
    return bench_config(
        "bench-gateway",
        model={"path": str(model)},
        gateway={"count": 1, "port": 0, "stream_tokens": _STREAM_TOKENS, "stream_s": 0.0},
        learner={"steps": 1_000_000},
        engine={"kind": "embedded"},
    )


class Pairs:
    """Turns through the gateway; the prompt of each is then sent directly to the engine."""

    def __init__(self, stage: Stage, http: aiohttp.ClientSession, tokens: int) -> None:
        self._stage = stage
        self._http = http
        self._tokens = tokens
        self._draw = random.Random(1)
        self._turns = TurnReader(stage.bus)
        self._found: list[tuple[Reply, Reply]] = []
        self._engine = self._engine_key = self._key = ""
        self._address = f"http://127.0.0.1:{stage.config.gateway.port}"

    async def open(self) -> None:
        """Find the engine, create a key, and hold one conversation that is not counted."""
        record = await self._stage.follow(ENGINES, ENGINE_READY, lambda record: True)
        self._engine = decode(EngineReady, record.data).address
        settings = self._stage.config.engine
        self._engine_key = read_key(self._stage.files.engine_key_file(settings, "engine-1")) or ""
        self._key = await gateway_key(self._stage, self._http, self._address)
        await self._conversation(_TURNS)
        self._found.clear()

    async def run(self, turns: int) -> None:
        """Hold conversations until `turns` turns are measured."""
        while len(self._found) < turns:
            await self._conversation(_TURNS)
            if len(self._found) % 30 == 0:
                report(f"{len(self._found)} turns")

    async def hold(self, turns: int, tokens: int) -> int:
        """Hold conversations through the gateway only; return the number of events."""
        events = 0
        for _ in range(turns // _TURNS):
            talk = self._talk()
            for _ in range(_TURNS):
                events += _whole(await talk.send(self._message(), tokens=tokens)).events
        return events

    async def _conversation(self, turns: int) -> None:
        talk = self._talk()
        for _ in range(turns):
            through = _whole(await talk.send(self._message(), tokens=self._tokens, temperature=0.0))
            stored = await self._turns.read(through.turn)
            straight = _whole(await self._straight(stored.prompt.tolist()))
            self._found.append((through, straight))

    async def _straight(self, ids: list[int]) -> Reply:
        sampling = {"max_new_tokens": self._tokens, "temperature": 0.0, "stream_interval": _STREAM_TOKENS}
        body = {
            "input_ids": ids,
            "sampling_params": sampling,
            "stream": True,
            "return_logprob": True,
            "extra_key": "bench",
        }
        headers = {"Authorization": f"Bearer {self._engine_key}"}
        return await timed(self._http, f"{self._engine}/generate", msgspec.json.encode(body), headers, _of_engine)

    def _talk(self) -> Talk:
        return Talk(self._http, self._address, self._key, "chat")

    def _message(self) -> str:
        return "".join(self._draw.choices(_WORDS, k=_ASKED))

    def figures(self) -> dict[str, float]:
        """Return milliseconds to the first text and to the end, and their differences."""
        found = {}
        for name, value in (("first_token", attrgetter("first_s")), ("whole", attrgetter("whole_s"))):
            through, straight = ([1e3 * value(pair[which]) for pair in self._found] for which in (0, 1))
            for words, share in (("p50", 0.5), ("p99", 0.99)):
                one, other = percentile(through, share), percentile(straight, share)
                found[f"gateway_{name}_{words}_ms"] = one
                found[f"engine_{name}_{words}_ms"] = other
                found[f"added_{name}_{words}_ms"] = one - other
        return {"turns": float(len(self._found)), **found}


async def _cpu(stage: Stage, pairs: Pairs, turns: int) -> dict[str, float]:
    """Return the gateway's CPU time per turn without events, and per event: from short and long replies."""
    points = []
    for tokens in (_SHORT, _LONG):
        before = stage.cpu_s()["gateway-1"]
        events = await pairs.hold(turns, tokens)
        count = turns // _TURNS * _TURNS
        points.append((events / count, (stage.cpu_s()["gateway-1"] - before) / count))
    (few, short_s), (many, long_s) = points
    event_s = (long_s - short_s) / (many - few)
    return {
        "gateway_cpu_us_per_event": 1e6 * event_s,
        "gateway_cpu_us_per_turn_besides": 1e6 * (short_s - few * event_s),
        f"gateway_cpu_us_per_turn_of_{_LONG}_tokens": 1e6 * long_s,
    }


def _of_engine(data: bytes) -> str | None:
    if data == b"[DONE]":
        return None
    event = msgspec.json.decode(data)
    if "error" in event:
        raise ValueError(event["error"])
    return "." if event["output_ids"] else ""


def _whole(answer: Reply) -> Reply:
    if answer.failed:
        raise BenchError(f"a reply failed: status {answer.status}, {answer.events} events")
    return answer


def rendering(model: Path, rounds: int = 20) -> dict[str, float]:
    """Return medians of CPU milliseconds to build a prompt from messages (find the history, render, tokenise).

    Figures are for turn 2, for turn 100, and their ratio; and for reading the bodies, which hold the whole history.

    Args:
        model: its directory.
        rounds: number of conversations.
    """
    tokenizer = TaskTokenizer.load(model)
    read, made = ({2: list[float](), 100: list[float]()} for _ in range(2))
    for number in range(rounds):
        known, draw = Conversations(TurnBoundary(tokenizer), most_tokens=10_000_000), random.Random(number)
        messages: list[dict[str, Any]] = []
        for turn in range(1, 101):
            messages.append({"role": "user", "content": "".join(draw.choices(_WORDS, k=_ASKED))})
            body = msgspec.json.encode({"model": "any", "messages": messages})
            began = time.thread_time()
            request = ChatCompletions().parse(body)
            parsed = time.thread_time()
            prompt = known.draft(request.messages, "bench")()
            if turn in made:
                made[turn].append(1e3 * (time.thread_time() - parsed))
                read[turn].append(1e3 * (parsed - began))
            reply = {"role": "assistant", "content": "".join(draw.choices(_WORDS, k=_LONG))}
            ids = np.concatenate([prompt.ids, tokenizer.encode(reply["content"])])
            known.put(history_key(reply, prompt.key), History(f"turn-{turn}", ids, len(prompt.ids)))
            messages.append(reply)
    figures = {f"turn_{turn}_render_ms": statistics.median(found) for turn, found in made.items()}
    figures |= {f"turn_{turn}_read_ms": statistics.median(found) for turn, found in read.items()}
    return figures | {"turn_100_over_turn_2": figures["turn_100_render_ms"] / figures["turn_2_render_ms"]}
