"""The supervisor's state of the channel `live`, fed by hand."""

from __future__ import annotations

import msgspec

from actors.supervisor.fold import SupervisorFold
from asyncrl.bus.log import Record
from asyncrl.config.settings import Config
from topics.evals import EVAL_REQUESTED, EVAL_SCORED, EvalRequested, EvalScored
from topics.promotions import (
    PROMOTION_REQUESTED,
    PromotionRefused,
    PromotionRequested,
    WeightsPromoted,
)
from topics.table import BUILT_IN
from topics.topic import Topic
from topics.weights import (
    WEIGHTS_PUBLISHED,
    WeightsPublished,
)


class Supervised:
    """The fold of a supervisor, fed with messages."""

    def __init__(self, engines: str = "", **weights: object) -> None:
        tables = {"weights": weights, "learner": {"keep_versions": 4}, "eval": {"engines": engines}}
        self.config = msgspec.convert(tables, Config)
        self.fold = SupervisorFold(self.config)
        self._sequence = 0

    def add(self, topic: Topic, message: msgspec.Struct) -> int:
        self._sequence += 1
        record = Record(topic.stream, self._sequence, topic.name, {}, b"", self._sequence)
        self.fold.apply(topic, message, record)
        return self._sequence

    def publish(self, *versions: int, lineage: int = 0) -> None:
        for version in versions:
            place = f"/w/lineage{lineage}-v{version:06d}-d"
            self.add(WEIGHTS_PUBLISHED, WeightsPublished(lineage, version, f"d{version}", "files", place))

    def ask(self, version: int | None) -> int:
        return self.add(PROMOTION_REQUESTED, PromotionRequested(version))

    def decide(self, *, serves: bool = False) -> WeightsPromoted | PromotionRefused | None:
        return self.fold.state.channel.decide(self.fold.stored, self.config.weights, serves=serves)

    def settle(self, *, serves: bool = False) -> WeightsPromoted | PromotionRefused:
        """Decide, and read the decision back."""
        decision = self.decide(serves=serves)
        assert decision is not None
        self.add(BUILT_IN.topic_for(decision), decision)
        return decision

    def kept(self) -> list[int]:
        kept = self.fold.versions()
        assert kept is not None
        return sorted(int(name.split("-")[1][1:]) for name in kept.names)

    def evaluate(self, number: int, asked: int, answered: dict[int, int], accuracy: float, **metrics: float) -> None:
        eval_id = f"e{number:06d}"
        self.add(EVAL_REQUESTED, EvalRequested(eval_id, asked, 8, 0.0))
        scored = EvalScored(eval_id, asked, answered, accuracy, 8, 0, 1.0, metrics=metrics)
        self.add(EVAL_SCORED, scored)
