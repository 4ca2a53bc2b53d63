"""Requests to one engine, sent by a separate process, and the times at which their tokens arrive.

`python -m benchmarks.load SETTINGS`, with SETTINGS as JSON. Each line on stdin is answered with the tokens since the
line before; the end of stdin ends the process.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader, Record
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import read_key
from asyncrl.engine.fleet import Fleet
from asyncrl.engine.generator import Generator, Watch
from asyncrl.engine.request_options import RequestOptions
from asyncrl.framing import pack
from asyncrl.telemetry.logs import open_log
from benchmarks.stage import BenchError, Stage
from topics.engines import ENGINE_GONE, ENGINE_READY, ENGINE_UPDATING
from topics.topic import ENGINES
from topics.trajectories import Answer
from topics.wire import decode

PROMPT = 128  # tokens of a prompt
PROBES = 16  # requests whose every token is reported
_PORTION = 16  # tokens that the other requests report at a time
BEGAN = -1  # instead of a version: a request was sent, and has no token
# longer than a server needs for all prompts: after it, a request without a token waits for room in the cache
_WAITED_S = 1.0
_NEWS = (ENGINE_READY, ENGINE_UPDATING, ENGINE_GONE)


def context_of(answer: int) -> int:
    """Return the context length of a model that answers with up to this many tokens."""
    return PROMPT + 2 * answer


class LoadSettings(msgspec.Struct):
    """The requests of the load."""

    bus: str  # file with its address
    run: str
    key: str  # file
    running: int
    in_place: bool  # engines take new weights under running requests
    vocabulary: int
    answer: int  # tokens of the longest answer; the shortest has half as many


class Events(msgspec.Struct):
    """Times of tokens, with request and version, or times when a request `BEGAN`; columns of equal length."""

    times: list[float] = []
    requests: list[int] = []
    versions: list[int] = []
    sent: list[float] = []  # times at which requests were sent to the engine, also the rests of aborted requests

    def note(self, request: int, version: int) -> None:
        """Add an event at the current time."""
        self.times.append(time.monotonic())
        self.requests.append(request)
        self.versions.append(version)

    def extend(self, others: Events) -> None:
        """Append other events."""
        self.times += others.times
        self.requests += others.requests
        self.versions += others.versions
        self.sent += others.sent


class Update(NamedTuple):
    """An update, in times of this host's clock."""

    version: int
    stepped: float  # end of the step that made the version
    updating: float  # `engine.updating`
    ready: float  # `engine.ready`


class Load:
    """The process that sends the requests."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, stage: Stage, asked: dict[str, Any]) -> Load:
        """Start the process with the one engine of a stage; `asked` are the other fields of `LoadSettings`."""
        address = stage.files.credentials / "rollout.json"
        key = stage.files.engine_key_file(stage.config.engine, "engine-1")
        settings = LoadSettings(str(address), stage.config.run, str(key), **asked)
        pipe = asyncio.subprocess.PIPE
        words = ["-m", "benchmarks.load", msgspec.json.encode(settings).decode()]
        return cls(await asyncio.create_subprocess_exec(sys.executable, *words, stdin=pipe, stdout=pipe))

    async def events(self) -> Events:
        """Return the tokens since the last call."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(b"\n")
            size = int.from_bytes(await process.stdout.readexactly(4), "little")
            return msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Events)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            raise BenchError(f"the load ended with code {await process.wait()}") from error

    async def end(self) -> None:
        """End the process."""
        await self._process.communicate(b"")


def silence(events: Events, since: float, until: float) -> dict[str, float]:
    """Return the longest time without a token: of all requests together, and the median and maximum over the probes."""
    seen: dict[int, list[float]] = {}
    times = []
    for at, request, version in zip(events.times, events.requests, events.versions, strict=True):
        if version == BEGAN or not since <= at <= until:
            continue
        times.append(at)
        if request < PROBES:
            seen.setdefault(request, []).append(at)
    each = [_longest(one) for one in seen.values()] or [0.0]
    return {
        "silence_s": _longest(times),
        "request_silence_s": float(np.median(each)),
        "request_silence_most_s": max(each),
    }


def transition(events: Events, update: Update, *, in_place: bool) -> dict[str, float]:
    """Return seconds until most requests have a token again, and until they have a token of the new version.

    Counted are requests that had tokens when the update began and that continued after it. Requests that waited for
    room in the server's cache, or ended during the update, are left out. In an update in place, a request reports 16
    tokens at a time, so `again_s` uses only the probes.


    Args:
        events: must contain the newest event of each request before the update.

    Returns:
        `generating`: number of counted requests; `waiting`: requests without a token; `waited`: counted requests
        without a new token 1 s after the update. `again_s` and `new_90_s` are missing if too few requests have
        continued. `sent_s`: time from the begin of an update until as many requests were sent again as `again_s` needs;
        only in `resume`.
    """
    # A token of the old version may come late from a request that was aborted.
    gone_on = _in_place if in_place else _by_new
    generating, others = _generating(events, update, gone_on)
    counted = {request for request in generating if request < PROBES} if in_place else generating
    again: dict[int, float] = {}
    new: dict[int, float] = {}
    for at, request, version in zip(events.times, events.requests, events.versions, strict=True):
        if gone_on(update, at, version) and request in counted:
            again.setdefault(request, at)
        if _by_new(update, at, version) and request in generating:
            new.setdefault(request, at)
    soon = sum(at <= update.ready + _WAITED_S for at in again.values())
    figures = {"generating": float(len(generating)), "waiting": float(others), "waited": float(len(counted) - soon)}
    for name, firsts, most, share, since in (
        ("again_s", again, counted, 0.95, update.updating),
        ("new_90_s", new, generating, 0.9, update.stepped),
    ):
        if most and len(firsts) >= (least := math.ceil(share * len(most))):
            figures[name] = sorted(firsts.values())[least - 1] - since
    sent = [at - update.updating for at in events.sent if at > update.updating]
    if not in_place and len(sent) >= (least := math.ceil(0.95 * len(counted))):
        figures["sent_s"] = sorted(sent)[least - 1]
    return figures


