"""A taskset of verifiers 0.4: sums of two digits. It is loaded in a Python that has verifiers."""

# mypy: ignore-errors

from collections.abc import Iterable

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """One sum."""

    answer: str


class SumTask(vf.Task[SumData]):
    """The reply is the sum and nothing else."""

    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        """1.0 for the right sum."""
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        """Length of the reply."""
        return float(len(trace.last_reply))


class Sums(vf.Taskset[SumTask]):
    """All sums of two digits below 10."""

    def load(self) -> Iterable[SumTask]:
        """Yield the tasks."""
        for one in range(5):
            for other in range(5):
                yield SumTask(SumData(prompt=f"{one}+{other}", answer=str(one + other)))


__all__ = ["Sums"]
