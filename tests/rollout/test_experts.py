"""Each token keeps the first row of experts that was recorded for it, and each row is stored once."""

import asyncio
import contextlib

import msgspec
import numpy as np
import pytest

from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.answer import Generation
from asyncrl.engine.errors import EngineRefused
from asyncrl.engine.routing import keep_routing
from asyncrl.engine.token_buffer import TokenBuffer
from asyncrl.rollout.context import Limits, RolloutContext
from asyncrl.rollout.journal import Journal, branch_tasks
from topics.trajectories import Answer, ProgressEntry
from topics.wire import WireError, decode, encode

SHAPE = ModelInfo("any", 64, 128, experts=200)
TURN = 3  # tokens of an answer, in two requests


def told(tokens, routed):
    """A request that ended with so many tokens, and with experts from its first token on."""
    return Generation(np.full(tokens, 7, np.int32), np.zeros(tokens, np.float32), [], "length", routed)


class Host:
    """Samples as a worker does. The rows of the Nth request are all N; those of requests that are lost never come."""

    def __init__(self, journal, lost=()):
        self.journal, self.requests, self.kept, self._lost = journal, 0, [], lost

    async def sample(self, ids, answer, limits):
        while (had := len(answer.tokens)) < TURN:
            await asyncio.sleep(0)
            self.requests += 1
            new = TURN - had if had else 1
            TokenBuffer(answer).extend(np.full(new, 7, np.int32), np.zeros(new, np.float32), 0)
            if self.requests not in self._lost:
                fed = len(ids) + len(answer.tokens) - 1
                generation = told(new, np.full(2 * fed, self.requests, np.int32))
                keep_routing(answer, generation, prompt=len(ids), had=had, model=SHAPE)
            await self.checkpoint()
        answer.done, answer.finish = True, "stop"

    async def checkpoint(self):
        news = self.journal.news()
        self.journal.published(news)
        self.kept.append(
            decode(ProgressEntry, encode(ProgressEntry(trajectory_id="t", offset=0, journal=news))).journal
        )

    def waiting(self, waits_for):
        return contextlib.nullcontext()

    def slot(self):
        return contextlib.nullcontext()


async def play(function, journal, lost=()):
    """The first byte of each row of each segment, and the host."""
    branch_tasks(asyncio.get_running_loop())
    host = Host(journal, lost)
    context = RolloutContext(None, journal, host, seed=1, limits=Limits(4, []), tool_limit_s=9.0)
    token = journal.begin()
    await function(context)
    journal.end(token)
    return [rows[:, 0].tolist() for rows in context.routing()], host


async def turns(context):
    """Three turns, of which each reads all before it and one token more."""
    ids = [1, 2]
    for number in range(3):
        found = await context.generate(ids)
        ids = [*ids, *found.tokens.tolist(), 10 + number]


async def branches(context):
    """A turn, two that go on with it, and one that goes on with its prompt alone."""
    first = await context.generate([1, 2])
    for more in ([*first.tokens.tolist(), 10], [*first.tokens.tolist(), 11], [12]):
        await context.generate([1, 2, *more])


@pytest.mark.parametrize(
    ("function", "lost", "rows"),
    [
        # Prompt and first token of the first request; its last token is read by the second one, and so on.
        (turns, (), [[1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 0]]),
        (turns, (4,), [[1, 1, 2, 2, 3, 3, 0, 0, 5, 5, 6, 6, 0]]),
        (turns, (1, 2, 4), [[3, 0, 0, 0, 3, 3, 0, 0, 5, 5, 6, 6, 0]]),
        (branches, (), [[1, 1, 2, 2, 3, 3, 4, 4, 0], [1, 1, 2, 2, 3, 5, 6, 6, 0], [1, 1, 7, 8, 8, 0]]),
        (branches, (3, 4), [[1, 1, 2, 2, 0, 0, 0, 0, 0], [1, 1, 2, 2, 5, 5, 6, 6, 0], [1, 1, 7, 8, 8, 0]]),
    ],
)
async def test_each_token_keeps_its_first_row_and_each_row_is_stored_once(function, lost, rows):
    found, host = await play(function, Journal(), lost)
    assert found == rows

    stored = sum(len(answer.routing.rows) // 2 for news in host.kept for answer in news.values() if answer.routing)
    assert stored <= sum(map(len, rows))


@pytest.mark.parametrize("after", range(7))
async def test_a_worker_that_goes_on_has_the_rows_of_those_before_it(after):
    """A worker dies after each of its messages: rows that it stored are there, and its requests are made anew."""
    found, host = await play(turns, Journal())
    journal = Journal()
    for news in host.kept[:after]:
        journal.extend(news)

    again, other = await play(turns, journal)
    assert [len(rows) for rows in again] == [len(rows) for rows in found]
    kept = sum(row <= after for row in found[0][:-1])
    assert again[0][:kept] == found[0][:kept] and all(again[0][:-1]) and other.requests == 6 - after


async def test_rows_that_do_not_continue_what_is_there_are_refused():
    _, host = await play(turns, Journal())
    journal = Journal()
    journal.extend(host.kept[0])
    [(path, answer)] = host.kept[1].items()
    for wrong in ({"before": 1}, {"width": 4}, {"first": 1}, {"follows": "7"}):
        routing = msgspec.structs.replace(answer.routing, **wrong)
        with pytest.raises(WireError, match=f"call {path}: experts .* behind {routing.before} rows, expected .*'', 0"):
            journal.extend({path: msgspec.structs.replace(answer, routing=routing)})
    journal.extend(host.kept[1])


def test_engines_that_return_rows_of_another_width_are_refused():
    answer = Answer("generate", "", tokens=np.arange(2, dtype=np.int32))
    keep_routing(answer, told(2, np.ones(8, np.int32)), prompt=3, had=0, model=SHAPE)
    with pytest.raises(
        EngineRefused, match="returned 3 bytes of experts of a token, expected 2 as in the request before"
    ):
        keep_routing(answer, told(1, np.ones(12, np.int32)), prompt=3, had=1, model=SHAPE)
