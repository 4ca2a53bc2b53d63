"""Random programs that work at the endpoint of a trajectory, and a sampler whose ids no tokenizer would choose."""

import asyncio
import json
import random
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.token_buffer import TokenBuffer
from asyncrl.live.apis.chat import ChatCompletions
from asyncrl.live.difference import TurnBoundary
from asyncrl.live.tools import Wording
from asyncrl.live.turn_boundary import AUTO, open_boundary
from harness.history_comparison import HistoryDifferences, compare_histories
from harness.lives import Host, Life
from harness.tokenizers import LLAMA3_SPECIAL, QWEN3, QWEN3_SAID, QWEN3_TOKENS, make_model

CHATML = """
{%- if tools %}{{- '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}
{%- for c in m.tool_calls or [] -%}
{{ '<tool_call>' + ({'name': c.function.name, 'arguments': c.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
LLAMA = """
{{- bos_token }}{% if tools %}{{- '<|start_header_id|>system<|end_header_id|>\n\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}{% set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{ m.content }}{% endif %}{{- '<|eot_id|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""
MISTRAL = """
{{- bos_token }}{%- for m in messages %}{% if m.role == 'assistant' %}{{- m.content + eos_token }}
{%- elif m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
{%- else %}{{- '[INST]' + m.content + '[/INST]' }}{%- endif %}{%- endfor %}"""
SWITCHED = QWEN3 + "{%- if enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
_INST = ("<s>", "</s>", "[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")


class Style(NamedTuple):
    """A way of chat templates."""

    template: str
    end: str
    special: tuple[str, ...]
    said: tuple[str, ...] = ()
    tools: bool = True
    thinks: bool = False


STYLES = {
    "chatml": Style(CHATML, "<|im_end|>", ("<|im_start|>", "<|im_end|>"), ("<tool_call>", "</tool_call>")),
    "llama": Style(LLAMA, "<|eot_id|>", LLAMA3_SPECIAL),
    "qwen": Style(SWITCHED, "<|im_end|>", QWEN3_TOKENS, QWEN3_SAID, thinks=True),
    "mistral": Style(MISTRAL, "</s>", _INST, tools=False),  # no known format of calls
}


def style_tokenizer(folder: Path, style: Style) -> TaskTokenizer:
    make_model(folder, template=style.template, eos=style.end, special=style.special, said=style.said)
    return TaskTokenizer.load(folder)


TOOL = {"type": "function", "function": {"name": "find", "description": "it", "parameters": {"type": "object"}}}
_WORDS = ("What", " is", " the answer", "\n\nto", " this", "?", " é", " {", "<b>", " 12")


class OddHost(Host):
    """Samples replies with thoughts and calls in random pieces; a call that `holds` gets two tokens and no end."""

    def __init__(self, life: Life, tokenizer: TaskTokenizer, style: Style) -> None:
        super().__init__(life.journal)
        self.holds = False
        self.held, self.left = asyncio.Event(), asyncio.Event()
        self._tokenizer, self._style = tokenizer, style

    async def sample(self, ids, answer, limits) -> None:
        dice = random.Random(limits.seed)
        reply = self._reply(dice, self._tokenizer.decode_all(ids.tolist()[-12:]))
        buffer, start = TokenBuffer(answer), len(answer.tokens)
        some = reply[start : start + 2] if self.holds else reply[start:]
        buffer.extend(np.array(some, np.int32), np.full(len(some), -1.0, np.float32), 0)
        self.sampled += len(some)
        if self.holds:
            self.holds = False
            self.held.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.left.set()
        await asyncio.sleep(0)
        answer.done, answer.finish = True, "stop" if reply[-1] in self._tokenizer.eos_ids else "length"

    def _reply(self, dice: random.Random, before: str) -> list[int]:
        style, number = self._style, dice.randrange(10**6)
        text = "What is" + "".join(dice.choices(_WORDS, k=dice.randint(1, 6))) + f" {number}"
        calls = dice.choice((0, 0, 1, 2)) if style.tools else 0
        if calls and style.said:
            call = '<tool_call>{"name": "find", "arguments":%s{"a": %d}}</tool_call>'
            text = dice.choice(("", text)) + "".join(
                call % (dice.choice(("", " ", "  ")), number + one) for one in range(calls)
            )
        elif calls:
            text = f'{{"name": "find", "parameters": {{"a":{dice.choice(("", " "))}{number}}}}}'
        if style.thinks and not before.rstrip().endswith("</think>"):
            text = f"<think>\nThe answer {number}\n</think>\n\n{text}"
        ids = self._pieces(dice, text)
        return ids if dice.random() < 0.1 else [*ids, self._tokenizer.eos_ids[0]]

    def _pieces(self, dice: random.Random, text: str) -> list[int]:
        ids: list[int] = []
        while text:
            size = dice.randint(1, 2)
            piece = next((token for token in self._style.said if text.startswith(token)), text[:size])
            ids += self._tokenizer.encode(piece).tolist()
            text = text[len(piece) :]
        return ids


@lru_cache
def _language(tokenizer: TaskTokenizer) -> tuple[TurnBoundary, Wording]:
    return open_boundary(tokenizer, AUTO), Wording.of(tokenizer)


class Completion(NamedTuple):
    """A reply that a program has got."""

    prompt: list[int]
    reply: list[int]


class Talk:
    """A conversation of a program."""

    def __init__(self, first: list[dict[str, Any]], *, tools: bool) -> None:
        self.messages = first
        self.tools = [TOOL] if tools else []
        self.replies: dict[int, Completion] = {}  # by the number of the message, as long as all before are unchanged

    def branch(self) -> "Talk":
        other = Talk([*self.messages], tools=bool(self.tools))
        other.replies = {**self.replies}
        return other

    def rewrite(self, place: int) -> None:
        """Change the text of a message: replies from there on are known no more."""
        self.messages[place] = {**self.messages[place], "content": f"rewritten {self.messages[place]['content']}"}
        self.replies = {number: reply for number, reply in self.replies.items() if number < place}


class Program:
    """Random calls; each prompt must begin with the ids of the last reply that the program repeats unchanged."""

    def __init__(self, seed: int, tokenizer: TaskTokenizer, style: Style) -> None:
        self.completions: list[Completion] = []
        self.reencoded = 0  # prompts that do not begin with the ids of the recognised history
        self.last = (b"", [0])  # body and ids of the newest prompt of the first conversation
        self.life = Life(tokenizer, most=200)
        self.host = OddHost(self.life, tokenizer, style)
        self.life.context._host = self.host
        self._dice, self._style, self._tokenizer = random.Random(seed), style, tokenizer
        self._number = 0

    async def run(self) -> None:
        await self.life.run(self._work)

    def differences(self) -> HistoryDifferences:
        """Compare the newest prompt of the first conversation with a fresh rendering."""
        body, ids = self.last
        return self.compared(ids, body)

    def compared(self, ids: list[int], body: bytes) -> HistoryDifferences:
        request = ChatCompletions().parse(body)
        boundary, wording = _language(self._tokenizer)
        rendered = boundary.whole(request.messages, request.tools, request.variables)
        return compare_histories(np.array(ids, np.int32), rendered, wording)

    async def _work(self, context) -> None:
        steps = (self._turn, self._turn, self._parallel, self._equal, self._agent, self._compact, self._rewrite)
        async with context.endpoint() as endpoint:
            headers = {"Authorization": f"Bearer {endpoint.api_key}"}
            async with aiohttp.ClientSession(endpoint.base_url + "/", headers=headers) as self._client:
                self._main = self._started()
                await self._turn()
                for _ in range(self._dice.randint(3, 8)):
                    await self._dice.choice((*steps, self._retry, self._leave))()
                await self._turn()

    def _text(self) -> str:
        self._number += 1
        return "".join(self._dice.choices(_WORDS, k=3)) + f" {self._number}"

    def _started(self) -> Talk:
        system = [{"role": "system", "content": self._text()}] if self._dice.random() < 0.5 else []
        return Talk([*system, {"role": "user", "content": self._text()}], tools=self._style.tools)

    def _follow(self, talk: Talk) -> None:
        """Answer the newest reply: the results of its calls, or a user."""
        last = talk.messages[-1]
        if last["role"] != "assistant":
            return
        talk.messages += [
            {"role": "tool", "content": self._text(), "tool_call_id": call["id"]} for call in last.get("tool_calls", ())
        ] or [{"role": "user", "content": self._text()}]

    def _body(self, talk: Talk) -> bytes:
        asked = {"model": "policy", "messages": talk.messages, "return_token_ids": True}
        tools = {"tools": talk.tools} if talk.tools else {}
        effort = {"reasoning_effort": "none"} if self._dice.random() < 0.3 else {}
        return json.dumps({**asked, **tools, **effort}).encode()

    async def _ask(self, talk: Talk, body: bytes = b"") -> None:
        body = body or self._body(talk)
        async with self._client.post("chat/completions", data=body) as response:
            given = await response.json()
        assert response.status == 200, given
        choice = given["choices"][0]
        prompt, reply = given["prompt_token_ids"], choice["token_ids"]
        if talk.replies:
            known = talk.replies[max(talk.replies)]
            ids = [*known.prompt, *known.reply]
            self.reencoded += prompt[: len(ids)] != ids
        if talk is self._main:
            self.last = (body, prompt)
        self.completions.append(Completion(prompt, reply))
        message = {name: value for name, value in choice["message"].items() if value is not None}
        if self._dice.random() < 0.5:
            message.pop("reasoning_content", None)
        talk.messages.append({"content": "", **message})
        talk.replies[len(talk.messages) - 1] = self.completions[-1]

    async def _turn(self) -> None:
        self._follow(self._main)
        await self._ask(self._main)

    async def _parallel(self) -> None:
        """Ask several continuations at once, and go on with one."""
        talks = [self._main.branch() for _ in range(3)]
        for talk in talks:
            self._follow(talk)
        await asyncio.gather(*map(self._ask, talks))
        self._main = self._dice.choice(talks)

    async def _equal(self) -> None:
        """Ask the same twice, and go on with one of the replies."""
        self._follow(self._main)
        body, talks = self._body(self._main), [self._main, self._main.branch()]
        for talk in talks:
            await self._ask(talk, body)
        self._main = self._dice.choice(talks)

    async def _agent(self) -> None:
        """Let a sub-agent work two turns, and tell its result."""
        agent = self._started()
        for _ in range(2):
            self._follow(agent)
            await self._ask(agent)
        self._follow(self._main)
        self._main.messages.append({"role": "user", "content": agent.messages[-1]["content"] + self._text()})
        await self._ask(self._main)

    async def _compact(self) -> None:
        self._main = Talk([{"role": "user", "content": f"Summary: {self._text()}"}], tools=bool(self._main.tools))
        await self._ask(self._main)

    async def _rewrite(self) -> None:
        self._main.rewrite(self._dice.randrange(len(self._main.messages)))
        await self._turn()

    async def _abandon(self, body: bytes) -> None:
        self.host.holds = True
        self.host.held.clear()
        self.host.left.clear()
        asked = asyncio.ensure_future(self._client.post("chat/completions", data=body))
        await self.host.held.wait()
        asked.cancel()
        await self.host.left.wait()

    async def _retry(self) -> None:
        """Leave a call before its answer, and ask the same again."""
        self._follow(self._main)
        body = self._body(self._main)
        await self._abandon(body)
        await self._ask(self._main, body)

    async def _leave(self) -> None:
        """Leave a call before its answer, and ask something else."""
        self._follow(self._main)
        await self._abandon(self._body(self._main))
        self._main.messages.append({"role": "user", "content": self._text()})
        await self._ask(self._main)
