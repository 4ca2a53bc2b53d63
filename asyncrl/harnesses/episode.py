"""The rollout function `environment`: the policy replies to the environment of a row until the problem is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncrl.environment_names import EnvironmentCapability, environment_can
from asyncrl.environments.kinds import environment_kind
from asyncrl.environments.protocol import Episode, Observation, Played, Problem, Step
from asyncrl.errors import AsyncRLError
from asyncrl.harnesses.limits import within
from asyncrl.live.apis.schema import TOO_LONG, LiveError
from asyncrl.rollout.context import RolloutContext, RolloutFunction
from topics.prompts import PromptRow
from topics.trajectories import TURNS


class ProblemChanged(AsyncRLError):
    """A problem that is another one than its row says."""


class _Opened(NamedTuple):
    episode: Episode

    async def aclose(self) -> None:
        await self.episode.close()


def episode_rollout(base: Path) -> RolloutFunction:
    """Return the rollout function.

    Args:
        base: folder that relative paths start from.
    """

    async def rollout(row: PromptRow, context: RolloutContext) -> None:
        problem = Problem.of(row)
        if environment_can(problem.kind, EnvironmentCapability.PROGRAM):
            await _run_program(problem, context)
            return
        async with aclosing(_Opened(environment_kind(problem.kind).episode(problem, base))) as opened:
            first = await _tool(context, "reset", opened.episode.reset)
            if first != row.prompt:
                where = f"{problem.kind}:{problem.name}: the first observation of seed {problem.seed}"
                raise ProblemChanged(f"{where} is {str(first)[:200]!r}; the row has {str(row.prompt)[:200]!r}")
            conversation = _Text(row, context) if isinstance(row.prompt, str) else _Chat(row, context)
            rewards = await _work(opened.episode, conversation, context)
        context.outcome(sum(rewards), metrics={"turns": float(len(rewards))}, turn_rewards=rewards)

    return rollout


async def _run_program(problem: Problem, context: RolloutContext) -> None:
    kind, found = environment_kind(problem.kind), Played(0.0, {}, "", "")

    async def run() -> None:
        nonlocal found
        found = await kind.play(problem, endpoint.base_url, endpoint.api_key)

    with context.working(problem.kind):
        async with context.endpoint() as endpoint:
            late = await within(run(), endpoint, kind.limit_s(problem))
    failure, context.completion = late or found.failure, found.reply
    artefacts = {"failure": failure} if failure else {}
    context.outcome(found.reward, metrics={**found.metrics, "failed": float(bool(failure))}, artefacts=artefacts)


async def _work(episode: Episode, conversation: _Text | _Chat, context: RolloutContext) -> list[float]:
    """Return the reward of each reply, until the problem is done or the context of the model is full."""
    rewards: list[float] = []
    replies: list[str] = []
    while len(rewards) < TURNS:
        if (reply := await conversation.reply()) is None:
            rewards.append(0.0)
            break
        replies.append(reply)
        step: Step = await _tool(context, "step", episode.step, reply)
        rewards.append(step.reward)
        if step.done:
            break
        conversation.observe(step.observation)
    context.completion = "\n".join(replies)
    return rewards


async def _tool(context: RolloutContext, name: str, call: Callable[..., Any], *arguments: str) -> Any:
    """Call the environment, whose state is in this process, so that a resumed trajectory calls it again."""
    return await context.tool(name, call, *arguments, replay="rerun")


class _Text:
    """Observations as plain text."""

    def __init__(self, row: PromptRow, context: RolloutContext) -> None:
        self._context = context
        self._tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()

    async def reply(self) -> str | None:
        """Return the next reply; None if the context of the model is full."""
        answer = await self._context.generate(self._tokens)
        self._tokens += answer.tokens.tolist()
        return answer.text if len(answer.tokens) else None

    def observe(self, observation: Observation) -> None:
        """Add what the environment answered."""
        text = observation if isinstance(observation, str) else "\n".join(str(one["content"]) for one in observation)
        self._tokens += self._context.tokenizer.encode_plain(text).tolist()


class _Chat:
    """Observations as messages."""

    def __init__(self, row: PromptRow, context: RolloutContext) -> None:
        self._endpoint = context.endpoint()
        self._messages = [*row.prompt]
        self._tools = row.metadata.get("tools", [])

    async def reply(self) -> str | None:
        """Return the next reply; None if the context of the model is full."""
        try:
            reply = await self._endpoint.reply(self._messages, self._tools)
        except LiveError as error:
            if error.code == TOO_LONG:
                return None
            raise
        self._messages.append(reply.message)
        calls = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
        return msgspec.json.encode(calls).decode() if calls else reply.text

    def observe(self, observation: Observation) -> None:
        """Add what the environment answered."""
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        self._messages += messages
