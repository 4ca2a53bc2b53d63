"""The context of a rollout function, and the segments that it makes."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec
import numpy as np

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.errors import AsyncRLError, EnvironmentFault
from asyncrl.rewards.score import check_name, finite, read_metrics
from asyncrl.rollout.experts import inherited
from asyncrl.rollout.generated import Generated, Generation
from asyncrl.rollout.host import Asked, Host, Limits
from asyncrl.rollout.journal import Journal, call_order, digest_of, outside, seed_of_call
from asyncrl.rollout.outcomes import as_bytes, check_outcome, merged
from asyncrl.rollout.row import Row
from asyncrl.rollout.snapshots import SnapshotLog
from asyncrl.rollout.tool_calls import ToolCalls
from asyncrl.tools.server import ToolServer
from asyncrl.tracing import traceparent
from topics.actors import Waiting
from topics.prompts import PromptRow
from topics.trajectories import Answer, Outcome, Segment
from topics.wire import Int32Array, UInt8Array

if TYPE_CHECKING:
    from asyncrl.rollout.endpoint import Endpoint

Replay: TypeAlias = Literal["journal", "rerun"]
RolloutFunction: TypeAlias = Callable[[PromptRow, "RolloutContext"], Awaitable[None]]


class ToolFailed(AsyncRLError):
    """A tool raised; the text names what."""


class RolloutContext:
    """All that a rollout function may use of the world.

    `generate` is the only way to sample, `tool` the way to act, `time` and `random` the clock and the die; `outcome`
    takes what the function itself knows of the result. All of it is recorded, and recorded answers are given again
    when the function is run again elsewhere.
    """

    def __init__(
        self, tokenizer: TaskTokenizer, journal: Journal, host: Host, *, seed: int, limits: Limits, tool_limit_s: float
    ) -> None:
        self.tokenizer = tokenizer
        self.completion: str | None = None  # text for the reward; None: everything the policy sampled
        self._journal = journal
        self._host = host
        self._seed = seed
        self._limits = limits
        self._tool_limit_s = tool_limit_s
        self._calls: dict[str, Generation] = {}  # generations by call path
        self._outcomes: dict[str, Outcome] = {}  # results, by call path

    @property
    def traceparent(self) -> str:
        """The header that puts requests of tools into the trace of the trajectory; "" if it is not traced."""
        return traceparent()

    async def generate(
        self,
        token_ids: Sequence[int] | Int32Array,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Generated:
        """Sample a continuation of `token_ids` ([T], prompt and everything published so far).

        Raises:
            TypeError: they are text.
        """
        given: object = token_ids
        if isinstance(given, str):
            raise TypeError(f"context.generate takes token ids, found the text {given[:60]!r}; encode it first")
        ids = np.ascontiguousarray(token_ids, dtype=np.int32)
        limits = Limits(
            max_new_tokens or self._limits.max_new_tokens, list(self._limits.stop if stop is None else stop)
        )
        path, answer = self._journal.ask("generate", digest_of(ids, limits))
        call = Generation(ids, answer, Generated(answer, self.tokenizer))
        await self._sample(path, call, limits)
        return call.generated

    async def _sample(self, path: str, call: Generation, limits: Limits) -> None:
        ids, answer = call.ids, call.answer
        if not (answer.done or answer.routing or len(answer.tokens)):
            answer.routing = inherited(ids, ((path, call.ids, call.answer) for path, call in self._calls.items()))
        self._calls[path] = call
        if not answer.done:
            with outside():
                await self._host.sample(ids, answer, limits._replace(seed=seed_of_call(self._seed, path)))

    def endpoint(self, *, again: bool = False) -> Endpoint:
        """Serve the policy at an HTTP address: `async with context.endpoint() as endpoint`.

        A program speaks one of the gateway's APIs at `endpoint.base_url`, with `endpoint.api_key`. Its calls become
        rows of the trajectory. They sample as the run does: other temperatures and top-p values are ignored.

        Args:
            again: sample all calls, also those whose answers another worker has recorded.

        Raises:
            TokenizerError: the model has no chat template.
        """
        from asyncrl.rollout.endpoint import Endpoint

        most, calls = self._limits.max_new_tokens, self._journal.by_content(again=again)

        async def sample(ids: Int32Array, max_new_tokens: int, stop: Sequence[str]) -> tuple[str, Answer]:
            limits = Limits(max_new_tokens, list(stop))
            path, answer = calls.ask("generate", digest_of(ids, limits))
            try:
                await self._sample(path, Generation(ids, answer, Generated(answer, self.tokenizer)), limits)
            finally:
                if not answer.done:  # the client has left
                    calls.withdraw(path)
                    del self._calls[path]
            return path, answer

        def restore(path: str, ids: Int32Array) -> Answer:
            answer = calls.take(path)
            self._calls[path] = Generation(ids, answer, Generated(answer, self.tokenizer))
            return answer

        return Endpoint(self.tokenizer, sample, max_new_tokens=most, restore=restore)

    def snapshots(self) -> SnapshotLog:
        """Return the snapshots of the workspace that were stored, for harnesses."""
        return self._journal.snapshots(self._host.checkpoint)

    async def opponent(
        self,
        prompt: str | list[dict[str, Any]] | Sequence[int] | Int32Array,
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] | None = None,
    ) -> Generated:
        """Sample a continuation by the engines of `rollout.opponent_engines`. It is recorded, and not trained.

        Args:
            prompt: text or chat messages; or token ids of the model that answers.

        Raises:
            ToolFailed: there are none, or they gave no answer within `rollout.tool_limit_s`.
        """
        most = max_new_tokens or self._limits.max_new_tokens
        limits = Limits(most, list(self._limits.stop if stop is None else stop))

        async def sample(asked: Asked, _most: int, _stop: list[str], seed: int) -> tuple[list[int], str, str]:
            return await self._host.opponent(asked, limits._replace(seed=seed))

        is_text = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], dict))
        asked, seed = prompt if is_text else np.asarray(prompt, np.int32).tolist(), self.random().getrandbits(62)
        tokens, finish, *text = await self.tool("opponent", sample, asked, limits.max_new_tokens, limits.stop, seed)
        answer = Answer("", "", tokens=np.array(tokens, np.int32), finish=finish, done=True)
        return Generated(answer, self.tokenizer, *text)

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Work in one of the slots of the worker, once one is free: for functions that prepare a place before."""
        return self._host.slot()

    def working(self, name: str) -> AbstractContextManager[None]:
        """Count a block as the work of a program that has its own time limit, so that the lease is kept."""
        return self._host.waiting(Waiting("tool", name))

    async def tool(
        self,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        replay: Replay = "journal",
        time_limit_s: float | None = None,
    ) -> Any:
        """Call `function(*arguments)`, sync or async; arguments and answer are plain data (MessagePack).

        Args:
            replay: `journal`: a call that has answered is never made again, its answer is; `rerun`: it is made again
                whenever the rollout is resumed (tools that only look, or whose state lives in this process).
            time_limit_s: seconds after which an async function is cancelled and has failed with a TimeoutError; the
                trajectory keeps its lease until then. None takes `rollout.tool_limit_s`.

        Raises:
            ToolFailed: the function raised (with `journal`; the failure is recorded and raised again when replayed).
        """
        _, answer = self._journal.ask(f"tool:{name}", digest_of(arguments))
        limit_s = self._tool_limit_s if time_limit_s is None else time_limit_s
        with outside():
            if replay == "rerun":
                answer.done = True
                return await self._call(name, partial(function, *arguments), limit_s)
            return await self._recorded(name, answer, partial(function, *arguments), limit_s)

    async def tools(self, *names: str, again: bool = False) -> ToolCalls:
        """Return the tools of servers, `[tools.NAME]` of the config, for the policy.

        Args:
            again: make all calls, also those whose results another worker has recorded.

        Raises:
            FunctionError: there is no such server, or two of them have a tool of the same name.
            ToolsUnavailable: a server cannot be reached; the function runs again.
        """
        calls = self._journal.by_content(again=again)

        async def record(name: str, function: Callable[..., Awaitable[Any]], server: ToolServer, *given: Any) -> Any:
            path, answer = calls.ask(f"tool:{name}", digest_of(name, given))
            try:
                with outside():
                    return await self._recorded(name, answer, partial(function, server, *given), None)
            finally:
                if not answer.done:  # its caller has left
                    calls.withdraw(path)

        return await ToolCalls.open(self._host.toolbox, names, record)

    async def _recorded(self, name: str, answer: Answer, call: Callable[[], Any], limit_s: float | None) -> Any:
        if not answer.done:
            try:
                answer.result = msgspec.msgpack.encode(await self._call(name, call, limit_s))
            except EnvironmentFault:
                raise  # the function runs again, and this call with it
            except (Exception, SystemExit) as error:  # a tool's failure is an answer too, recorded and given again
                text = f"{type(error).__name__}: {error}"
                answer.failed = text.encode(errors="backslashreplace").decode()  # lone surrogates are in no message
            answer.done = True
            await self._host.checkpoint()
        if answer.failed:
            raise ToolFailed(answer.failed)
        return msgspec.msgpack.decode(answer.result)

    async def _call(self, name: str, call: Callable[[], Any], limit_s: float | None) -> Any:
        result = call()
        if not inspect.isawaitable(result):
            return result
        task = asyncio.ensure_future(result)
        try:
            with self._host.waiting(Waiting("tool", name)):
                await asyncio.wait({task}, timeout=limit_s)  # it may ignore its cancellation
            if not task.done():
                raise TimeoutError(f"no answer within {limit_s:g} s")
            return task.result()
        finally:
            task.cancel()

    def time(self) -> float:
        """Seconds since the epoch, the same again when replayed."""
        _, answer = self._journal.ask("time", "")
        if not answer.done:
            answer.result, answer.done = msgspec.msgpack.encode(time.time()), True
        return float(msgspec.msgpack.decode(answer.result))

    def random(self) -> random.Random:
        """A generator of random numbers, the same again when replayed."""
        path, answer = self._journal.ask("random", "")
        answer.done = True
        return random.Random(f"{self._seed}:{path}")

    def outcome(
        self,
        reward: float | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        artefacts: Mapping[str, str | bytes] | None = None,
        turn_rewards: Sequence[float] = (),
    ) -> None:
        """Return results of the trajectory; a later call adds to earlier ones, and replaces equal names. First values
        count: they are kept when the function runs again elsewhere.

        Args:
            reward: of the trajectory. It is final: `reward.function` is not called.
            metrics: named finite numbers, whose means over a batch are `reward/NAME` in `metrics.jsonl`.
            artefacts: named texts or bytes, kept with the trajectory's tokens; `asyncrl explain` shows them.
            turn_rewards: of each `generate`, in the order of the calls, for `learner.advantage = "turns"`. Without a
                reward, it is their sum.

        Raises:
            ValueError: a value is no finite number, or there are too many or too large ones.
        """
        path, answer = self._journal.ask("outcome", "")
        if not answer.done:
            given = Outcome(
                None if reward is None else finite(reward, "the reward is"),
                read_metrics(metrics or {}),
                {check_name(name): as_bytes(name, value) for name, value in (artefacts or {}).items()},
                [finite(value, "a turn reward is") for value in turn_rewards],
            )
            check_outcome(merged([*self._outcomes.values(), given]))
            answer.result, answer.done = msgspec.msgpack.encode(given), True
        self._outcomes[path] = msgspec.msgpack.decode(answer.result, type=Outcome)

    @property
    def turns(self) -> int:
        """Calls of `generate` so far."""
        return len(self._calls)

    def outcome_given(self) -> Outcome | None:
        """Return all results of `outcome`, in the order of call paths; None if it was not called.

        Raises:
            ValueError: there are not as many rewards of turns as turns.
        """
        if not self._outcomes:
            return None
        given, turns = merged([self._outcomes[path] for path in _ordered(self._outcomes)]), len(self._calls)
        if given.turn_rewards and len(given.turn_rewards) != turns:
            found = f"found {len(given.turn_rewards)} turn rewards"
            raise ValueError(f"{found}, expected one for each of {turns} calls of generate, in their order")
        if given.turn_rewards and given.reward is None:
            given.reward = math.fsum(given.turn_rewards)
        return given

    def segments(self) -> list[Segment]:
        """The rows that come of all generations, in the order of their call paths.

        A generation whose input continues a row extends that row; another input (a rewritten or compacted history, a
        second branch) begins a new one.
        """
        rewarded = any(outcome.turn_rewards for outcome in self._outcomes.values())
        return [row.segment(rewarded=rewarded) for row in self._rows()]

    def routing(self) -> list[UInt8Array]:
        """Experts of the tokens of each segment, [T, B]; empty if no engine returned any. See `Answer.routing`."""
        answers = {path: call.answer for path, call in self._calls.items()}
        width = max((answer.routing.width for answer in answers.values() if answer.routing is not None), default=0)
        return [row.routing(width, answers) for row in self._rows()] if width else []

    def _rows(self) -> list[Row]:
        rows: list[Row] = []
        for turn, path in enumerate(_ordered(self._calls)):
            call = self._calls[path]
            row = next((row for row in reversed(rows) if row.continues(call.ids)), None)
            if row is None:
                row = Row()
                rows.append(row)
            row.observe(call.ids)
            row.sampled(path, call.answer, turn)
        return rows

    def sampled_text(self) -> str:
        """The text of everything the policy sampled, or what the function put in its place.

        Raises:
            TypeError, ValueError: that is no text, or none that a message can hold.
        """
        given: object = self.completion
        if given is not None:
            if not isinstance(given, str):
                found = f"{type(given).__name__} {given!r}"[:120]
                raise TypeError(f"context.completion is {found}; expected text, or None for all that was sampled")
            given.encode()  # half of a surrogate pair is in no message
            return given
        return "".join(call.generated.text for call in self._in_order())

    @property
    def truncated(self) -> bool:
        """Return whether the last generation ended at its limit."""
        return bool(self._calls) and self._in_order()[-1].answer.finish == "length"

    @property
    def hybrid(self) -> bool:
        """Return whether weights changed within a request."""
        return any(call.answer.hybrid for call in self._calls.values())

    def _in_order(self) -> list[Generation]:
        """All generations by call path: whichever of two branches was faster, the order is the same."""
        return [self._calls[path] for path in _ordered(self._calls)]


def _ordered(paths: Collection[str]) -> list[str]:
    return sorted(paths, key=call_order) if len(paths) > 1 else list(paths)


async def single_turn(row: PromptRow, context: RolloutContext) -> None:
    """The default rollout function: one prompt, one answer."""
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))
