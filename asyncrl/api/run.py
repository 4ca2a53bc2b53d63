"""A run of this machine or another one, for programs and notebooks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from asyncrl.api import requests
from asyncrl.api.blocking import result_of
from asyncrl.api.report import write_run_report
from asyncrl.api.rows import Rows, metric_rows
from asyncrl.api.status import read_history, read_status
from asyncrl.api.topic_reader import TopicMessages
from asyncrl.bus.address import BusAddress
from asyncrl.errors import AsyncRLError
from asyncrl.run.connect import FoundRun, RunNotFound, find_run
from asyncrl.state.cost import Cost, read_cost
from asyncrl.state.samples import Sample, WantedSamples, read_samples
from asyncrl.telemetry.metric_names import MetricRow
from topics.runs import RunMoment, RunStatus
from topics.wire import Message


class Run:
    """A run, live or over. Its methods wait for their results, also in a notebook.

    Used as a context manager, a run is stopped at the end of the block.
    """

    def __init__(self, found: FoundRun) -> None:
        self._found = found

    @property
    def name(self) -> str:
        """The id of the run."""
        return self._found.run

    @property
    def directory(self) -> Path:
        """The directory of the run.

        Raises:
            AsyncRLError: the run is on another machine.
        """
        if self._found.root is None:
            raise AsyncRLError(f"run {self.name} is on another machine; its directory is there")
        return self._found.root

    def __repr__(self) -> str:
        return f"Run({self.name!r})"

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Wait until the run has ended, and return its summary: rewards, accuracies, tokens and seconds.

        Returns:
            The content of `summary.json`; empty for a run on another machine.

        Raises:
            TimeoutError: the run has not ended within `timeout_s`.
            AsyncRLError: the run failed or crashed.
        """
        try:
            result_of(asyncio.wait_for(requests.ended(self._found), timeout_s))
        except TimeoutError:
            raise TimeoutError(f"run {self.name} has not ended within {timeout_s:g} s") from None
        if self._found.root is None:
            return {}
        files = self._found.files
        if files.end == "failed":
            raise AsyncRLError(f"run {self.name} failed: {files.failure.read_text(encoding='utf-8')}")
        if files.end == "crashed":
            raise AsyncRLError(f"run {self.name} crashed; continue with asyncrl.up(resume={self.name!r})")
        return files.read_summary()

    def stop(self, timeout_s: float = 60.0) -> None:
        """Ask the run to stop, and wait until it has ended; a run that is over stays as it is.

        Raises:
            TimeoutError: the run has not ended within `timeout_s`.
            RunNotFound: the run is on another machine, and cannot be reached or is over.
        """
        try:
            result_of(asyncio.wait_for(requests.stop(self._found, "Run.stop"), timeout_s))
        except RunNotFound:
            if self._found.is_held:
                raise
        except TimeoutError:
            raise TimeoutError(f"run {self.name} has not ended within {timeout_s:g} s") from None

    def scale(self, timeout_s: float = 60.0, **wanted: int) -> None:
        """Change the numbers of processes, and wait until as many live: `run.scale(rollout=4)`.

        Args:
            timeout_s: seconds to wait.
            wanted: processes by role; of a pool `**{"rollout.code": 4}`, of a group of engines `**{"engine.large": 2}`.

        Raises:
            AsyncRLError: the run decided otherwise, or does not have as many in time.
            WrongUsage: the run has no such role.
        """
        result_of(requests.scale(self._found, wanted, timeout_s))

    def status(self) -> RunStatus:
        """Return the state of the run: step, reward, lag, rates, actors, engines, streams and stalls."""
        return result_of(read_status(self._found))

    def history(self) -> Rows[RunMoment]:
        """Return the state over time: of each second of the last ten minutes, and thinned with age before."""
        return Rows(result_of(read_history(self._found)))

    def metrics(self, event: Literal["step", "eval", "weights"] = "step") -> Rows[MetricRow]:
        """Return the rows of `metrics.jsonl` so far: of each step, of each evaluation, or of each published version."""
        return metric_rows(self.directory / "metrics.jsonl", event)

    def samples(self, step: int | None = None, *, version: int | None = None, count: int = 8) -> Rows[Sample]:
        """Return prompts, completions, labels and rewards of a batch, or of an evaluation.

        Args:
            step: of the batch; the newest one by default.
            version: of the weights, for the samples of its evaluation instead.
            count: how many at most; 0 for all.

        Raises:
            AsyncRLError: there are none.
        """
        _, samples = result_of(read_samples(self._found, WantedSamples(step, version, most=count)))
        return Rows(samples)

    def report(self, path: str | PathLike[str]) -> None:
        """Write a page with the data of the run, as one HTML file that any browser shows.

        Raises:
            OSError: the file cannot be written.
        """
        result_of(write_run_report(self._found, Path(path)))

    def cost(self, rate: float | None = None) -> Cost:
        """Return GPU hours, tokens and seconds by cause, and what to scale first.

        Args:
            rate: price of one GPU hour.
        """
        return result_of(read_cost(self._found, rate))

    def topic(self, name: str, *, from_start: bool = True) -> AsyncIterator[Message]:
        """Iterate over the messages of a topic until the run has ended: `async for step in run.topic("batch.trained")`.

        Args:
            name: of the topic; `asyncrl topics` lists all.
            from_start: also the messages that are stored already.

        Raises:
            WrongUsage: the run has no such topic.
        """
        return TopicMessages(self._found, name, from_start=from_start)


def attach(name: str = "", directory: str | PathLike[str] = "runs", *, credentials: str | PathLike[str] = "") -> Run:
    """Return a run that is live or over.

    Args:
        name: id or directory of the run; by default the live one, else the newest.
        directory: folder that holds the directories of runs.
        credentials: file with a login, such as `monitor.json`, for a run on another machine.

    Raises:
        RunNotFound: there is no such run, or several are live and none is named.
    """
    if not credentials:
        return Run(find_run(name, Path(directory), live=False))
    if not name:
        raise RunNotFound("credentials name a server, not a run: give the id of the run as well")
    try:
        return Run(FoundRun(name, None, BusAddress.read(Path(credentials))))
    except (OSError, ValueError) as error:
        raise RunNotFound(f"the login cannot be read: {error}") from error
