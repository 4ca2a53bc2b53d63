"""Marks of a reply that its gateway sees, and the keeper of sessions decides by."""

from __future__ import annotations

import hashlib
import re

import numpy as np

from asyncrl.config.live_settings import SafetySettings
from asyncrl.rewards.quality import garbage, repetition
from topics.trajectories import Segment
from topics.turns import Mark
from topics.wire import Float32Array, Int32Array


def reply_flags(text: str, tokens: Int32Array, settings: SafetySettings, *, invalid_calls: int) -> list[Mark]:
    """Return the marks of a reply.

    Args:
        text: of the reply, without calls of tools.
        tokens: [T] that were sampled.
        invalid_calls: calls of tools that are none.
    """
    found: list[Mark] = ["invalid call"] if invalid_calls else []
    if settings.question and re.search(settings.question, text, re.IGNORECASE):
        found.append("question")
    if garbage(text) > settings.garbage or repetition([_row(tokens)]) > settings.repetition:
        found.append("garbage")
    return found


def dedup_digest(key: bytes, prompt: Int32Array, reply: Int32Array) -> str:
    """Return what turns with the same prompt and reply under one data key have in common: 16 digits.

    It is in an open header: without the key, a guess cannot be confirmed.

    Args:
        key: [32] the data key of the turn.
    """
    return _digest(key, b"asyncrl same", b"", prompt, reply)


def siblings_of(key: bytes, session: str, prompt: Int32Array, temperature: float) -> str:
    """Digest of a session, a prompt and a temperature, the same for all its samples; else as `dedup_digest`."""
    return _digest(key, b"asyncrl siblings", f"{session} {temperature:.12g}".encode(), prompt)


def _digest(key: bytes, person: bytes, name: bytes, *parts: Int32Array) -> str:
    made = hashlib.blake2b(name, key=key, digest_size=8, person=person)
    for tokens in parts:
        made.update(len(tokens).to_bytes(8, "little"))
        made.update(np.ascontiguousarray(tokens, np.int32).tobytes())
    return made.hexdigest()


def _row(tokens: Int32Array) -> Segment:
    zeros: Float32Array = np.zeros(len(tokens), np.float32)
    return Segment(tokens, np.ones(len(tokens), np.uint8), zeros, np.zeros(len(tokens), np.int32))
