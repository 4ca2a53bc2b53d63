"""The process of `asyncrl.weights.sender`, as an engine actor talks to it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Self, TypeAlias

import msgspec

from asyncrl.errors import AsyncRLError
from asyncrl.framing import pack, read_frames
from asyncrl.process import ChildProcess, python
from asyncrl.weights.sender_calls import Answer, Command

_Channel: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class SenderFailed(AsyncRLError):
    """The process could not do something, or ended."""


class SenderProcess:
    """Does one command after the other."""

    def __init__(self, process: ChildProcess, channel: _Channel) -> None:
        self._process = process
        reader, self._writer = channel
        self._frames = read_frames(reader)

    @classmethod
    async def start(cls, log: Path, environment: Mapping[str, str]) -> Self:
        """Start a sender, and return when its imports are complete.

        Raises:
            SenderFailed: it ended.
        """
        ours, its = socket.socketpair()
        with its:
            command = python("-m", "asyncrl.weights.sender", str(its.fileno()))
            process = await ChildProcess.start(command, log=log, environment=environment, inherits=(its.fileno(),))
        sender = cls(process, await asyncio.open_connection(sock=ours))
        try:
            await sender._answer()
        except BaseException:
            sender.kill()
            raise
        return sender

    async def call(self, command: Command) -> Answer:
        """Let it do something.

        Raises:
            SenderFailed: it could not, or ended.
        """
        self._writer.write(pack(command))
        return await self._answer()

    async def _answer(self) -> Answer:
        async for frame in self._frames:
            answer = msgspec.msgpack.decode(frame, type=Answer)
            if answer.error:
                raise SenderFailed(f"sender: {answer.error}")
            return answer
        raise SenderFailed(f"the sender ended: {self._process.last_lines}")

    def kill(self) -> None:
        """End it in any state."""
        self._process.kill()
        self._writer.close()