def _in_place(update: Update, at: float, version: int) -> bool:
    return at > update.ready and version != BEGAN


def _by_new(update: Update, at: float, version: int) -> bool:
    return version >= update.version


def _generating(events: Events, update: Update, gone_on: Callable[[Update, float, int], bool]) -> tuple[set[int], int]:
    """Return requests that had tokens when an update began and continued after it, and the number without tokens."""
    newest: dict[int, int] = {}  # version of the newest event of each request before the update
    ended = set()
    again = set()
    for at, request, version in zip(events.times, events.requests, events.versions, strict=True):
        if at <= update.updating:
            newest[request] = version
        elif version == BEGAN and request not in again:
            ended.add(request)
        elif gone_on(update, at, version):
            again.add(request)
    having = {request for request, version in newest.items() if version != BEGAN}
    return having - ended, len(newest) - len(having)


def _longest(times: list[float]) -> float:
    return max((later - earlier for earlier, later in itertools.pairwise(times)), default=0.0)


class _Noted(Watch):
    """Records the times of one request's tokens."""

    def __init__(self, number: int, answer: Answer, requests: _Requests) -> None:
        self._number, self._answer, self._requests = number, answer, requests

    def requested(self, engine_id: str) -> None:
        """See `Watch`."""
        self._requests.events.sent.append(time.monotonic())

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        """See `Watch`."""
        if tokens:
            self._requests.events.note(self._number, int(self._answer.versions[-1]))


class _Requests:
    """A fixed number of concurrent requests; a new one follows each that ends."""

    def __init__(self, settings: LoadSettings, fleet: Fleet) -> None:
        self.events = Events()
        model, counts = ModelInfo("any", settings.vocabulary, context_of(settings.answer)), dict[str, float]()
        manner = RequestOptions(portion=_PORTION, in_place=settings.in_place)
        self._common = Generator(fleet, model, str, counts=counts, manner=manner)
        self._probing = Generator(fleet, model, str, counts=counts, manner=manner._replace(portion=1))
        # The rest of an aborted request is streamed even if it is short; otherwise its first token arrives with its
        # last.
        self._common.quiet_tokens = self._probing.quiet_tokens = 0
        self._settings = settings

    async def ask(self, number: int) -> None:
        """Send one request after the other."""
        rng, most = np.random.default_rng(number), self._settings.answer
        generator = self._probing if number < PROBES else self._common
        while True:
            ids = rng.integers(3, self._settings.vocabulary, PROMPT).astype(np.int32)
            sampling = SamplingParams(int(rng.integers(most // 2, most)), ignore_eos=True)
            answer = Answer("generate", "", done=False)
            self.events.note(number, BEGAN)
            await generator.generate(ids, sampling, answer=answer, watch=_Noted(number, answer, self))


@asynccontextmanager
async def fleet_of(bus: Bus, key_file: Path) -> AsyncIterator[Fleet]:
    """Follow the engines of a run by its messages, for the length of the block."""
    key, faults = read_key(key_file), list[BaseException]()
    fleet = Fleet(lambda _, found: EngineClient(found, api_key=key), counts={}, fail=faults.append)

    def take(record: Record) -> None:
        if (topic := bus.tables.topic_of(record.subject)) in _NEWS:
            fleet.apply(decode(topic.message, record.data))

    reader = LogReader(bus, ENGINES, take)
    await reader.start()
    try:
        yield fleet
    finally:
        await fleet.close()
        await reader.close()


async def _send(settings: LoadSettings) -> None:
    bus = await Bus.connect(BusAddress.read(Path(settings.bus)), settings.run)
    async with fleet_of(bus, Path(settings.key)) as fleet:
        await _kept_up(settings, fleet)
    await bus.close()


async def _kept_up(settings: LoadSettings, fleet: Fleet) -> None:
    """Keep the requests running until stdin ends, or one of them fails."""
    requests = _Requests(settings, fleet)
    tasks = [asyncio.create_task(requests.ask(number)) for number in range(settings.running)]
    answering = asyncio.create_task(_answer(requests))
    await asyncio.wait([answering, *tasks], return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done():
            print(f"a request ended: {task.exception()}", file=sys.stderr)
        task.cancel()
    answering.cancel()
    await asyncio.gather(answering, *tasks, return_exceptions=True)


async def _answer(requests: _Requests) -> None:
    """Answer each line until stdin ends."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while await lines.readline():
        events, requests.events = requests.events, Events()
        sys.stdout.buffer.write(pack(events))
        sys.stdout.flush()


if __name__ == "__main__":
    import uvloop

    open_log()  # log to stderr: stdout is for figures
    uvloop.run(_send(msgspec.json.decode(sys.argv[1], type=LoadSettings)))
