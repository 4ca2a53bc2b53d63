"""The evaluations that the learner asks for: one of each held-out set whenever one is due."""

from __future__ import annotations

from actors.learner.fold import LearnerFold
from asyncrl.config.held_out import HeldOut, held_out_sets
from asyncrl.config.settings import Config
from topics.evals import EvalRequested
from topics.ids import EVALUATION, prompt_name


class Evaluations:
    """Names the evaluations of a version, each once."""

    def __init__(self, config: Config, fold: LearnerFold) -> None:
        self._sets = held_out_sets(config)
        self._every = config.eval.every
        self._ends = (config.start.step, config.learner.steps)
        self._fold = fold
        self._asked = 0  # as far as this process knows: a request may be read back after the next one is made

    def due(self, step: int) -> list[EvalRequested]:
        """The requests that are due at a step: of the first version, of the last, and of every so many."""
        is_due = step in self._ends or (self._every > 0 and step % self._every == 0)
        if not is_due or step < 0:
            return []
        asked = self._fold.state.asked_for
        return [self._request(own, step) for own in self._sets.values() if asked.get(own.name, -1) < step]

    def _request(self, held_out: HeldOut, version: int) -> EvalRequested:
        number = max(self._asked, self._fold.state.evaluations)
        self._asked = number + 1
        return EvalRequested(
            prompt_name(EVALUATION, number),
            version,
            held_out.prompts,
            held_out.temperature,
            dataset=held_out.name,
            samples=held_out.samples,
        )
