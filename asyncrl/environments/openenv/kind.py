"""Environments of kind `openenv`: a server with the WebSocket protocol of OpenEnv 0.10, which has many sessions.

A session sends `{"type": "reset", "data": {"seed": ...}}` and `{"type": "step", "data": {"message": ...}}`. The server
answers `{"type": "observation", "data": {"observation": {...}, "reward": ..., "done": ...}}`, or an error.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec

from asyncrl.addresses import is_address
from asyncrl.environments.problems import ProblemRows
from asyncrl.environments.protocol import DataError, Environment, EnvironmentKind, Observation, Problem, Step
from asyncrl.errors import EnvironmentFault
from asyncrl.tracing import trace_headers, traceparent

_ANSWER_BYTES = 1 << 22


class OpenEnvOptions(msgspec.Struct, forbid_unknown_fields=True):
    """Options of `openenv`."""

    action: str = "message"  # field of an action that the reply becomes
    observation: str = ""  # field of an observation that is its text; empty: all fields, as JSON
    chat: bool = False  # whether observations are messages of a user
    limit_s: Annotated[float, msgspec.Meta(gt=0)] = 60.0  # seconds for one answer of the server
    reset: dict[str, Any] = {}  # further arguments of a reset


class _Data(msgspec.Struct):
    observation: dict[str, Any] = {}
    reward: float | None = None
    done: bool = False
    message: str = ""  # of an error


class _Answer(msgspec.Struct):
    type: str
    data: _Data


class OpenEnvEpisode:
    """A session of a server. See `asyncrl.environments.protocol.Episode`."""

    def __init__(self, address: str, options: OpenEnvOptions, seed: int) -> None:
        self.tools: list[dict[str, Any]] = []
        self._address, self._options, self._seed = address, options, seed
        self._session: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def reset(self) -> Observation:
        await self.close()
        self._session = aiohttp.ClientSession(headers=trace_headers(traceparent()))
        url = f"{self._address.rstrip('/')}/ws"
        try:
            async with asyncio.timeout(self._options.limit_s):
                self._socket = await self._session.ws_connect(url, max_msg_size=_ANSWER_BYTES)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._fault(f"cannot be reached: {error or 'no answer in time'}") from error
        return self._text((await self._ask("reset", {"seed": self._seed, **self._options.reset})).observation)

    async def step(self, reply: str) -> Step:
        found = await self._ask("step", {self._options.action: reply})
        return Step(self._text(found.observation), found.reward or 0.0, found.done)

    async def close(self) -> None:
        session, self._session, self._socket = self._session, None, None
        if session is not None:
            await session.close()

    async def _ask(self, what: str, data: dict[str, Any]) -> _Data:
        if self._socket is None:
            raise self._fault(f"has no session for a {what}")
        try:
            async with asyncio.timeout(self._options.limit_s):
                await self._socket.send_str(msgspec.json.encode({"type": what, "data": data}).decode())
                answer = msgspec.json.decode(await self._socket.receive_str(), type=_Answer)
        except TimeoutError:
            raise self._fault(f"gave no answer to a {what} within limit_s = {self._options.limit_s:g}") from None
        except (aiohttp.ClientError, OSError, TypeError) as error:  # TypeError: the server closed the session
            raise self._fault(f"ended the session at a {what}: {error}") from error
        except msgspec.MsgspecError as error:
            raise self._fault(f"answered a {what} in another form: {error}") from error
        if answer.type != "observation":
            raise self._fault(f"refused a {what}: {answer.data.message or answer.type}")
        return answer.data

    def _text(self, fields: dict[str, Any]) -> Observation:
        name = self._options.observation
        if name and name not in fields:
            raise self._fault(f"sent an observation with {', '.join(fields)}; the option observation names {name!r}")
        found = fields[name] if name else {key: value for key, value in fields.items() if key != "metadata"}
        text = found if isinstance(found, str) else msgspec.json.encode(found).decode()
        return [{"role": "user", "content": text}] if self._options.chat else text

    def _fault(self, words: str) -> EnvironmentFault:
        return EnvironmentFault(f"the environment server {self._address} {words}")


class _Kind(EnvironmentKind):
    """See `asyncrl.environments.protocol.EnvironmentKind`."""

    def make(self, name: str, parameters: dict[str, Any], seed: int, base: Path) -> Environment:
        problem = Problem("openenv", name, seed, parameters)
        self.episode(problem, base)
        return ProblemRows(self, problem, base)

    def episode(self, problem: Problem, base: Path) -> OpenEnvEpisode:
        name = problem.name
        if not is_address(name, "http", "https"):
            raise DataError(f"openenv:{name}: expected the address of a server, such as openenv:http://127.0.0.1:8000")
        try:
            options = msgspec.convert(problem.parameters, OpenEnvOptions)
        except msgspec.ValidationError as error:
            known = ", ".join(OpenEnvOptions.__struct_fields__)
            raise DataError(f"openenv:{name}: {error}; its options are {known}") from error
        return OpenEnvEpisode(name, options, problem.seed)


KIND = _Kind()
