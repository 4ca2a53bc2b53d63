"""Simulated users of a live run: they ask the policy for words, and their next message tells how they liked the reply.

    actors = ["live_users.py"]

    [task]
    source = "live_users.py:rows"
    options = { users = 64, tastes = 1, think_s = 2.0 }

They use no language model. A user says `say abc` and is pleased by `ABC`. The next request of the session begins with
`good` or `wrong +`; `POST /v1/feedback` takes the reaction to its last reply. With two tastes the other users say `tell
abc`, are pleased by `abc`, and say `wrong -`. Users know only what any client knows: an address and a key. `judge`
reads the users' messages and returns the wish as a hint. The warm-up shows what a hint means (`say abc +`), which users
never write.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from asyncrl import Context, EngineReady, Role

ROLE = Role("users", "service", stops=1, subscribes=("engine.ready",))
TOPICS: list[Any] = []

LETTERS = "abcdefgh"
WORD = 3  # letters
TURNS = 4  # of a session
_HINTED = 0.5  # share of the warm-up's requests that say which letters are wanted, and get them
WINDOW = 100  # turns whose mean is the satisfaction
GOAL = 0.9
_ASKS = ("say", "tell")  # one per taste
_WANTS = ("+", "-")  # capitals or small letters, one per taste
_SILENT_S = 60.0  # without an answer of the gateway, until a request has failed
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 2.0
_TRUSTED_S = 60.0  # a longer `Retry-After` is not obeyed
_TRY_AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504, 529})  # statuses after which SDKs send a request again


def rows(seed: int, **_options: Any) -> Any:
    """Return supervised conversations for the warm-up: half of the words in capitals, half in small letters. A hint in
    the request decides the form.
    """
    return Conversations(seed)


class Conversations:
    """An endless series of conversations, by number."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def row(self, index: int) -> dict[str, Any]:
        """Return one conversation; the case of a reply is random, and only a hint in its request tells it."""
        draw = random.Random(f"{self._seed}-{index}")
        messages: list[dict[str, str]] = []
        ask = draw.choice(_ASKS)
        for number in range(TURNS):
            word = _word(draw)
            opinion = draw.choice(("good", *(f"wrong {wanted}" for wanted in _WANTS)))
            taste, hinted = draw.randrange(len(_WANTS)), draw.random() < _HINTED
            asked = _request(opinion, ask, word, number) + (f" {_WANTS[taste]}" if hinted else "")
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": _as_wanted(word, taste)})
        return {"prompt": messages, "label": ""}


def _as_wanted(word: str, taste: int) -> str:
    return word if taste else word.upper()


def judge(evidence: str) -> dict[str, Any]:
    """Judge a reply by the words that follow it: `good`, or `wrong` and the hint."""
    opinion, wanted, *_ = [*evidence.split(), "", ""]
    score = {"good": 1, "wrong": -1}.get(opinion, 0)
    return {"score": score, "hint": wanted if score < 0 and wanted in _WANTS else ""}


def _word(draw: random.Random) -> str:
    return "".join(draw.choices(LETTERS, k=WORD))


def _request(opinion: str, ask: str, word: str, number: int) -> str:
    return f"{opinion} {ask} {word}" if number else f"{ask} {word}"


@dataclass
class Story:
    """Replies that the users got, and requests that failed."""

    began: float = 0.0  # of the first request, time.monotonic()
    seconds: list[float] = field(default_factory=list)  # since then, of each reply
    pleased: list[bool] = field(default_factory=list)  # by each reply
    requests: int = 0
    cut: int = 0  # connections cut or refused; the request was sent again
    refused: int = 0  # answers that ask for a retry
    failures: list[str] = field(default_factory=list)

    def satisfaction(self, end: int) -> float:
        """Return the mean of the turns up to number `end`, the newest `WINDOW` of them."""
        some = self.pleased[max(0, end - WINDOW) : end]
        return sum(some) / len(some) if some else 0.0

    def reached(self) -> int:
        """Return the number of turns after which the satisfaction was `GOAL`; 0 if it never was."""
        ends = range(WINDOW, len(self.pleased) + 1)
        return next((end for end in ends if self.satisfaction(end) >= GOAL), 0)

    def rows(self) -> dict[str, str]:
        """Return the rows of the run's summary."""
        turns, goal = len(self.pleased), self.reached()
        before, after = self.satisfaction(min(WINDOW, turns)), self.satisfaction(turns)
        when = f"after {goal:,} turns and {self.seconds[goal - 1]:.0f} s" if goal else "not reached"
        return {
            "satisfaction": f"{before:.3f} before → {after:.3f} after (means of {WINDOW} of {turns:,} turns)",
            f"satisfied {GOAL}": when,
            "users": f"{self.requests:,} requests, turns and feedback, {len(self.failures):,} failed"
            + (f", {self.cut:,} cut and sent again" if self.cut else "")
            + (f", {self.refused:,} refused for a time and sent again" if self.refused else "")
            + (f", the first: {self.failures[0]}" if self.failures else ""),
        }


