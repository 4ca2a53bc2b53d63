"""The kind of judges that are functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.child_pool.frames import Setup
from asyncrl.config.check import not_a_function
from asyncrl.config.finding import Finding
from asyncrl.config.live_settings import JudgeKind, JudgeSettings


class Rule(JudgeKind):
    """A function of the user, or a rule over words."""

    keys = ("function", "children")
    opener = "asyncrl.judges.rule.judge:open_judge"

    def checks(self, judge: JudgeSettings) -> Iterator[Finding]:
        if judge.function:
            yield from not_a_function("live.judge.function", judge.function)

    def hint_problem(self, judge: JudgeSettings) -> str:
        return "" if judge.function else "words give none; set live.judge.function, or another judge"

    def setup(self, judge: JudgeSettings, base: Path) -> Setup | None:
        from asyncrl.judges.rule.judge import judge_setup

        if ":" not in judge.function:
            return None
        return judge_setup(judge.function, base=base, time_limit_s=judge.deadline_s)


KIND = Rule()
