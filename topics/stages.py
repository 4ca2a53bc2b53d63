"""Messages about the stages of a run: an operator requests one, and the prompter records its begin."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from topics.topic import ACTORS, PROMPTS, Topic
from topics.wire import Count, Headers, Id, Message, Step


class StageRequested(Message):
    """Request to train as another stage says, from the next prompt on."""

    name: Id  # of a table of `stages`


class StageBeganHeaders(Headers):
    """All of it: folds read no bodies of the log of prompts."""

    name: Id = msgspec.field(name="began")
    prompt: Count
    request: Count
    after: Step | None = None


class StageBegan(Message):
    """Prompts of RL, and the objective of the batches that hold them, are as this stage says from here on."""

    HEADERS: ClassVar[type[Headers]] = StageBeganHeaders

    name: Id
    prompt: Count  # number of the first one: none from it on was issued before
    request: Count = 0  # sequence of the stage.requested that it follows; those before it are void
    after: Step | None = None  # without a request: newest batch that was packed when its condition held


STAGE_REQUESTED = Topic(StageRequested, ACTORS, ("operator",), ("prompter",), repeats=True)
STAGE_BEGAN = Topic(StageBegan, PROMPTS, ("prompter",), ("prompter", "buffer", "supervisor"))
