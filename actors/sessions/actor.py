"""The keeper of sessions: decides on its own log which turns are judged and trained, and which session has ended."""

from __future__ import annotations

from actors.runtime.actor import Context
from actors.runtime.keeper import Keeper
from actors.sessions.admission import Room
from actors.sessions.fold import SessionsFold
from topics.topic import SESSIONS
from topics.wire import Message


async def main(context: Context) -> None:
    """Run the keeper of sessions until the run ends."""
    fold = SessionsFold(context.config.live, Room.of(context.config.buffer))
    keeper = Keeper(context, SESSIONS, fold)

    def decide() -> list[Message]:
        state = fold.state
        decisions = fold.decide(keeper.now())
        counts = {f"turns_skipped_{reason}": float(number) for reason, number in state.skipped.items()}
        context.vitals.update(
            counts | state.watched.figures(),
            open_sessions=len(state.sessions),
            open_turns=len(state.turns),
            waiting_turns=len(state.waiting),
            turns_admitted=state.admitted,
            turns_graded=len(state.graded),
            turns_under_way=len(state.on_way.groups),
            feedback_late=state.late_feedback + state.on_way.late,
        )
        return decisions

    await keeper.start()
    await keeper.run(decide, until=fold.next_deadline)
