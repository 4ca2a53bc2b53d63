"""Sandboxes of services whose SDKs run a shell command and write a file: all else is built on these two.

Output comes when a program has ended, and programs cannot reach the worker.
"""

from __future__ import annotations

import base64
import binascii
import itertools
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Protocol

from asyncrl.config.finding import Finding
from asyncrl.config.sandbox_settings import PATH, SandboxCapability, SandboxSettings
from asyncrl.sandboxes.remote import RemoteKind, UnreachableWorker, check_path
from asyncrl.sandboxes.sandbox import ExecResult, FileRefused, Limit, OnOutput, Sandbox, SandboxError

_WORKSPACE, _OWN = "/tmp/workspace", "/tmp/.asyncrl"
_MB = 1_000_000
_CALL_S = 60.0
_TIMED_OUT = (124, 137)  # exit codes of `timeout`
_SIGNAL = 128  # a shell adds it to the number of a signal
_RUN = """mkdir -p {own} && cd {workspace} || exit 1
touch {own}/in.{n}
program() {{ timeout -k 1 {wall_s} env -i {words} <{own}/in.{n}; echo $? >{own}/code.{n}; }}
{{ program 2>&3 | head -c {most} >{own}/out.{n}; }} 3>&1 | head -c {most} >{own}/err.{n}
cat {own}/code.{n}; echo .; base64 {own}/out.{n}; echo .; base64 {own}/err.{n}; rm -f {own}/*.{n}"""
_INSIDE = """cd {workspace} || exit 1
top=$(pwd -P); {make}
[ "$(cd -P -- {folder} 2>/dev/null && pwd)" = "$top"{below} ] || {{ echo refused its folder is a link; exit; }}
"""
_PUT = """{{ [ ! -d {path} ] || [ -L {path} ]; }} && rm -f -- {path} && mv -- {given} {path} &&
chmod {mode} {path} && echo done || echo refused it is a folder"""
_GET = """[ -f {path} ] && [ ! -L {path} ] || {{ echo refused it is no regular file; exit; }}
[ "$(wc -c <{path})" -le {most} ] || {{ echo refused expected at most {most} bytes; exit; }}
echo done; base64 {path}"""


class Service(Protocol):
    """A sandbox of a service, through its SDK. Any exception is a fault of the sandbox."""

    async def run(self, command: str, limit_s: float) -> str:
        """Run a shell command; returns its standard output."""

    async def write(self, path: str, data: bytes) -> None:
        """Write a file at an absolute path."""

    async def close(self) -> None:
        """End the sandbox."""


class ShellKind(RemoteKind):
    """A kind of a service."""

    def __init__(self, package: str, variables: Sequence[str]) -> None:
        """
        Args:
            package: the SDK.
            variables: of the environment, by which the SDK finds its keys.
        """
        self._package, self._variables = package, variables

    async def create(self, settings: SandboxSettings) -> Service:
        """Open a sandbox."""
        raise NotImplementedError

    def has_keys(self) -> bool:
        """Return whether the SDK finds its keys."""
        return all(os.environ.get(name) for name in self._variables)

    def checks(self, settings: SandboxSettings) -> Iterator[Finding]:
        if settings.readable:
            yield Finding(
                ("sandbox.readable",), f'has no effect with kind = "{settings.kind}": put files into its image'
            )

    def problem(self, settings: SandboxSettings) -> str:
        if find_spec(self._package) is None:
            return f'the package {self._package} is not installed: pip install "asyncrl[{self._package}]"'
        return "" if self.has_keys() else f"the environment has no {' and '.join(self._variables)}"

    def capabilities(self) -> frozenset[SandboxCapability]:
        """Return the guarantees of a service: the limits are those of the image."""
        absent = {SandboxCapability.REACHES_WORKER, SandboxCapability.LINKS, SandboxCapability.IMAGES}
        return frozenset(SandboxCapability) - absent

    def sandbox(self, settings: SandboxSettings) -> Sandbox:
        return ShellSandbox(self, settings)


