"""The judge: a worker that asks for several votes on a turn and publishes the verdict."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pkgutil import resolve_name

from actors.runtime.actor import Context
from actors.runtime.delivery import Delivery
from actors.runtime.judging_engines import open_generator, tokenizer_of
from actors.runtime.worker import WorkerLoop
from asyncrl.bus.errors import WrongSequence
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import EXPECT_SUBJECT, publish
from asyncrl.config.live_settings import judge_kind
from asyncrl.config.pools import Purpose, version_of
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.judges.protocol import Case, Judge, JudgeParts, Vote, VoteFailed, verdict_of
from asyncrl.judges.reading import CaseReader
from topics.actors import Waiting
from topics.turns import TURN_JUDGED, TurnJudged, TurnReady
from topics.wire import Message


async def main(context: Context) -> None:
    """Run a judge until asked to stop."""
    config, settings = context.config, context.config.live.judge
    skip = config.rollout.skip_special_tokens
    tokenizer = TaskTokenizer.load(context.files.model_path(config.model), skip_special=skip)
    async with AsyncExitStack() as stack:
        purpose: Purpose = "judges" if settings.engines else "training"
        voting = tokenizer_of(context, purpose)
        engines = partial(open_generator, context, voting, stack, purpose=purpose)
        parts = JudgeParts(settings, context.files.base, voting, engines, version_of(config, purpose))
        judge: Judge = await resolve_name(judge_kind(settings.kind).opener)(parts)
        stack.push_async_callback(judge.close)
        reader = CaseReader(context.bus, tokenizer, most_tokens=settings.history_tokens)
        await WorkerLoop(context, JudgeWorker(context, judge, reader).handle, settings.in_flight).run()


class JudgeWorker:
    """Judges one turn at a time, many at once."""

    def __init__(self, context: Context, judge: Judge, reader: CaseReader) -> None:
        self._context = context
        self._judge = judge
        self._reader = reader

    async def handle(self, ready: TurnReady, delivery: Delivery[TurnReady]) -> list[Message]:
        """Publish the verdict on a turn, and return nothing more: its subject takes one message, that of the first
        judge; another that had the turn before, and was taken for dead, changes nothing."""
        bus, turn = self._context.bus, ready.turn_id
        if await read_last(bus, TURN_JUDGED, turn) is not None:
            return []
        try:
            judged = await self._judged(ready, delivery)
        except SecretGone as error:
            self._context.log.warning("turn purged", turn=turn, reason=str(error))
            judged = TurnJudged(turn, None, self._judge.name, purged=True)
        await self._store(judged)
        return []

    async def _judged(self, ready: TurnReady, delivery: Delivery[TurnReady]) -> TurnJudged:
        case, secret = await self._reader.case(ready)
        shadow = await self._reader.shadow(case) if self._context.config.gateway.canary_engines else None
        with delivery.waiting(Waiting("reward")):  # each vote has its own deadline
            votes, of_shadow = await asyncio.gather(self._votes(case), self._votes(shadow[0] if shadow else None))
        verdict = verdict_of([vote for vote in votes if vote is not None])
        if verdict.reward is None:
            self._context.count("turns_without_vote")
        scores = [None if vote is None else float(vote.score) for vote in votes]
        judged = TurnJudged(ready.turn_id, verdict.reward, self._judge.name, scores, list(verdict.hints), secret=secret)
        if shadow is not None:
            judged.shadow, judged.trial = verdict_of([vote for vote in of_shadow if vote is not None]).reward, shadow[1]
        return judged

    async def _votes(self, case: Case | None) -> list[Vote | None]:
        votes = self._context.config.live.judge.votes if case is not None else 0
        return await asyncio.gather(*(self._vote(case) for _ in range(votes) if case is not None))

    async def _store(self, judged: TurnJudged) -> None:
        try:
            await publish(self._context.bus, judged, headers={EXPECT_SUBJECT: "0"})
            self._context.count("purged" if judged.purged else "judged")
        except WrongSequence:
            pass  # another judge was first
        except SecretGone:  # purged while it was judged
            await self._store(TurnJudged(judged.turn_id, None, judged.judge, purged=True))

    async def _vote(self, case: Case) -> Vote | None:
        try:
            vote = await self._judge.vote(case)
        except VoteFailed as error:
            self._context.count("votes_failed")
            self._context.log.warning("vote failed", turn=case.turn_id, reason=error.reason)
            return None
        self._context.count("votes")
        return vote