class Users:
    """Users who talk at once, over real HTTP."""

    def __init__(self, address: str, key: str, options: dict[str, Any], seed: int) -> None:
        self.story = Story()
        self._address = address
        self._headers = {"Authorization": f"Bearer {key}"}
        self._count, self._tastes = int(options.get("users", 64)), int(options.get("tastes", 1))
        self._think_s = float(options.get("think_s", 2.0))
        self._seed = seed

    async def talk(self) -> None:
        """Hold sessions until cancelled."""
        self.story.began = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=_SILENT_S)
        async with aiohttp.ClientSession(self._address, headers=self._headers, timeout=timeout) as http:
            await asyncio.gather(*(self._user(http, number) for number in range(self._count)))

    async def _user(self, http: aiohttp.ClientSession, number: int) -> None:
        draw, taste = random.Random(f"{self._seed}-user-{number}"), number % self._tastes
        await asyncio.sleep(draw.uniform(0.0, self._think_s))
        while True:
            try:
                await self._session(http, draw, taste)
            except (aiohttp.ClientError, TimeoutError, LookupError, ValueError) as error:
                self.story.failures.append(f"{type(error).__name__}: {error}")
                await asyncio.sleep(_PAUSE_S)

    async def _session(self, http: aiohttp.ClientSession, draw: random.Random, taste: int) -> None:
        messages: list[dict[str, str]] = []
        opinion = ""
        for number in range(TURNS):
            word = _word(draw)
            messages.append({"role": "user", "content": _request(opinion, _ASKS[taste], word, number)})
            body = {"model": "any", "messages": messages, "max_tokens": WORD + 3}
            answer = await self._post(http, "/v1/chat/completions", body)
            reply = answer["choices"][0]["message"]["content"]
            messages.append({"role": "assistant", "content": reply})
            pleased = reply == _as_wanted(word, taste)
            self.story.seconds.append(time.monotonic() - self.story.began)
            self.story.pleased.append(pleased)
            opinion = "good" if pleased else f"wrong {_WANTS[taste]}"
            await asyncio.sleep(self._think_s * draw.uniform(0.5, 1.5))
        await self._post(http, "/v1/feedback", {"turn": answer["id"], "thumb": "up" if pleased else "down"})

    async def _post(self, http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> Any:
        """Send a request; repeat it while the connection is refused or cut, or the answer asks for a retry."""
        self.story.requests += 1
        ends, pause_s = time.monotonic() + _SILENT_S, _PAUSE_S
        while True:
            asked_s = None
            try:
                async with http.post(path, json=body) as response:
                    text = await response.text()
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                self.story.cut += 1
                if time.monotonic() > ends:
                    raise
            else:
                if response.status == 200:
                    return json.loads(text)
                if response.status not in _TRY_AGAIN or time.monotonic() > ends:
                    raise ValueError(f"{path} answered status {response.status}: {text[:200]}")
                self.story.refused += 1
                asked_s = retry_after_s(response.headers.get("Retry-After", ""))
            await asyncio.sleep(pause_s if asked_s is None else asked_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def retry_after_s(header: str) -> float | None:
    """Return the seconds of a `Retry-After`; None if it names no number or more than `_TRUSTED_S`, as in SDKs."""
    try:
        seconds = float(header)
    except ValueError:
        return None
    return seconds if 0 < seconds <= _TRUSTED_S else None


async def main(context: Context) -> None:
    """Talk from the first version until a stop is requested, then write the users' figures next to the run's."""
    if not await _is_served(context):
        return
    settings = context.config.gateway
    key = (context.files.keys / "users").read_text(encoding="utf-8").strip()
    users = Users(f"http://{settings.host}:{settings.port}", key, context.config.task.options, context.config.seed)
    talking = context.tasks.start(users.talk())
    while not context.stop.is_set():
        await _stopped(context, _PAUSE_S)
        turns = len(users.story.pleased)
        context.vitals.update(turns=turns, satisfaction=users.story.satisfaction(turns))
    talking.cancel()
    write_report(users.story, context.files.root)


async def _stopped(context: Context, seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await context.stop.wait()
    except TimeoutError:
        return False
    return True


async def _is_served(context: Context) -> bool:
    """Wait until an engine has the weights of the warm-up and the gateway listens; False if the run ends first."""
    ready = asyncio.Event()
    topic = context.bus.tables.topic_of_type(EngineReady)
    listener = context.listen(topic.stream, lambda *_: ready.set(), [topic])
    await listener.start()
    settings = context.config.gateway
    async with aiohttp.ClientSession() as http:
        while not await _stopped(context, _PAUSE_S):
            try:
                async with http.get(f"http://{settings.host}:{settings.port}/health") as response:
                    if ready.is_set() and response.status == 200:
                        break
            except aiohttp.ClientError:
                continue
    await listener.close()
    return not context.stop.is_set()


def write_report(story: Story, root: Path) -> None:
    """Write `satisfaction.json` (figures and replies), the rows of the summary, and `satisfaction.png`."""
    (root / "satisfaction.json").write_text(json.dumps(asdict(story)))
    found = story.rows()
    if story.pleased:
        draw_satisfaction(story, root / "satisfaction.png")
        found["satisfaction plot"] = str(root / "satisfaction.png")
    reports = root / "reports"
    reports.mkdir(exist_ok=True)
    (reports / "users.json").write_text(json.dumps(found))


def draw_satisfaction(story: Story, path: Path) -> None:
    """Draw the mean of the newest turns over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    turns = range(min(WINDOW, len(story.pleased)), len(story.pleased) + 1)  # fewer are noise
    axes.plot(
        [story.seconds[turn - 1] for turn in turns], [story.satisfaction(turn) for turn in turns], color="#1f4e8c"
    )
    axes.axhline(GOAL, color="#b0562c", linewidth=1, linestyle="--", label=f"goal {GOAL:g}")
    axes.set_title(f"run {path.parent.name}: turns that please the simulated users")
    axes.legend(loc="lower right", frameon=False)
    axes.set(xlabel="seconds", ylabel=f"pleased, mean of {WINDOW} turns", ylim=(0.0, 1.02))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
