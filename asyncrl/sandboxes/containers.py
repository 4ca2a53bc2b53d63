"""Sandboxes that are containers of an image, through the command line of podman or docker.

The first process of a container is the one of every sandbox of this machine: the image needs a Python of at least 3.9.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from asyncrl.config.finding import Finding
from asyncrl.config.sandbox_settings import Launch, SandboxCapability, SandboxKind, SandboxSettings
from asyncrl.sandboxes import container_start, image_links, server
from asyncrl.sandboxes.leftovers import is_left, name_of_mine
from asyncrl.sandboxes.seccomp import filter_program, has_filter

_MB = 1_000_000
# No image has this folder: runc gives a file system in memory the mode and owner of a folder that is there.
_WORKSPACE, _FOLDER = "/sandbox-workspace", "/run/asyncrl"
_KEPT = "/.asyncrl-files"  # of an image with links
_LABEL = "asyncrl.sandbox"
_TRIED_S, _MADE_S = 60.0, 600.0
_making = threading.Lock()
_VARIABLES = ("HOME", "PATH", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "CONTAINERS_CONF")
_ALONE = (
    *(
        "--rm",
        "--pull=never",
        "--network",
        "none",
        "--read-only",
        "--cap-drop",
        "ALL",
        "--security-opt",
        "no-new-privileges",
    ),
    *("--user", "1000:1000", "--hostname", "sandbox", "--ipc", "private"),
)


class Containers(SandboxKind):
    """A sandbox in a container."""

    def __init__(self, program: str, *options: str, weak: tuple[str, str] = ("", "")) -> None:
        """
        Args:
            program: that starts containers.
            options: of its command `run`.
            weak: a template of its command `info`, and the text that it gives where containers have no limits.
        """
        self._program, self._options, self._weak = program, options, weak

    def checks(self, settings: SandboxSettings) -> Iterator[Finding]:
        if not settings.image:
            yield Finding(("sandbox.image",), f'is empty; kind = "{self._program}" needs an image with Python')
        for path in settings.readable:
            if not Path(path).is_absolute():
                message = f'found "{path}", expected absolute paths: programs find the files at the same paths'
                yield Finding(("sandbox.readable",), message)

    def problem(self, settings: SandboxSettings) -> str:
        return _fault_of(self._program, settings.image, (*self._options, *_mounts(settings.readable)))

    def capabilities(self) -> frozenset[SandboxCapability]:
        limits = {SandboxCapability.SHARED_MEMORY_LIMIT, SandboxCapability.PROCESS_LIMIT, SandboxCapability.CORE_LIMIT}
        return frozenset(SandboxCapability) - (limits if _is_weak(self._program, self._weak) else set())

    def prepare(self, settings: SandboxSettings) -> str:
        fault = self.problem(settings)
        if fault:
            _fault_of.cache_clear()  # the image may be pulled before the next try
        elif settings.links:
            try:
                self._image(settings)
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"the image {settings.image} gets no links: {error}"
        return fault

    def _image(self, settings: SandboxSettings) -> str:
        if not settings.links:
            return settings.image
        with _making:
            options = (*self._options, *_mounts(settings.readable))
            return _linked(self._program, options, settings.image, json.dumps(settings.links, sort_keys=True))

    def launch(self, settings: SandboxSettings) -> Launch:
        name = name_of_mine()
        folder = Path(tempfile.gettempdir()).resolve() / name
        folder.mkdir()
        folder.chmod(0o711)  # the user of the container enters it, and lists nothing
        file = f"{secrets.token_hex(16)}"
        disk = settings.disk_mb * _MB
        memory = f"{settings.memory_mb * _MB + 2 * disk}b"
        mounted = f"rw,exec,nosuid,nodev,mode=1777,size={disk}"
        limits = [
            *("--memory", memory, "--memory-swap", memory, "--pids-limit", str(settings.processes + 1)),
            *("--cpus", str(settings.cores), "--tmpfs", f"{_WORKSPACE}:{mounted}", "--tmpfs", f"/tmp:{mounted}"),
            *("--name", name, "--label", _LABEL, "--workdir", _WORKSPACE, "--entrypoint", "python3"),
        ]
        files = ["-v", f"{folder}:{_FOLDER}", "-v", f"{server.__file__}:/run/asyncrl-server.py:ro"]
        served = ["-I", "-S", "/run/asyncrl-server.py", _WORKSPACE, f"socket={_FOLDER}/{file}"]
        served += [f"filter={filter_program().hex()}", f"DATA={settings.memory_mb * _MB}", f"FSIZE={disk}"]
        run = [self._program, "run", *_ALONE, *self._options, *limits, *files, *_mounts(settings.readable)]
        starts = [sys.executable, "-I", "-S", container_start.__file__, str(folder / file)]
        command = [*_environment(), *starts, *run, self._image(settings), *served]
        return Launch(command, _WORKSPACE, grouped=False, content=_KEPT if settings.links else "")

    def end_leftovers(self) -> list[str]:
        """Remove containers of workers that were killed; returns their names."""
        listed = _run([self._program, "ps", "--all", "--filter", f"label={_LABEL}", "--format", "{{.Names}}"])
        names = [name for name in listed.stdout.split() if is_left(name)]
        if names:
            _run([self._program, "rm", "--force", *names])
        return names


@cache
def _linked(program: str, options: Sequence[str], image: str, links: str) -> str:
    """Return the name of an image with links, which is made unless it exists. Its layers are those of `image`.

    Raises:
        OSError: it cannot be made.
    """
    known = _checked([program, "image", "inspect", "--format", "{{.Id}}", image]).strip()
    name = f"asyncrl-links:{hashlib.sha256(f'{known} {links}'.encode()).hexdigest()[:16]}"
    if not _run([program, "image", "inspect", name]).returncode:
        return name
    made = name_of_mine()
    alone = ["--pull=never", "--network", "none", "--user", "0:0", "--name", made, "--label", _LABEL]
    script = ["-v", f"{image_links.__file__}:/run/asyncrl-links.py:ro", "--entrypoint", "python3", image]
    try:
        _checked(
            [program, "run", *alone, *options, *script, "-I", "-S", "/run/asyncrl-links.py", _WORKSPACE, _KEPT, links]
        )
        _checked([program, "commit", made, name])
    finally:
        _run([program, "rm", "--force", made])
    return name


def _checked(command: Sequence[str]) -> str:
    """
    Raises:
        OSError: the command failed.
    """
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_MADE_S)
    if done.returncode:
        raise OSError(_last(done))
    return done.stdout


def _mounts(readable: Sequence[str]) -> list[str]:
    return [word for path in readable for word in ("-v", f"{path}:{path}:ro")]


def _environment() -> list[str]:
    """Return the words before a command that gives the variables by which the program finds its service."""
    return ["env", *(f"{name}={os.environ[name]}" for name in _VARIABLES if name in os.environ)]


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TRIED_S)


@cache
def _is_weak(program: str, weak: tuple[str, str]) -> bool:
    template, text = weak
    return bool(template) and _run([program, "info", "--format", template]).stdout.strip() == text


@cache
def _fault_of(program: str, image: str, options: Sequence[str]) -> str:
    """Return why no container of an image starts here; empty if one does."""
    if shutil.which(program) is None:
        return f"there is no program `{program}` (Debian and Ubuntu: apt-get install podman; docker.com for Docker)"
    if not has_filter():
        return "there is no filter of system calls for this processor"
    try:
        served = _run([program, "version"])
        if served.returncode:
            return f"{program} does not work: {_last(served)}"
        if _run([program, "image", "inspect", image]).returncode:
            return f'the image "{image}" is not on this machine; run: {program} pull {image}'
        tried = _run([program, "run", *_ALONE, *options, "--entrypoint", "python3", image, "-I", "-S", "-c", ""])
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{program} does not work: {error}"
    return f"a container of {image} does not start Python: {_last(tried)}" if tried.returncode else ""


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr or done.stdout).strip()[-300:] or f"exit code {done.returncode}"
