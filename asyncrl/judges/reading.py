"""The texts of a turn, from the tokens that its messages hold."""

from __future__ import annotations

import msgspec

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import read
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.judges.protocol import Case
from asyncrl.live.stored import TurnReader, TurnUnreadable
from asyncrl.live.turn_log import secrets_in
from topics.turns import TURN_SHADOWED, TURN_STARTED, TurnReady, TurnShadowed, TurnStarted
from topics.wire import WireError


class CaseReader:
    """Reads what a judge is shown of a turn."""

    def __init__(self, bus: Bus, tokenizer: TaskTokenizer, *, most_tokens: int) -> None:
        self._bus = bus
        self._turns = TurnReader(bus)
        self._tokenizer = tokenizer
        self._most = most_tokens  # of the prompt its last, of the evidence its first, of the reply its first

    async def case(self, ready: TurnReady) -> tuple[Case, str]:
        """Return the texts of a turn, and the data keys of all of them.

        Raises:
            SecretGone: a data key is not there.
            WireError: a message about it, or about a turn that precedes or follows it, is not there.
        """
        try:
            turn = await self._turns.read(ready.turn_id)
        except TurnUnreadable as error:
            raise WireError(str(error)) from error
        appended = [await self._appended(name) for name in ready.evidence]
        keys = [*secrets_in(turn.started), *(started.secret for started in appended)]
        decode = self._tokenizer.decode
        case = Case(
            ready.turn_id,
            decode(turn.prompt[-self._most :]),
            decode(turn.finished.tokens[: self._most]),
            "\n".join(decode(started.tokens[: self._most]) for started in appended),
        )
        return case, ",".join(dict.fromkeys(filter(None, keys)))

    async def shadow(self, case: Case) -> tuple[Case, int] | None:
        """Return a case with its shadow answer instead of the reply, and its trial; None without a shadow answer.

        Raises:
            SecretGone: a data key is not there.
        """
        record = await read_last(self._bus, TURN_SHADOWED, case.turn_id)
        if record is None:
            return None
        shadowed = await read(self._bus, TurnShadowed, record)
        reply = self._tokenizer.decode(shadowed.tokens[: self._most])
        return msgspec.structs.replace(case, reply=reply), shadowed.trial

    async def _appended(self, turn_id: str) -> TurnStarted:
        """Return the begin of a turn, which need not have ended: its tokens follow those of the turn before."""
        record = await read_last(self._bus, TURN_STARTED, turn_id)
        if record is None:
            raise WireError(f"turn {turn_id} has no turn.started")
        return await read(self._bus, TurnStarted, record)
