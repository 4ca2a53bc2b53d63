"""A client that is gone when a reply ends gets that reply when it asks again: nothing is sampled behind its end."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from actors.gateway.channels import Service
from actors.gateway.clients import Leaving
from actors.gateway.turn import Turn
from asyncrl.config.live_settings import GatewaySettings, SafetySettings
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.live.apis.schema import Request
from asyncrl.live.conversation import Conversations
from asyncrl.live.difference import TurnBoundary
from asyncrl.live.sessions import Session
from asyncrl.live.tools import Wording
from asyncrl.live.traffic_split import Arm
from asyncrl.live.turn_log import Asked, TurnLog
from harness.examples import example
from harness.tokenizers import make_model
from topics.keys import KeyAdded
from topics.trajectories import Answer
from topics.turns import TurnFinished, TurnStarted

SESSION, DIGEST = Session("s_s", "s"), "1" * 32


class Facts:
    """Gives the facts of turns to a log at once."""

    def __init__(self, log: TurnLog) -> None:
        self.log, self.finishes = log, []

    def has(self, _turn: str) -> bool:
        return True

    def data_key(self, _secret: str) -> bytes | None:
        return b"k" * 32

    def secrets_of(self, _turn: str) -> str:
        return ""

    async def put(self, fact: Any) -> bool:
        self.log.take(fact, "gateway-1", 1.0)
        self.finishes += [fact.finish] if hasattr(fact, "finish") else []
        return True


class Engines:
    """Give a whole reply to each request."""

    def __init__(self, tokens: np.ndarray) -> None:
        self.tokens, self.asked = tokens, 0

    async def generate(self, _ids: Any, _sampling: Any, *, answer: Answer, watch: Turn, **_options: Any) -> None:
        self.asked += 1
        answer.tokens = np.concatenate([answer.tokens, self.tokens])
        answer.logprobs = np.zeros(len(answer.tokens), np.float32)
        answer.versions = np.zeros(len(answer.tokens), np.int32)
        answer.done, answer.finish = True, "stop"
        watch.on_tokens(len(self.tokens), 0, 0)


async def gone(_text: Any) -> None:
    raise ConnectionResetError("the client is gone")


@pytest.mark.parametrize("by_stop_sequence", [False, True])
async def test_a_reply_that_has_its_end_is_given_again(tmp_path: Path, by_stop_sequence: bool):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))
    known = Conversations(TurnBoundary(tokenizer), most_tokens=1000)
    facts = Facts(TurnLog(known, most_tokens=1000, retry_s=10.0))
    ids = tokenizer.encode("the answer.") if by_stop_sequence else np.append(tokenizer.encode("the answer"), 0)
    if not by_stop_sequence:
        ids[-1] = tokenizer.eos_ids[0]
    engines, sent = Engines(ids.astype(np.int32)), []
    stop = ["."] if by_stop_sequence else []
    request = Request("any", [{"role": "user", "content": "question"}], 50, stop=stop)

    async def send(text: Any) -> None:
        sent.append(text)

    def turn() -> Turn:
        asked = Asked(DIGEST)
        stored = facts.log.retried(asked, 2.0)
        prompt, wording = known.draft(request.messages)(), Wording.of(tokenizer)
        return Turn(request, prompt, wording, GatewaySettings(), asked=asked, stored=stored)

    cut = turn()
    cut.begin(facts, example(KeyAdded), "chat", SESSION, secret="s")
    with pytest.raises(ConnectionResetError):
        await cut.run(Service(engines, Arm()), facts, gone, SafetySettings())
    again = turn()
    again.begin(facts, example(KeyAdded), "chat", SESSION, secret="s")
    ending = await again.run(Service(engines, Arm()), facts, send, SafetySettings())

    assert (again.continues, facts.finishes) == (cut.id, ["gone", "stop"])
    assert engines.asked == 1 and ending.tokens == len(ids)
    assert "".join(sent) == ending.text == "the answer"


async def test_an_engine_reads_the_prompt_while_the_begin_is_stored_and_nothing_is_sent_before(tmp_path: Path):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))
    known = Conversations(TurnBoundary(tokenizer), most_tokens=1000)
    tokens, steps, answered = tokenizer.encode("answer").astype(np.int32), list[str](), asyncio.Event()

    class Slow(Facts):
        async def put(self, fact: Any) -> bool:
            await answered.wait()  # for ever, where the engine is asked only then
            steps.append(type(fact).__name__)
            return await super().put(fact)

    class Noted(Engines):
        async def generate(self, ids: Any, sampling: Any, **options: Any) -> None:
            await super().generate(ids, sampling, **options)
            steps.append("sampled")
            answered.set()

    async def send(_text: Any) -> None:
        steps.append("sent")

    request, wording = Request("any", [{"role": "user", "content": "question"}], 50), Wording.of(tokenizer)
    facts = Slow(TurnLog(known, most_tokens=1000, retry_s=10.0))
    turn = Turn(
        request, known.draft(request.messages)(), wording, GatewaySettings(deadline_s=10.0), asked=Asked(DIGEST)
    )
    turn.begin(facts, example(KeyAdded), "chat", SESSION, secret="s")
    await turn.run(Service(Noted(tokens), Arm()), facts, send, SafetySettings())

    assert steps[:3] == ["sampled", "TurnStarted", "sent"]
    assert steps[-1] == "TurnFinished" and turn.recorded


@pytest.mark.parametrize("cut", [TurnStarted, TurnFinished])
async def test_a_turn_whose_request_is_cancelled_while_a_fact_of_it_is_stored_has_an_end(tmp_path: Path, cut: type):
    tokenizer = TaskTokenizer.load(make_model(tmp_path))
    known = Conversations(TurnBoundary(tokenizer), most_tokens=1000)
    tokens, sent, answered = tokenizer.encode("answer").astype(np.int32), asyncio.Event(), asyncio.Event()

    class Slow(Facts):
        async def put(self, fact: Any) -> bool:
            if isinstance(fact, cut):
                sent.set()
                await answered.wait()
            return await super().put(fact)

    request, wording = Request("any", [{"role": "user", "content": "question"}], 50), Wording.of(tokenizer)
    facts = Slow(TurnLog(known, most_tokens=1000, retry_s=10.0))
    turn = Turn(request, known.draft(request.messages)(), wording, GatewaySettings(), asked=Asked(DIGEST))
    turn.begin(facts, example(KeyAdded), "chat", SESSION, secret="s")
    running = asyncio.create_task(turn.run(Service(Engines(tokens), Arm()), facts, gone, SafetySettings()))
    await sent.wait()
    running.cancel()  # as where another choice of its request fails
    asyncio.get_running_loop().call_soon(answered.set)
    with pytest.raises(asyncio.CancelledError):
        await running

    assert facts.finishes == ["gone"] and turn.recorded


async def test_a_repeat_waits_for_that_end_for_a_time_and_while_its_own_client_is_there():
    leaving, impatient, left = Leaving(3600.0), Leaving(0.0), asyncio.Event()
    turn: Any = SimpleNamespace(id="t", digest=DIGEST, leave=lambda _why: left.set())
    lost, own = asyncio.Future[None](), asyncio.Future[None]()
    with leaving.watched([turn], lost), impatient.watched([turn], lost):
        lost.set_result(None)
        await left.wait()
        await impatient.ended([Asked(DIGEST)], own)
        waits = asyncio.create_task(leaving.ended([Asked(DIGEST)], own))
        await asyncio.sleep(0)
        assert not waits.done()
        own.set_result(None)
        await waits
    with leaving.watched([turn], lost):
        """It ends before it is told that its client is gone."""
    await asyncio.sleep(0)
    assert not leaving._ends
