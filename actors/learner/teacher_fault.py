"""The error of a teacher, apart from the teacher's HTTP client: every learner knows it."""

from __future__ import annotations

from actors.runtime.actor import ActorFault


class TeacherFault(ActorFault):
    """The server gives no log-probs for any batch."""
