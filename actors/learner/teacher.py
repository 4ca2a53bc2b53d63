"""A teacher that is a server: it gives log-probs to the rows of a batch before their step."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import structlog

from actors.learner.teacher_fault import TeacherFault
from asyncrl.algorithms.batches import GradedGroup, GradedTrajectory
from asyncrl.algorithms.losses import loss_of
from asyncrl.algorithms.penalties import columns_of
from asyncrl.algorithms.rows import TOP
from asyncrl.config.settings import Config
from asyncrl.data.model_dir import check_model_directory
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.errors import EngineError, EngineRefused
from asyncrl.engine.scoring import Denied, ScoringClient
from asyncrl.run.directory import RunFiles
from asyncrl.run.preflight_model import differing_token
from asyncrl.training.protocol import RowError
from topics.batches import Objective
from topics.trajectories import Segment
from topics.wire import Float32Array

T = TypeVar("T")

_SAMPLED = "teacher"  # column of the log-probs of the tokens themselves
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.2, 10.0  # between two attempts
_OTHER_KEY = "name the file with its key in learner.teacher.api_key_file"
_REMEDY = {
    401: _OTHER_KEY,
    403: _OTHER_KEY,
    404: "name the address of a server of SGLang's HTTP API in learner.teacher.url",
}


class TeacherServer:
    """Fills the teacher's columns. A server that is away is waited for (`learner.teacher.deadline_s`); one that refuses
    a row, a key or the call itself ends the run."""

    def __init__(self, config: Config, files: RunFiles, *, patience_s: float = math.inf) -> None:
        """
        Args:
            files: of the run, whose model directory has the tokenizer of the policy.
            patience_s: seconds that a server may be unreachable, if less than the setting.
        """
        settings = config.learner.teacher
        self._patience_s = min(patience_s, settings.deadline_s)
        self._answered_at = 0.0  # when the newest answer to any question arrived
        key = files.base / settings.api_key_file if settings.api_key_file else None
        self._url, self._config = settings.url, config
        self._client = ScoringClient(
            settings.url,
            api_key=key.read_text().strip() if key is not None else None,
            control_timeout_s=settings.timeout_s,
        )
        self._model = files.model_path(config.model)
        self._vocabulary = 0  # of the policy, once it is read
        self._limit = asyncio.Semaphore(settings.in_flight)
        self._known: asyncio.Task[None] | None = None  # that it reads the policy's tokens
        self._log: structlog.stdlib.BoundLogger = structlog.get_logger()

    async def close(self) -> None:
        """Close its connections."""
        await self._client.close()

    async def fill(self, objective: Objective, groups: Sequence[GradedGroup]) -> list[GradedGroup]:
        """The groups of a batch with the teacher's columns, as far as their tokens are here and any are needed.

        Raises:
            TeacherFault: the server cannot teach this policy.
            RowError: it refuses a row.
        """
        loss = loss_of(objective)
        wanted = {*columns_of(objective.penalties), *loss.needs} & {_SAMPLED, TOP}
        if not wanted:
            return list(groups)
        if self._known is None or (self._known.done() and (self._known.cancelled() or self._known.exception())):
            self._known = asyncio.create_task(self._check())
        await self._known
        top = min(loss.top_k, self._vocabulary) if TOP in wanted else 0

        async def of_segment(name: str, segment: Segment) -> Mapping[str, Float32Array]:
            found = await self._columns(name, segment, top)
            return {column: values for column, values in found.items() if column in wanted}

        async def of_member(member: GradedTrajectory) -> GradedTrajectory:
            columns = await asyncio.gather(*(of_segment(member.id, segment) for segment in member.segments))
            return member._replace(columns=columns)

        members = [asyncio.gather(*map(of_member, group.members)) for group in groups]
        return [
            group._replace(members=found) for group, found in zip(groups, await asyncio.gather(*members), strict=True)
        ]

    async def _columns(self, name: str, segment: Segment, top: int) -> dict[str, Float32Array]:
        trained = segment.mask[1:].nonzero()[0]
        size = len(segment.tokens)
        if not len(trained):
            return {_SAMPLED: _zeros(size), TOP: _zeros(size, top, 2)}
        try:
            found = await self._answer(lambda: self._client.score(segment.tokens, int(trained[0]), top))
        except EngineRefused as error:
            raise RowError(f"trajectory {name}: the teacher at {self._url} refuses it: {error}") from error
        if top and (most := int(found.top[..., 0].max())) >= self._vocabulary:
            raise TeacherFault(
                f"trajectory {name}: the teacher at {self._url} names token {most}, the policy has {self._vocabulary}; "
                "lower learner.teacher.top_k, or name another teacher"
            )
        return {_SAMPLED: found.logprobs, TOP: found.top}

    async def _answer(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Ask until there is an answer.

        Raises:
            TeacherFault: the server gives no answer at all for too long, or will never give one.
            EngineRefused: asking again would not help.
        """
        pause_s = _LEAST_PAUSE_S
        async with self._limit:
            began_at = time.monotonic()
            while True:
                try:
                    found = await ask()
                except EngineRefused:
                    raise
                except Denied as error:
                    raise TeacherFault(f"the teacher at {self._url}: {error}; {_REMEDY[error.status]}") from error
                except EngineError as error:
                    if time.monotonic() > max(began_at, self._answered_at) + self._patience_s:
                        raise TeacherFault(
                            f"the teacher at {self._url} gave no answer for {self._patience_s:g} s: {error}; start it, "
                            "or raise learner.teacher.deadline_s"
                        ) from error
                    self._log.warning("teacher away", url=self._url, reason=str(error))
                else:
                    self._answered_at = time.monotonic()
                    return found
                await asyncio.sleep(pause_s)
                pause_s = min(2.0 * pause_s, _MOST_PAUSE_S)

    async def _check(self) -> None:
        """Compare tokenizer and context with those of the policy, as far as the server and this host know them."""
        own = check_model_directory(self._model)
        self._vocabulary = own.vocab_size
        try:
            model, server = await self._answer(self._client.model_info), await self._answer(self._client.server_info)
        except EngineRefused as error:
            raise TeacherFault(f"the teacher at {self._url}: {error}") from error
        path = Path(str(model.get("tokenizer_path") or ""))
        problem = ""
        if (path / "tokenizer.json").is_file():
            policy = TaskTokenizer.load(self._model).vocabulary
            problem = differing_token(path, TaskTokenizer.load(path).vocabulary, policy)
        context = self._config.engine.context or own.context
        # A server refuses a prompt as long as its context, even if no token is to be sampled.
        whole, most = server.get("context_length"), server.get("max_req_input_len")
        rooms = [*([whole - 1] if isinstance(whole, int) else []), *([most] if isinstance(most, int) else [])]
        if min(rooms, default=context) < context:
            problem = problem or (
                f"it takes prompts of {min(rooms)} tokens, and a row of the policy may have {context}; start it with a "
                "longer context, or lower engine.context"
            )
        if problem:
            raise TeacherFault(f"the teacher at {self._url}: {problem}")


def _zeros(*shape: int) -> Float32Array:
    return np.zeros(shape, np.float32)
