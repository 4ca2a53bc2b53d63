"""The gateway: HTTP APIs on one port, answered by the engines of the run over updates and faults."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any

from aiohttp import web

from actors.gateway.channels import Channels, has_grammars
from actors.gateway.claims import Claims
from actors.gateway.clients import Leaving, Requests, lost_of
from actors.gateway.data_keys import DataKeys
from actors.gateway.fair_queue import FairQueue
from actors.gateway.feedback import Opinions
from actors.gateway.handover import Handover
from actors.gateway.http_server import OpenPort, listening
from actors.gateway.meter import Meter
from actors.gateway.operations import Operations
from actors.gateway.prompts import Prompts
from actors.gateway.reply import Answered, Reply, shape_errors
from actors.gateway.request_body import read_body
from actors.gateway.responses import Responses
from actors.gateway.shadows import Shadows
from actors.gateway.turn import Turn
from actors.gateway.turn_store import TurnStore
from actors.runtime.actor import ActorFault, Context
from asyncrl.background import all_of, first_of
from asyncrl.bus.errors import BusError
from asyncrl.bus.log import Record, last_sequence, read_last
from asyncrl.bus.publish import BY
from asyncrl.data.model_dir import check_model_directory
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.apis.messages import COUNT_PATH
from asyncrl.live.apis.models import MODELS_PATH, check_model, model_body, models_body
from asyncrl.live.apis.registry import APIS, MESSAGES
from asyncrl.live.apis.schema import Api, Ending, LiveError, Request
from asyncrl.live.apis.tokenize import TOKENIZE_PATH, parse_tokenize, tokens_body
from asyncrl.live.conversation import Conversations, Prompt
from asyncrl.live.feedback import FEEDBACK_PATH, parse_feedback
from asyncrl.live.forced_prefix import begin_reply
from asyncrl.live.keys import PRIVATE_HEADER, Keys, is_private
from asyncrl.live.redaction import Redactor
from asyncrl.live.reply import Bounds
from asyncrl.live.sessions import SESSION_HEADER, Session, session_of
from asyncrl.live.side_requests import is_side_request
from asyncrl.live.tools import Wording
from asyncrl.live.turn_boundary import open_boundary
from asyncrl.live.turn_log import Asked, TurnLog, asked
from asyncrl.ports import Listen
from asyncrl.state.records import LISTENS
from topics.keys import KEY_ADDED, KEY_REVOKED, KeyAdded
from topics.secrets import PURGE_REQUESTED, PurgeRequested
from topics.topic import ACTORS, TURNS, Topic
from topics.turns import TURN_CLAIMED, TURN_FINISHED, TURN_STARTED, SessionLeft, TurnClaimed, TurnFinished, TurnStarted

_TURN_TOPICS = (TURN_STARTED, TURN_FINISHED)
_READ_BACK = 20_000  # messages of turns that a new gateway reads
_SPOOL_S = 10.0  # for what a gateway before this one could not store
_CATCH_UP_S = 1.0  # for what other gateways have stored
_LEAVE_S = 5.0  # for what waits to be stored, or for running replies, when it is asked to stop
_CUT_S = 2.0  # for replies that are ended to say so
_OPINION_BYTES = 16_384  # of the body of a feedback


async def main(context: Context) -> None:
    """Serve until asked to stop."""
    await Gateway(context).run()


class Gateway:
    """Answers requests; all state between requests is a cache."""

    def __init__(self, context: Context) -> None:
        """
        Raises:
            ModelError, TokenizerError: the model cannot hold conversations.
        """
        config, directory = context.config, context.files.model_path(context.config.model)
        model = check_model_directory(directory)
        self._context = context
        self._settings, self._safety = config.gateway, config.live.safety
        self._served = model._replace(context=config.engine.context or model.context)
        self._tokenizer = TaskTokenizer.load(directory, skip_special=config.rollout.skip_special_tokens)
        self._wording = Wording.of(self._tokenizer)
        most = self._served.context - 1
        self._seam = open_boundary(self._tokenizer, self._settings.renderer, most=most)
        self._known = Conversations(self._seam, most_tokens=self._settings.history_tokens)
        self._keys = Keys()
        self._channels = Channels(context, self._served, self._tokenizer.decode_all)
        self._log = TurnLog(self._known, most_tokens=self._settings.history_tokens, retry_s=self._settings.retry_s)
        self._turns = context.listen(TURNS, self._take_turn, (*_TURN_TOPICS, TURN_CLAIMED), unread=self._is_own)
        self._news = asyncio.Event()  # a turn of another gateway
        self._own = 0  # sequence of the last turn that was stored before it began
        self._facts = TurnStore(context, self._log, most_bytes=self._settings.spool_mb * 2**20)
        self._opinions = Opinions(context.bus, self._facts, self._caught_up, discount=config.live.discount)
        self._shadows = Shadows(context, self._served, self._tokenizer.decode_all, self._facts)
        self._data_keys = DataKeys(context, self._facts, self._log)
        self._meter = Meter(context, self._facts)
        shared = self._keys.are_of_several
        self._places = FairQueue(self._settings.in_flight, self._settings.queue_timeout_s, shared=shared)
        self._leaving = Leaving(self._settings.queue_timeout_s)
        self._requests = Requests()
        self._handover = Handover(context)
        self._claims = Claims(context, self._log, self._caught_up, self._facts, self._leaving.has_client)
        begin = partial(begin_reply, wording=self._wording, grammars=has_grammars(config))
        bounds = Bounds(begin, most, self._served.vocab_size)
        self._responses = Responses(context.bus, self._facts, self._keys, self._meter)
        self._prompts = Prompts(self._settings, self._log, self._facts, self._caught_up, bounds=bounds, shared=shared)

    async def run(self) -> None:
        """Serve until asked to stop."""
        await self._open_redactor()
        keys = self._context.listen(ACTORS, self._take_asked, [KEY_ADDED, KEY_REVOKED, PURGE_REQUESTED])
        await keys.start()
        await keys.caught_up()
        await self._read_turns()
        await self._channels.start()
        await self._shadows.start()
        settings, seam = self._settings, self._seam
        host, port, most, silent_s = settings.host, settings.port, settings.connections, settings.connection_s
        place = self._handover.socket or Listen(host, port)
        try:
            async with listening(self._application(), place, most=most, silent_s=silent_s) as opened:
                self._context.vitals[LISTENS] = 1.0
                self._context.log.info("gateway listens", host=host, port=port, renderer=seam.name, reason=seam.reason)
                self._handover.take_over()
                await self._context.stop.wait()
                await self._handover.wait()
                await self._drain(opened)
        except OSError as error:
            raise ActorFault(f"the gateway cannot listen on {host}:{port}: {error}; set gateway.port") from error
        finally:
            await self._facts.close(_LEAVE_S)
            await self._turns.close()
            await self._meter.close()
            await keys.close()
            await self._channels.close()
            await self._shadows.close()

    async def _drain(self, port: OpenPort) -> None:
        """Accept no more connections, and give running replies their time; those that are not whole then are ended."""
        port.close()
        hurry, drain_s = self._context.hurry, self._handover.drain_s
        if not hurry.is_set():
            await first_of(self._requests.ended(), hurry.wait(), timeout_s=drain_s)
        if hurry.is_set():
            await first_of(self._requests.ended(), timeout_s=min(drain_s, _LEAVE_S))
        self._leaving.interrupt()
        await first_of(self._requests.ended(), timeout_s=_CUT_S)

    async def _open_redactor(self) -> None:
        live = self._context.config.live
        if live.redact:
            self._facts.redactor = await Redactor.open(
                live.redact, base=self._context.files.base, limit_s=live.redact_s, tokenizer=self._tokenizer
            )

    async def _read_turns(self) -> None:
        """Read the stored turns, and end those of dead gateways: gateways with this one's name, or removed from the
        run."""
        await self._facts.start(_SPOOL_S, follows=self._handover.follows)
        self._own = await last_sequence(self._context.bus, TURNS)
        await self._meter.start(self._own)
        await self._turns.start(max(0, self._own - _READ_BACK))
        await self._turns.caught_up()
        await self._end_departed(self._context.bus.name, *self._facts.departed)
        if self._handover.follows:
            self._context.tasks.start(self._outlast())

    async def _outlast(self) -> None:
        """End the open turns of earlier processes, once those processes have ended."""
        await self._facts.outlast()
        await self._caught_up()
        await self._end_departed(*self._facts.departed)

    async def _end_departed(self, *gateways: str) -> None:
        """End the open turns of dead gateways."""
        for cut in self._log.open_of(*gateways):
            await self._facts.recall(cut.started.turn_id)
            await self._facts.put(
                TurnFinished(
                    turn_id=cut.started.turn_id,
                    session=cut.started.session,
                    finish="gone",
                    tokens=cut.tokens,
                    logprobs=cut.logprobs,
                    versions=cut.versions,
                    secret=cut.started.secret,
                )
            )
            self._context.count("turns_cut")
        self._facts.forget_departed()

    def _take_asked(self, _topic: Topic[Any], message: Any, record: Record) -> None:
        """Fold in what an operator asked for."""
        if isinstance(message, PurgeRequested):
            self._data_keys.purge(message, record.time_ns)
        else:
            self._keys.take(message)

    def _is_own(self, record: Record) -> bool:
        """Return whether this process stored a record: it folds its own turns in before they are stored."""
        return record.sequence > self._own and record.headers.get(BY) == self._context.bus.name

    def _take_turn(self, _topic: Topic[Any], fact: Any, record: Record) -> None:
        """Fold in a turn of another gateway, or of the process before this one; only headers of own turns arrive."""
        if isinstance(fact, TurnStarted | TurnFinished):
            self._log.take(fact, record.headers.get(BY, ""), record.time_ns / 1e9)
        if isinstance(fact, TurnFinished | TurnClaimed):
            self._claims.take(fact)
        self._news.set()

    def _application(self) -> web.Application:
        operations = Operations(self._context, self._keys, lambda: self._channels.unready_s)
        shaped = shape_errors(self._context)
        app = web.Application(middlewares=[operations.cors(), self._requests.outlasting(), shaped])
        app.on_response_prepare.append(operations.add_cors)
        app.add_routes(operations.routes())
        posts = {api.path: self._answerer(name, api) for name, api in APIS.items()}
        posts |= {COUNT_PATH: self._count, TOKENIZE_PATH: self._tokenize, FEEDBACK_PATH: self._feedback}
        app.add_routes([web.post(path, handler, expect_handler=operations.expect) for path, handler in posts.items()])
        app.add_routes(self._responses.routes)
        models = (MODELS_PATH, f"{MODELS_PATH}/{{name:.+}}")
        app.add_routes([operations.get(path, self._models) for path in models])
        app.add_routes([web.delete("/v1/sessions/{name}", self._leave, expect_handler=operations.expect)])
        app.router.add_route("*", "/{path:.*}", self._nothing, expect_handler=operations.expect)
        return app

    def _answerer(self, name: str, api: Api) -> Answered:
        reads = self._responses.read_body if name == "responses" else read_body

        async def answer(http: web.Request) -> web.StreamResponse:
            key = self._keys.key(http.headers)
            private = is_private(key, http.headers)
            begun_s = self._meter.begin(key)  # before anything that costs: it may be a flood
            request, user, owner, prompt = await self._prompts.read(
                http, key.tenant, api.parse, private=private, reads=reads
            )
            who = asked(owner, name, request, http.headers, messages=prompt.key)
            lost = lost_of(http)
            side = is_side_request(request.messages)
            request = self._responses.keeps(request.without_prompt(), private=private)
            turns = await self._turns_of(request, prompt, who, lost, private=private)
            session = session_of(key.tenant, http.headers, turns[0].id, prompt.session, side=side)
            secret, new = "", [turn for turn in turns if not turn.repeats]

            async def keep(body: bytes) -> None:
                await self._responses.keep(turns[0].id, key.tenant, body, request, secret=turns[0].secret)

            reply = Reply(http, api, turns, session, keep if request.store else None)
            self._given([turn for turn in turns if turn.repeats], missed=False)  # no other request gets them now
            missed = True

            async def ending(number: int, turn: Turn, secret: str) -> Ending:
                turn.begin(self._facts, key, name, session, secret=secret)
                service = self._channels.service(user, session.id)
                return await turn.run(service, self._facts, partial(reply.send, number), self._safety)

            try:
                async with self._under_way(new, session, key.tenant, lost, private=private):
                    secret = await self._data_keys.of(user) if new and not private else ""
                    endings = await all_of(*(ending(number, turn, secret) for number, turn in enumerate(turns)))
                self._context.count("turns_repeated", len(turns) - len(new))
                self._context.count("turns", len(new))
                self._context.count("replies_rewritten", prompt.rewritten)
                answered = await reply.end(endings)
                missed = reply.missed
                for turn in new:
                    self._shadows.answer(turn.shadowed())
                return answered
            except LiveError as error:
                self._context.count("turns_failed")
                return await reply.fail(error)
            except ConnectionError:
                self._context.count("clients_gone")
                return reply.response or web.Response()
            finally:
                self._given(turns, missed=missed)
                await self._measured(key, begun_s, new, private=private)
                if lost.done():  # since then
                    self._given(turns, missed=True)

        return answer

    async def _measured(self, key: KeyAdded, begun_s: float, new: Sequence[Turn], *, private: bool) -> None:
        """Count the tokens of the new turns of a request against the limits of its key."""
        if new:
            size = sum(turn.size for turn in new)
            unstored = sum(private or (turn.size > 0 and not turn.recorded) for turn in new)
            await self._meter.end(key, new[0].id, begun_s, size, unstored=unstored)

    def _given(self, turns: Sequence[Turn], *, missed: bool) -> None:
        """Take note of whether a client has missed its replies."""
        for turn in turns:
            self._log.given(turn.digest, turn.id, missed=missed)

    async def _turns_of(
        self, request: Request, prompt: Prompt, who: Sequence[Asked], lost: asyncio.Future[None], *, private: bool
    ) -> list[Turn]:
        """Return the turns of a request; of a private one nothing is stored, and other gateways know nothing."""

        def make(anew: bool) -> list[Turn]:
            if anew:
                return [Turn(request, prompt, self._wording, self._settings, asked=one) for one in who]
            return [self._turn(request, prompt, one) for one in who]

        await self._leaving.ended(who, lost)
        alone = self._settings.count == 1 and not self._handover.follows
        return make(False) if private or alone else await self._claims.turns(who, make)

    def _turn(self, request: Request, prompt: Prompt, who: Asked) -> Turn:
        """Return a turn; it continues a stored turn that it repeats. Raises as `TurnLog.retried`."""
        stored = self._log.retried(who, time.time())
        # A grammar begins with the first token: it cannot continue tokens sampled without it.
        if stored is not None and not (stored.whole or (stored.answers(prompt) and not request.schema)):
            stored = None
        return Turn(request, prompt, self._wording, self._settings, asked=who, stored=stored)

    @contextlib.asynccontextmanager
    async def _under_way(
        self, turns: Sequence[Turn], session: Session, tenant: str, lost: asyncio.Future[None], *, private: bool
    ) -> AsyncIterator[None]:
        """Hold a place for the new turns of a request; end its session after them, if the request says so."""
        names = [name for turn in turns for name in turn.holds]
        with self._leaving.watched(turns, lost), self._log.held(names):
            async with self._claims.kept(turns), self._places.hold(tenant, lost):
                try:
                    yield
                finally:
                    if session.done and not private:
                        await self._facts.put(SessionLeft(session_id=session.id, tenant=tenant), anyway=True)

    async def _caught_up(self) -> bool:
        """Wait a little for what other gateways have stored by now; returns whether it is all there."""
        try:
            async with asyncio.timeout(_CATCH_UP_S):
                newest = [await read_last(self._context.bus, topic) for topic in _TURN_TOPICS]
                last = max((record.sequence for record in newest if record is not None), default=0)
                while self._turns.last < last:
                    self._news.clear()
                    await self._news.wait()
        except (TimeoutError, BusError):
            return False
        return True

    async def _count(self, http: web.Request) -> web.StreamResponse:
        key = self._keys.key(http.headers)
        self._meter.begin(key, replies=False)
        private = is_private(key, http.headers)
        taken = await self._prompts.read(http, key.tenant, MESSAGES.parse_count, private=private)
        return web.json_response({"input_tokens": len(taken.prompt.ids)})

    async def _tokenize(self, http: web.Request) -> web.StreamResponse:
        key = self._keys.key(http.headers)
        self._meter.begin(key, replies=False)
        request, _, _, prompt = await self._prompts.read(
            http, key.tenant, parse_tokenize, private=is_private(key, http.headers)
        )
        text = self._tokenizer.decode_all if request.token_ids else None
        return web.json_response(tokens_body(prompt.ids.tolist(), self._served.context, text))

    async def _feedback(self, http: web.Request) -> web.StreamResponse:
        """Take what a user says of a reply."""
        key = self._keys.key(http.headers)
        self._meter.begin(key, replies=False)
        if is_private(key, http.headers):
            words = "feedback is stored, and the key or the header of this request asks that nothing of it is"
            raise LiveError("forbidden", f"{words}: leave {PRIVATE_HEADER} out, and use a key that consents")
        opinion = parse_feedback(await read_body(http, _OPINION_BYTES))
        answer = await self._opinions.give(key.tenant, opinion)
        self._context.count("feedback")
        return web.json_response(answer)

    async def _models(self, http: web.Request) -> web.StreamResponse:
        """List the models, or return the one that the path names."""
        self._keys.tenant(http.headers)
        name = http.match_info.get("name", "")
        if name:
            check_model(name, self._settings.models)
        names = self._settings.models or [self._context.config.run]
        return web.json_response(model_body(name) if name else models_body(names))

    async def _leave(self, http: web.Request) -> web.StreamResponse:
        """Take the end of a session; one that the tenant never had, or that has ended, ends again without an effect."""
        key = self._keys.key(http.headers)
        self._meter.begin(key, replies=False)
        session = session_of(key.tenant, {SESSION_HEADER: http.match_info["name"]}, "", "")
        if not is_private(key, http.headers):
            await self._facts.put(SessionLeft(session_id=session.id, tenant=key.tenant), anyway=True)
        return web.json_response({"id": session.name, "object": "session.deleted", "deleted": True})

    async def _nothing(self, http: web.Request) -> web.StreamResponse:
        raise LiveError("absent", f"there is no {http.method} {http.path} here; docs/guides/gateway.md lists all paths")