class ShellSandbox(UnreachableWorker):
    """See `asyncrl.sandboxes.sandbox.Sandbox`."""

    def __init__(self, kind: ShellKind, settings: SandboxSettings) -> None:
        self.capabilities = kind.capabilities()
        self._kind, self._settings = kind, settings
        self._service: Service | None = None
        self._numbers = itertools.count()
        self._fault = "is not started"

    async def start(self) -> None:
        try:
            self._service = await self._kind.create(self._settings)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise SandboxError(f"a sandbox of kind {self._settings.kind} does not start: {reason[:500]}") from error
        self._fault = ""
        try:
            await self._run(f"mkdir -p {_WORKSPACE} {_OWN}", _CALL_S)
        except BaseException:
            await self.destroy()
            raise

    async def _run(self, command: str, limit_s: float) -> str:
        if self._service is None or self._fault:
            raise SandboxError(f"the sandbox {self._fault}")
        try:
            return await self._service.run(command, limit_s)
        except Exception as error:
            raise SandboxError(f"the sandbox {self._fault or f'failed: {type(error).__name__}: {error}'}") from error

    async def _write(self, path: str, data: bytes) -> None:
        if self._service is None or self._fault:
            raise SandboxError(f"the sandbox {self._fault}")
        try:
            await self._service.write(path, data)
        except Exception as error:
            raise SandboxError(f"the sandbox {self._fault or f'failed: {type(error).__name__}: {error}'}") from error

    async def exec(
        self,
        command: Sequence[str],
        *,
        on_output: OnOutput,
        stdin: bytes = b"",
        environment: Mapping[str, str] | None = None,
        wall_s: float | None = None,
    ) -> ExecResult:
        number, most = next(self._numbers), self._settings.output_mb * _MB
        limit_s = self._settings.wall_s if wall_s is None else wall_s
        if stdin:
            await self._write(f"{_OWN}/in.{number}", stdin)
        variables = {"PATH": PATH, "HOME": _WORKSPACE, **(environment or {})}
        words = shlex.join([*(f"{name}={value}" for name, value in variables.items()), *command])
        began = time.monotonic()
        given = await self._run(
            _RUN.format(own=_OWN, workspace=_WORKSPACE, n=number, wall_s=limit_s, words=words, most=most + 1),
            limit_s + _CALL_S,
        )
        took_s = time.monotonic() - began
        code, limit, left = _code_of(given), "", most
        for stream, text in zip(("stdout", "stderr"), given.split(".\n")[1:], strict=True):
            data = base64.b64decode(text)
            if data[:left]:
                on_output(stream, data[:left])  # type: ignore[arg-type]
            limit = "output_mb" if len(data) > left else limit
            left -= len(data[:left])
        if code in _TIMED_OUT and took_s >= limit_s:
            return ExecResult(-9, "wall_s")
        return ExecResult(_SIGNAL - code if code > _SIGNAL else code, _limit(limit))

    async def put(self, path: str, data: bytes, *, executable: bool = False) -> None:
        check_path(path)
        given = f"{_OWN}/put.{next(self._numbers)}"
        await self._write(given, data)
        mode = "755" if executable else "644"
        await self._refusing(path, _PUT.format(path=_quoted(path), given=given, mode=mode), made=True)

    async def get(self, path: str, *, most_bytes: int) -> bytes:
        check_path(path)
        given = await self._refusing(path, _GET.format(path=_quoted(path), most=most_bytes))
        try:
            return base64.b64decode(given)
        except binascii.Error as error:
            raise SandboxError(f"the sandbox gave {path!r} only in part") from error

    async def _refusing(self, path: str, command: str, *, made: bool = False) -> str:
        folder, _, _ = path.rpartition("/")
        make = f"mkdir -p -- {_quoted(folder)} 2>/dev/null" if made and folder else ":"
        inside = _INSIDE.format(
            workspace=_WORKSPACE, make=make, folder=_quoted(folder) if folder else ".", below=_below(folder)
        )
        word, _, rest = (await self._run(inside + command, _CALL_S)).partition("\n")
        if word.startswith("refused"):
            raise FileRefused(f"{path!r} in a sandbox is refused: {word.removeprefix('refused ')}")
        return rest

    async def destroy(self) -> None:
        self._fault = "was destroyed"
        if self._service is not None:
            try:
                await self._service.close()
            except Exception as error:
                raise SandboxError(f"a sandbox of kind {self._settings.kind} does not end: {error}") from error
            self._service = None


def _quoted(path: str) -> str:
    return shlex.quote(f"./{path}")


def _below(folder: str) -> str:
    return f"/{shlex.quote(folder)}" if folder else ""


def _code_of(given: str) -> int:
    word = given.partition("\n")[0].strip()
    if not word.isdigit():
        raise SandboxError(f"the sandbox gave no exit code: {given[:200]!r}")
    return int(word)


def _limit(text: str) -> Limit:
    return "output_mb" if text else ""
