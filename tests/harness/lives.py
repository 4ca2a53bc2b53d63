"""Runs of rollout functions without a worker, from what earlier runs have recorded."""

import asyncio
import contextlib
import string
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.token_buffer import TokenBuffer
from asyncrl.rollout.context import RolloutContext
from asyncrl.rollout.host import Limits
from asyncrl.rollout.journal import Journal, branch_tasks
from asyncrl.tools.server import Toolbox
from asyncrl.training.init_model import ModelShape, create_model
from harness.live_runs import TEMPLATE
from topics.trajectories import ProgressEntry
from topics.wire import decode, encode

SEED, MOST = 7, 6


def printable_tokenizer(folder: Path) -> TaskTokenizer:
    """Make a small model with a chat template into a folder; returns its tokenizer of printable characters."""
    create_model(folder, alphabet=string.printable, seed=1, shape=ModelShape(context=4096), template=TEMPLATE)
    return TaskTokenizer.load(folder)


class Host:
    """Samples letters that depend on prompt and seed, one after the other, and publishes the journal as workers do."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.sampled = 0  # tokens
        self.takes_s = 0.0  # for a written answer
        self.stops_at = 1 << 30  # tokens after which it gives no more
        self.kept: list[dict] = []
        self.fault: Exception | None = None
        self.toolbox = Toolbox({}, Path())
        self.written: Callable[[Sequence[int]], list[int]] | None = None  # gives the tokens of an answer to a prompt

    async def sample(self, ids, answer, limits) -> None:
        if self.fault is not None:
            raise self.fault
        buffer = TokenBuffer(answer)
        if self.written is not None:
            await asyncio.sleep(self.takes_s)
            reply = self.written(ids.tolist())
            buffer.extend(np.array(reply, np.int32), np.full(len(reply), -1.0, np.float32), 0)
            self.sampled += len(reply)
            answer.done, answer.finish = True, "stop"
            return
        while len(answer.tokens) < limits.max_new_tokens:
            if self.sampled >= self.stops_at:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            token = 4 + (int(ids.sum()) + limits.seed + 3 * len(answer.tokens)) % 20
            buffer.extend(np.array([token], np.int32), np.full(1, -1.0, np.float32), 0)
            self.sampled += 1
        answer.done, answer.finish = True, "length"

    async def checkpoint(self) -> None:
        news = self.journal.news()
        entry = ProgressEntry(trajectory_id="t", attempt=0, delivery=1, offset=0, journal=news)
        self.journal.published(news)
        self.kept.append(decode(ProgressEntry, encode(entry)).journal)

    def waiting(self, waits_for):
        return contextlib.nullcontext()

    def slot(self):
        return contextlib.nullcontext()


class Life:
    """One run of a rollout function, from what earlier ones have published."""

    def __init__(self, tokenizer: TaskTokenizer, recorded=(), *, most: int = MOST) -> None:
        self.journal = Journal()
        for entry in recorded:
            self.journal.extend(entry)
        self.host = Host(self.journal)
        self.context = RolloutContext(
            tokenizer, self.journal, self.host, seed=SEED, limits=Limits(most, []), tool_limit_s=9.0
        )

    async def run(self, function) -> object:
        branch_tasks(asyncio.get_running_loop())
        token = self.journal.begin()
        try:
            return await function(self.context)
        finally:
            self.journal.end(token)
            asyncio.get_running_loop().set_task_factory(None)
