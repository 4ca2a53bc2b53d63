"""One turn: a request, its generation on the engines, and the reply that goes to the client as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import msgspec

from actors.gateway.channels import Service
from actors.gateway.shadows import Shadowed
from actors.gateway.turn_store import TurnStore
from asyncrl.background import to_its_end
from asyncrl.config.live_settings import GatewaySettings, SafetySettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.answer import Likeliest, stop_string
from asyncrl.engine.client import EngineRefused, SamplingParams
from asyncrl.engine.fleet import Wanted
from asyncrl.engine.generator import Generator, Watch
from asyncrl.live.apis.schema import Ending, LiveError, Opening, Piece, Request, assistant_message
from asyncrl.live.conversation import Prompt, history_key
from asyncrl.live.reply import ending_of, finish_of
from asyncrl.live.reply_flags import dedup_digest, reply_flags, siblings_of
from asyncrl.live.reply_parser import ReplyParts
from asyncrl.live.sampling import sampling_of
from asyncrl.live.sessions import Session, skip_of
from asyncrl.live.tools import Wording
from asyncrl.live.traffic_split import Arm
from asyncrl.live.turn_log import Asked, Stored
from topics.actors import Waiting
from topics.keys import KeyAdded
from topics.payload_refs import Experts
from topics.trajectories import Answer
from topics.turns import EarlySkip, Finish, Mark, TurnFinished, TurnSampled, TurnStarted

_STORED_TOKENS = 64  # of a running reply, after which they are stored
_MOST_KEYS = 32  # of the turns before one: a message names 64, those of its evidence or siblings among them
Send = Callable[[Piece | None], Awaitable[None]]
"""Sends a new piece, "" for a sign of life, None for nothing; a ConnectionError: the client is gone."""


class Turn(Watch):
    """A running reply."""

    def __init__(
        self,
        request: Request,
        prompt: Prompt,
        wording: Wording,
        settings: GatewaySettings,
        *,
        asked: Asked,
        stored: Stored | None = None,
    ) -> None:
        """
        Args:
            stored: the stored turn that it repeats if that turn is whole, or that it continues if not.
        """
        self.repeats = stored is not None and stored.whole
        self.continues = "" if stored is None or stored.whole else stored.started.turn_id
        self.id = stored.started.turn_id if stored is not None and stored.whole else secrets.token_hex(12)
        self.request = request
        self.claim = "", 0  # of its request, if this is the request's first new turn: name and sequence
        self._asked = asked
        self.prompt = prompt
        ids = prompt.ids.tolist() if request.token_ids else None
        self.opening = Opening(self.id, request.model, int(time.time()), len(prompt.ids), ids)
        self._answer = Answer("generate", "", done=self.repeats)
        if stored is not None:
            self._answer.tokens, self._answer.logprobs = stored.tokens, stored.logprobs
            self._answer.versions, self._answer.finish = stored.versions, stored.finish if stored.whole else ""
        self._tokenizer = wording.tokenizer
        self._form = wording.form if request.tools else None
        self._parts = ReplyParts(request, wording, self.id, begun=prompt.begun)
        self._cached = -1  # tokens of its prompt that the engine had, by the first request
        self._likeliest: list[Likeliest] = [[]] * len(self._answer.tokens)
        self._settings = settings
        self._came = asyncio.Event()  # tokens, or the end
        self._session = ""  # known with its begin
        self._secret = stored.started.secret if stored is not None and stored.whole else ""
        self._arm = Arm()
        self._lineages = [-1] if self.continues else []  # of its tokens; -1: not known
        self._skip: EarlySkip | None = None
        self._before = "", 0  # the stored turn that its prompt begins with, and the number of that turn's tokens
        self._started: TurnStarted | None = None  # None for a repeated reply
        self._recorded = False  # its begin is stored, or waits to be
        self._held = False  # it waits for an engine
        self._left: Exception | None = None  # why it ends with the tokens that there are
        self._requested = False  # an engine was asked for it, and reads its prompt
        self._patience = asyncio.timeout(None)  # with its wait for an engine
        self._patience_s = settings.queue_timeout_s  # of that wait is left
        if self.continues and self._is_ended(wording.tokenizer):
            self._answer.done, self._answer.finish = True, "stop"

    @property
    def size(self) -> int:
        """Tokens of prompt and reply; 0 of a repeated reply, and of a prompt that no engine read."""
        tokens = len(self._answer.tokens)
        counts = not self.repeats and (tokens or (self._left and self._requested))
        return len(self.prompt.ids) + tokens if counts else 0

    @property
    def digest(self) -> str:
        """Return the digest of its request."""
        return self._asked.digest

    @property
    def secret(self) -> str:
        """Return the name of its data key; "" of a private turn, or before it begins."""
        return self._secret

    @property
    def recorded(self) -> bool:
        """Return whether its begin, and its end if it has ended, are stored, or wait to be."""
        return self._recorded

    @property
    def keyed(self) -> str:
        """Return the digest of its idempotency key; "" for none."""
        return self._asked.key

    @property
    def holds(self) -> list[str]:
        """Return the digests that no other request may use before the begin of this turn is known."""
        return [self._asked.key, *([self._asked.digest] if self.continues else [])]

    def shadowed(self) -> Shadowed | None:
        """Return the request that a canary answers in addition to this ended turn; None if no canary shall answer it,
        or no judge would compare the two."""
        arm, sampling = self._arm, msgspec.structs.replace(self._sampling, top=0)
        if not (self._recorded and arm.shadow) or self._skip is not None:
            return None
        return Shadowed(self.id, self.prompt.ids, sampling, self._secret, arm.shadow, arm.version)

    def begin(self, facts: TurnStore, api_key: KeyAdded, api: str, session: Session, *, secret: str) -> None:
        """Make the fact that it begins, which `run` stores; `secret` names its data key, "" of a private one."""
        if self.repeats:
            return
        prompt, self._session, self._secret = self.prompt, session.id, secret
        self._skip = skip_of(self._sampling, side=session.side)
        older = [one for one in facts.secrets_of(prompt.parent).split(",") if one not in ("", secret)]
        # No reader could put it together, or name all that reading it takes.
        if prompt.parent and (not facts.has(prompt.parent) or len(older) > _MOST_KEYS):
            prompt, older = prompt._replace(parent="", known=0), []
        self._before, key = (prompt.parent, prompt.known), facts.data_key(secret)
        self._started = TurnStarted(
            turn_id=self.id,
            session=session.id,
            tenant=api_key.tenant,
            api=api,
            parent=prompt.parent,
            known=prompt.known,
            tokens=prompt.ids[prompt.known :],
            rewritten=prompt.rewritten,
            temperature=self._sampling.temperature,
            digest=self._asked.digest,
            key=self._asked.key,
            continues=self.continues,
            skip=self._skip,
            secret=secret,
            siblings=siblings_of(key, session.id, prompt.ids, self._sampling.temperature) if key else "",
            older=",".join(older),
            tools=prompt.tools,
            api_key=api_key.key_id,
            prompt=prompt.key.hex(),
        )

    async def run(self, service: Service, facts: TurnStore, send: Send, safety: SafetySettings) -> Ending:
        """Sample the reply and send its text; returns its end, once that is stored or waits to be. Its begin is stored
        while an engine reads the prompt, and before anything is sent.

        Args:
            safety: by which its reply is marked.

        Raises:
            LiveError: no engine gives the reply, or not in time.
            ConnectionError: the client is gone.
        """
        finish: Finish = "failed"
        self._arm, (parent, known) = service.arm, self._before
        if service.row_bytes and known:  # those of the tokens before are in that turn, all but the last one's
            self._answer.routing = Experts(service.row_bytes, follows=parent, first=known - 1)
        task = asyncio.create_task(self._sample(service.generator))
        task.add_done_callback(lambda _task: self._came.set())
        try:
            async with asyncio.timeout(self._settings.deadline_s):
                await to_its_end(self._store_begin(facts))
                await self._stream(task, facts, send)
                await task
                finish = finish_of(self._answer)
                for piece in self._parts.end():
                    await send(piece)
        except (ConnectionError, asyncio.CancelledError):
            finish = "gone"
            raise
        except TimeoutError as error:
            words = f"no whole reply within {self._settings.deadline_s:g} s; try again later"
            raise LiveError("overloaded", words) from error
        except EngineRefused as error:
            raise LiveError("internal", f"the engines refuse the request: {error}") from error
        finally:
            if self._left is not None and finish not in ("stop", "length"):
                finish = "gone"  # an equal request continues with its tokens
            await to_its_end(self._end(task, facts, finish, safety))  # also if another choice fails at the same time
        return await asyncio.to_thread(self._ending) if self.request.logprobs else self._ending()

    def _ending(self) -> Ending:
        request, answer, known, cached = self.request, self._answer, self._likeliest, self._cached
        return ending_of(request, answer, self._parts, self._tokenizer, likeliest=known, cached=cached)

    async def _store_begin(self, facts: TurnStore) -> None:
        if self._started is not None and self._secret:
            self._recorded = await facts.put(self._started)
        elif self._started is not None:
            facts.know(self._started, owner=self._asked.owner)

    def leave(self, why: Exception) -> None:
        """End with the tokens that there are: the client is gone, or the gateway stops."""
        self._left = self._left or why
        self._came.set()

    async def _stream(self, task: asyncio.Task[None], facts: TurnStore, send: Send) -> None:
        """Send text as it becomes final, or a keep-alive if no text is sent for a time, until the task is done."""
        now, keepalive_s = asyncio.get_running_loop().time, self._settings.keepalive_s
        had, stored, alive_at = 0, 0, now() + keepalive_s
        if len(self._answer.tokens):
            self._came.set()
        while not (task.done() and had == len(self._answer.tokens)):
            await self._news(alive_at)
            if self._left is not None:
                raise self._left
            waits = self.request.schema and not task.done()  # it may be sampled again
            new = self._answer.tokens[had:had] if waits else self._answer.tokens[had:]
            had += len(new)
            pieces: list[Piece | None] = [*self._parts.add(new)]
            if not pieces and now() >= alive_at:  # also where tokens come, and make no text yet
                pieces = [None if self._held else ""]
            for piece in pieces:
                await send(piece)
                alive_at = now() + keepalive_s
            if self._recorded and had - stored >= _STORED_TOKENS and not task.done():
                await facts.progress(self._sampled(stored, had))
                stored = had

    async def _news(self, until_s: float) -> None:
        """Wait for tokens or the end, no longer than to a time of the event loop."""
        timer = asyncio.get_running_loop().call_at(until_s, self._came.set)  # costs less than a timeout
        try:
            await self._came.wait()
        finally:
            timer.cancel()
        self._came.clear()

    def _sampled(self, start: int, end: int) -> TurnSampled:
        answer, part = self._answer, slice(start, end)
        return TurnSampled(
            turn_id=self.id,
            start=start,
            tokens=answer.tokens[part],
            logprobs=answer.logprobs[part],
            versions=answer.versions[part],
            secret=self._secret,
        )

    def _is_ended(self, tokenizer: TaskTokenizer) -> bool:
        """Return whether the reply has its end already: its client was gone before that could be sent."""
        tokens, stop = self._answer.tokens.tolist(), self._sampling.stop
        if not tokens or tokens[-1] in (*tokenizer.eos_ids, *self.request.stop_ids):
            return bool(tokens)
        return bool(stop) and stop_string(tokens, stop, tokenizer.decode_all) is not None

    async def _sample(self, generator: Generator) -> None:
        if self._answer.done:
            return
        wanted = Wanted(group=self.prompt.parent or self.id, first=self._arm.first)
        try:
            async with self._patience:
                await generator.generate(
                    self.prompt.ids, self._sampling, wanted=wanted, answer=self._answer, watch=self
                )
        except TimeoutError as error:
            words = f"no engine took the request within {self._settings.queue_timeout_s:g} s; try again later"
            raise LiveError("overloaded", words) from error

    def waiting(self, waits_for: Waiting) -> AbstractContextManager[None]:
        """See `Watch`: a reply without a token waits for an engine for a time, and is then refused."""
        return nullcontext() if len(self._answer.tokens) else self._waits()

    @contextlib.contextmanager
    def _waits(self) -> Iterator[None]:
        since = time.monotonic()
        self._patience.reschedule(asyncio.get_running_loop().time() + self._patience_s)
        self._held = True
        try:
            yield
        finally:
            self._patience_s -= time.monotonic() - since
            self._held = self._patience.expired()
            if not self._held:
                self._patience.reschedule(None)

    @property
    def _history(self) -> str:
        return history_key(assistant_message(self._parts.text, self._parts.calls), self.prompt.key).hex()

    @property
    def _sampling(self) -> SamplingParams:
        stops, most, choice = self._tokenizer.stop_ids, self._settings.max_new_tokens, self._asked.choice
        return sampling_of(self.request, self._form, stops, most=most, choice=choice)

    def requested(self, engine_id: str) -> None:
        self._requested = True

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        if tokens:
            self._lineages = [*{*self._lineages, lineage}]
            self._came.set()

    def on_cached(self, tokens: int) -> None:
        self._cached = min(tokens, len(self.prompt.ids)) if self._cached < 0 else self._cached

    def on_likeliest(self, likeliest: list[Likeliest]) -> None:
        self._likeliest += likeliest

    def again(self) -> None:
        self._likeliest.clear()

    async def _end(self, task: asyncio.Task[None], facts: TurnStore, finish: Finish, safety: SafetySettings) -> None:
        """Store how it ended; where its tokens have no room, that they are lost."""
        await self._cancel(task)
        if self.repeats:
            return
        answer, whole, key = self._answer, finish in ("stop", "length"), facts.data_key(self._secret)
        compared = whole and self._arm.holds(answer.versions, self._lineages)
        finished = TurnFinished(
            turn_id=self.id,
            session=self._session,
            finish=finish,
            tokens=answer.tokens,
            logprobs=answer.logprobs,
            versions=answer.versions,
            history=self._history if whole else "",
            marks=self._marks(safety) if whole else [],
            same=dedup_digest(key, self.prompt.ids, answer.tokens) if whole and key else "",
            trial=self._arm.trial if compared else 0,
            canary=compared and self._arm.canary,
            secret=self._secret,
            routing=answer.routing if whole and answer.routing and answer.routing.rows else None,
        )
        if not self._recorded:
            facts.know(finished)
        elif not await facts.put(finished):
            self._recorded = False
            lost = TurnFinished(turn_id=self.id, session=self._session, finish="gone", secret=self._secret)
            await facts.put(lost, anyway=True)

    def _marks(self, safety: SafetySettings) -> list[Mark]:
        offered = {tool.get("function", {}).get("name") for tool in self.request.tools}
        invalid = self._parts.invalid + sum(call.name not in offered for call in self._parts.calls)
        return reply_flags(self._parts.text, self._answer.tokens, safety, invalid_calls=invalid)

    @staticmethod
    async def _cancel(task: asyncio.Task[None]) -> None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, EngineRefused, LiveError):
            await task
