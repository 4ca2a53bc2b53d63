"""Simulated users who like a first sentence of at most `LIKED` words; their next message says how they liked the reply.

The users know only what a client knows: the gateway's address and a key. They use no language model.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp

from asyncrl import Context, Role

ROLE = Role("users", "service", stops=1)
TOPICS: list[Any] = []

LIKED = 7
TURNS = 4  # of a conversation
ASKED = ("bread", "cheese", "rain", "snow", "trains", "ships", "cats", "roses", "oaks", "copper", "chess", "maps")
FORMS = ("What do you know about {}?", "Tell me about {}.", "Why do people like {}?", "Describe {}.")


def rows(seed: int, users: int) -> list[dict[str, str]]:
    """Return one row: every task has rows, and this run trains live turns only."""
    return [{"prompt": f"{users} users, seed {seed}", "label": ""}]


def judge(evidence: str) -> int:
    """Return the users' opinion of a reply."""
    return 1 if "Thanks!" in evidence else -1 if "Too long." in evidence else 0


async def main(context: Context) -> None:
    """Hold conversations until the run stops."""
    settings, options = context.config.gateway, context.config.task.options
    key = (context.files.keys / "users").read_text(encoding="utf-8").strip()
    address = f"http://{settings.host}:{settings.port}"
    async with aiohttp.ClientSession(address, headers={"Authorization": f"Bearer {key}"}) as http:
        talks = [context.tasks.start(talk(http, number, context.config.seed)) for number in range(options["users"])]
        await context.stop.wait()
        for task in talks:
            task.cancel()


async def talk(http: aiohttp.ClientSession, number: int, seed: int) -> None:
    """Be one user."""
    draw = random.Random(f"{seed}-{number}")
    while True:
        messages: list[dict[str, str]] = []
        opinion = ""
        for _ in range(TURNS):
            question = draw.choice(FORMS).format(draw.choice(ASKED))
            messages.append({"role": "user", "content": f"{opinion} {question}".strip()})
            reply = await ask(http, messages)
            messages.append({"role": "assistant", "content": reply})
            opinion = "Thanks!" if is_short(reply) else "Too long."
            await asyncio.sleep(draw.uniform(0.2, 1.0))


def is_short(reply: str) -> bool:
    """Return whether the first sentence ends within `LIKED` words."""
    sentence, end, _ = reply.partition(".")
    return bool(end) and 0 < len(sentence.split()) <= LIKED


async def ask(http: aiohttp.ClientSession, messages: list[dict[str, str]]) -> str:
    """Return the reply; until the gateway is ready, ask again."""
    while True:
        try:
            async with http.post("/v1/chat/completions", json={"model": "any", "messages": messages}) as response:
                if response.status == 200:
                    return str((await response.json())["choices"][0]["message"]["content"])
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
