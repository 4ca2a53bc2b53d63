"""Messages of live turns, and the fold of sessions that is fed with them."""

import numpy as np

from actors.sessions.admission import Room
from actors.sessions.fold import SessionsFold
from asyncrl.config.live_settings import LiveSettings, SafetySettings
from asyncrl.live.tenant_keys import tenant_digest
from harness.folds import Feed
from topics.batches import BatchGroup, BatchMember, BatchPacked, BatchTrained
from topics.secrets import PurgeRequested
from topics.trajectories import Reference
from topics.turns import (
    FeedbackGiven,
    TurnAdmitted,
    TurnFinished,
    TurnJudged,
    TurnReady,
    TurnSkipped,
    TurnStarted,
)

IDLE_S = 100.0
JUDGE_S = 10.0
SIBLINGS_S = 5.0
ROOM = Room(under_way=64, waiting=64, max_lag=4)
TOKENS = np.arange(3, dtype=np.int32)
REALS = np.zeros(3, np.float32)


class Sessions(Feed):
    """A fold that is told of turns."""

    def __init__(self, share=0.5, room=ROOM, allow=(), **safety):
        settings = LiveSettings(
            fraction=share,
            allow=[*allow],
            idle_s=IDLE_S,
            judge_s=JUDGE_S,
            siblings_s=SIBLINGS_S,
            safety=SafetySettings(**safety),
        )
        super().__init__(SessionsFold(settings, room))
        self.log = []

    def started(self, turn, parent="", *, session="s", at_s=0.0, **more):
        return self.publish(
            TurnStarted(turn_id=turn, session=session, tenant="anna", api="chat", tokens=TOKENS, parent=parent, **more),
            at_s=at_s,
        )

    def finished(self, turn, finish="stop", *, session="s", tokens=3, at_s=0.0):
        ids, reals = TOKENS[:tokens], REALS[:tokens]
        end = TurnFinished(turn_id=turn, session=session, finish=finish, tokens=ids, logprobs=reals, versions=ids)
        return self.publish(end, at_s=at_s)

    def served(self, turn, parent="", **more):
        return self.started(turn, parent, **more).finished(turn, at_s=more.get("at_s", 0.0))

    def decide(self, at_s=0.0):
        """All decisions, each read back from the log before the next are made."""
        made = []
        while decisions := self.fold.decide(at_s):
            made += self.read_back(decisions, at_s=at_s)
        self.log += made
        return made


def ready(turn, *evidence, session="s"):
    return TurnReady(turn_id=turn, session=session, tenant="anna", evidence=list(evidence))


def admitted(turn, reward, by="judge", version=2):
    return TurnAdmitted(
        turn_id=turn, session="s", tenant="anna", reward=reward, by=by, temperature=1.0, version=version
    )


def skipped(turn, reason, reward=None, version=2):
    known = {"reward": reward, "version": version} if reward is not None else {}
    return TurnSkipped(turn_id=turn, session="s", reason=reason, **known)


def grade(turn, reward=1.0):
    return TurnJudged(turn_id=turn, reward=reward, judge="j")


def feedback(turn, score):
    return FeedbackGiven(feedback_id=f"f{turn}{score}", turn_id=turn, tenant="anna", score=score)


def packed(step, *prompts, reward=1.0):
    groups = [BatchGroup(name, [BatchMember(f"{name}-0", 0, Reference(1, "0" * 16, 1), reward, 2)]) for name in prompts]
    return BatchPacked(step, "rl", groups, step - 5)


def trained(step):
    return BatchTrained(step, 0, "rl", {}, {}, 0, [0.0, 0.0], 1, 1)


def finished(turn, versions=(1, 1, 1), **more):
    ids = np.array(versions, np.int32)
    return TurnFinished(turn, "s", "stop", tokens=TOKENS, logprobs=REALS, versions=ids, **more)


def judged(turn, reward):
    return TurnJudged(turn, reward, "rule")


def purge(*secrets):
    return PurgeRequested("p", tenant_digest("anna"), "", "operator", [*secrets])


def ended(turn, **more):
    return TurnFinished(turn, "s", "stop", tokens=TOKENS, logprobs=REALS, versions=TOKENS, **more)
