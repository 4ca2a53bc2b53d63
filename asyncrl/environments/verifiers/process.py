"""The process that has verifiers, as asyncrl uses it: requests and replies are lines of JSON."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import threading
from concurrent.futures import Future
from concurrent.futures import TimeoutError as LateError
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.environments.protocol import DataError
from asyncrl.environments.verifiers import worker
from asyncrl.errors import EnvironmentFault

VERSION = "0.4.0"
"""The version of verifiers whose interfaces the process uses."""

_LAST_LINES = 6
_starting = threading.Lock()


class VerifiersOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of `verifiers`."""

    python: str  # a Python that has verifiers, such as /opt/verifiers/bin/python
    folder: str = "."  # in which the process runs; a module there may be the taskset
    taskset: dict[str, Any] = {}  # further settings of the taskset
    harness: dict[str, Any] = msgspec.field(
        default_factory=lambda: {"id": "null"}
    )  # with `task.rollout = "environment"`
    runtime: str = "subprocess"
    start_limit_s: float = 300.0  # seconds in which the process loads the taskset
    limit_s: float = 600.0  # seconds of an episode, without those in which it waits for the policy


class _Reply(msgspec.Struct):
    number: int
    value: Any = None
    fault: str = ""


class Process:
    """A running process, for many requests at once."""

    def __init__(self, name: str, options: VerifiersOptions) -> None:
        """
        Raises:
            DataError: verifiers or the taskset cannot be loaded.
        """
        self._name, self._fault = name, ""
        self._numbers = itertools.count(1)
        self._asked: dict[int, Future[Any]] = {0: Future()}
        self._lock = threading.Lock()
        if not Path(options.folder).is_dir():
            raise DataError(f"verifiers:{name}: the option folder names no folder: {options.folder}")
        try:
            self._process = subprocess.Popen(
                [options.python, worker.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=options.folder,
                env={**os.environ, "PYTHONPATH": ""},
            )
        except OSError as error:
            raise DataError(
                f"verifiers:{name}: the option python = {options.python!r} cannot start: {error}"
            ) from error
        self._errors: list[str] = []
        for target in (self._read_errors, self._read):
            threading.Thread(target=target, daemon=True).start()
        self._send({"taskset": {"id": name, **options.taskset}, "harness": options.harness, "runtime": options.runtime})
        try:
            self.count: int | None = self._asked[0].result(options.start_limit_s)["count"]
        except LateError:
            self._process.kill()
            limit = f"start_limit_s = {options.start_limit_s:g}"
            raise DataError(f"verifiers:{name} was not loaded within the option {limit}; raise it") from None
        except EnvironmentFault as error:
            raise DataError(self._advice(str(error), options)) from error

    def _advice(self, fault: str, options: VerifiersOptions) -> str:
        if "No module named 'verifiers" in fault:
            install = f"{options.python} -m pip install verifiers=={VERSION}"
            return f"verifiers:{self._name}: {options.python} has no package verifiers; install it: {install}"
        return fault

    @property
    def alive(self) -> bool:
        """Return whether it can take requests."""
        return not self._fault

    def ask(self, what: str, *arguments: Any, limit_s: float | None = None) -> Any:
        """Return the reply to a request.

        Raises:
            EnvironmentFault: the request failed, the process ended, or it took too long.
        """
        number, future = self._begin(what, arguments)
        try:
            return future.result(limit_s)
        except LateError:
            self._send({"what": "cancel", "number": number})
            raise EnvironmentFault(f"verifiers:{self._name}: no reply to {what!r} within {limit_s:g} s") from None

    async def ask_async(self, what: str, *arguments: Any) -> Any:
        """Return the reply to a request, which ends when this call is cancelled.

        Raises:
            EnvironmentFault: the request failed, or the process ended.
        """
        number, future = self._begin(what, arguments)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            self._send({"what": "cancel", "number": number})
            raise

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()

    def _begin(self, what: str, arguments: tuple[Any, ...]) -> tuple[int, Future[Any]]:
        future: Future[Any] = Future()
        with self._lock:
            number = next(self._numbers)
            if self._fault:
                raise EnvironmentFault(self._fault)
            self._asked[number] = future
        self._send({"what": what, "arguments": arguments, "number": number})
        return number, future

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with self._lock:
            try:
                self._process.stdin.write(msgspec.json.encode(message) + b"\n")
                self._process.stdin.flush()
            except OSError:
                return  # the reader sees the end of the process

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._errors = [*self._errors, line.decode(errors="replace").rstrip()][-_LAST_LINES:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            reply = msgspec.json.decode(line, type=_Reply)
            with self._lock:
                future = self._asked.pop(reply.number, None)
            if future is None or not future.set_running_or_notify_cancel():
                continue
            if reply.fault:
                future.set_exception(EnvironmentFault(f"verifiers:{self._name}: {reply.fault}"))
            else:
                future.set_result(reply.value)
        code = self._process.wait()
        with self._lock:
            words = " | ".join(self._errors)
            self._fault = f"verifiers:{self._name}: its process ended with exit code {code}: {words}"
            left, self._asked = self._asked, {}
        for future in left.values():
            if future.set_running_or_notify_cancel():
                future.set_exception(EnvironmentFault(self._fault))


@cache
def _processes() -> dict[tuple[str, bytes], Process]:
    return {}


def process_of(name: str, options: VerifiersOptions) -> Process:
    """Return the process of a taskset, one for all users in this process; a dead one is replaced.

    Raises:
        DataError: verifiers or the taskset cannot be loaded.
    """
    key, known = (name, msgspec.json.encode(options)), _processes()
    with _starting:  # many trajectories begin at the same time, each in a thread
        if key not in known or not known[key].alive:
            known[key] = Process(name, options)
        return known[key]


def close_processes() -> None:
    """End all processes that `process_of` has started; they also end with this process."""
    while _processes():
        _processes().popitem()[1].close()


def read_options(name: str, parameters: dict[str, Any], base: Path) -> VerifiersOptions:
    """Read the options of a task, with a folder from `base`.

    Raises:
        DataError: one of them is unknown or absent.
    """
    try:
        options = msgspec.convert(parameters, VerifiersOptions)
    except msgspec.ValidationError as error:
        known = ", ".join(VerifiersOptions.__struct_fields__)
        raise DataError(f"verifiers:{name}: {error}; its options are {known}") from error
    python = os.path.expanduser(options.python)
    python = str(base / python) if "/" in python else python
    return msgspec.structs.replace(options, python=python, folder=str((base / options.folder).absolute()))
