"""Messages about a GPU that learner and engines time-share.

The learner asks on its own log, where only its writer can append; engines take and leave on theirs. Each side stores
its message before it reads the other's newest: so one of the two sees the other, and never both have the GPU.
"""

from __future__ import annotations

import msgspec

from topics.topic import ENGINES, TRAINING, Topic
from topics.wire import Count, Id, Message, Seconds


class CardRequested(Message):
    """The learner asks for the GPU: it has it once all engines that took it have left, and keeps it until it returns.

    A new learner requests the GPU again, because the memory of its predecessor was released."""

    turn: Count  # from 1
    without: list[Id] = msgspec.field(default_factory=list)  # engines that did not leave in time, and have it no more


class CardReturned(Message):
    """The learner has left the GPU."""

    turn: Count  # the newest that it asked for
    waited_s: Seconds = 0.0  # until it had the GPU


class CardTaken(Message):
    """An engine is about to use the GPU, unless the learner had asked for it before this."""

    engine_id: Id


class CardLeft(Message):
    """An engine has nothing on the GPU: it gave its memory back, or its server has ended.

    Of one that was killed as it should leave, and has no successor, the supervisor publishes it.
    """

    engine_id: Id


CARD_REQUESTED = Topic(CardRequested, TRAINING, ("learner",), ("engine",), id=("turn",))
CARD_RETURNED = Topic(CardReturned, TRAINING, ("learner",), ("engine", "recorder"), id=("turn",))
CARD_TAKEN = Topic(
    CardTaken, ENGINES, ("engine",), ("learner", "supervisor", "recorder"), key="engine_id", repeats=True
)
CARD_LEFT = Topic(CardLeft, ENGINES, ("engine", "supervisor"), ("learner", "supervisor"), key="engine_id", repeats=True)
