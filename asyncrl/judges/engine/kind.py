"""The kind of judges that are the run's own model."""

from __future__ import annotations

from asyncrl.config.live_settings import JudgeKind


class Engine(JudgeKind):
    """The run's own model on the run's engines."""

    keys = ("engines", "temperature", "max_new_tokens")
    opener = "asyncrl.judges.engine.judge:open_judge"


KIND = Engine()
