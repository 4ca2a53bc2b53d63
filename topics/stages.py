"""Messages about the stages of a run: an operator asks for one, and the prompter records where it begins."""

from __future__ import annotations

from topics.topic import ACTORS, PROMPTS, Topic
from topics.wire import Count, Id, Message, Step


class StageRequested(Message):
    """Request to train as another stage says, from the next prompt on."""

    name: Id  # of a table of `stages`


class StageBegan(Message):
    """Prompts of RL, and the objective of the batches that hold them, are as this stage says from here on."""

    name: Id
    prompt: Count  # number of the first one: none from it on was issued before
    request: Count = 0  # sequence of the stage.requested that it follows; those before it are void
    after: Step | None = None  # without a request: newest batch that was packed when its condition held

    def headers(self) -> dict[str, str]:
        """Return all of it: folds read no bodies of the log of prompts."""
        after = {} if self.after is None else {"after": str(self.after)}
        return {"began": self.name, "prompt": str(self.prompt), "request": str(self.request), **after}

    @classmethod
    def of(cls, headers: dict[str, str]) -> StageBegan:
        """Read one from its headers.

        Raises:
            LookupError, ValueError: they are not those of one.
        """
        after = int(headers["after"]) if "after" in headers else None
        return cls(name=headers["began"], prompt=int(headers["prompt"]), request=int(headers["request"]), after=after)


STAGE_REQUESTED = Topic(
    "stage.requested", StageRequested, ACTORS, publishers=("operator",), subscribers=("prompter",), repeats=True
)
STAGE_BEGAN = Topic(
    "stage.began", StageBegan, PROMPTS, publishers=("prompter",), subscribers=("prompter", "buffer", "supervisor")
)
