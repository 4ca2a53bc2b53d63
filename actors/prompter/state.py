"""The state of the prompter, as plain data."""

from __future__ import annotations

import msgspec

from asyncrl.config.staged import Ended
from asyncrl.config.tasks import Begun
from asyncrl.data.curriculum import Climb
from topics.evals import EvalRequested
from topics.ids import Stage
from topics.turns import TurnAdmitted


class PrompterState(msgspec.Struct):
    """The whole state, which snapshots hold. A field whose meaning changes gets another name."""

    first_open: dict[str, int]  # by letter: number of the first prompt that is not wholly issued
    done: dict[Stage, int]  # trained batches
    trained: int  # newest step
    members: dict[str, int] = {}  # issued members of groups not yet complete
    open: dict[Stage, set[str]] = msgspec.field(default_factory=lambda: {"warmup": set(), "rl": set()})
    closed_early: set[str] = set()  # ends read before the issue they end: logs have no common order
    packed: dict[int, list[str]] = {}
    again: dict[str, int] = {}  # trajectories to issue again, with the attempt
    attempts: dict[str, int] = {}  # newest attempt issued of open groups' trajectories, where above 0
    trained_ahead: set[int] = set()  # trained before their packing was read
    requests: dict[int, EvalRequested] = {}  # evaluations by number, not wholly issued
    evaluated: int = -1  # number of the newest evaluation that was asked for
    live: dict[int, TurnAdmitted] = {}  # turns of live traffic by number, not issued yet
    live_admitted: int = 0  # turns
    origins: list[str] = []  # prompts whose rows are to be issued again, in the order of the requests
    finished_at: int | None = None  # step at which training was reported finished
    paused: bool = False  # payload streams are nearly full
    ended: int = 0  # groups of the tasks that the buffer packed or dropped
    stages: list[Begun] = []  # of the data, in their order
    stage_asked: tuple[int, str] = (0, "")  # the newest request of one: its sequence and the name
    stage_answered: int = 0  # sequence of the newest request that was recorded
    ended_of_stages: Ended = msgspec.field(default_factory=Ended)  # what conditions of stages look at
    climbs: dict[str, Climb] = {}  # difficulties by task, of those where it rises

    def first(self, letter: str) -> int:
        """Number of the first prompt with this letter that is not wholly issued."""
        return self.first_open.get(letter, 0)
