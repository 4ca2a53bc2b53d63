"""Files that a host without the run's directory is sent: login of one role, its keys, model, the user's files."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash

from asyncrl.bus.address import BusAddress
from asyncrl.config.settings import Config
from asyncrl.own_code import CODE, INPUTS
from asyncrl.run.directory import RunFiles

_CHUNK = 32 << 20  # bytes of a model in one call
USES_MODEL = ("engine", "rollout")  # roles that sample: they have the key of inference servers, too
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
_SECRETS = ("nkey_file", "tls_cert", "tls_key")  # files that a login names


class Parcel(NamedTuple):
    """The files that go with the start of a process on another host."""

    config: Config
    run: RunFiles
    home: Path  # folder on that host
    here: str  # IP address of this machine as seen by that host; "" on the same machine

    def files(self, role: str, credentials: Path) -> dict[str, bytes]:
        """Return the content of each file by its path below the folder on the host.

        Args:
            credentials: login of the role.

        Raises:
            OSError, DamagedFile: one is not there.
        """
        found = dict(self._login(credentials))
        if self.config.placement.shared:
            return found
        if role in USES_MODEL:
            found[self.run.own_engine_key.name] = self.run.own_engine_key.read_bytes()
        if (self.run.root / INPUTS).exists():
            found[INPUTS] = (self.run.root / INPUTS).read_bytes()
            copies = [path for path in (self.run.root / CODE).rglob("*") if path.is_file()]
            found |= {str(path.relative_to(self.run.root)): path.read_bytes() for path in copies}
        for path in user_files(self.config.placement.files, self.run.base):
            found[f"base/{path.relative_to(self.run.base)}"] = path.read_bytes()
        return found

    def login_name(self, credentials: Path) -> str:
        """Return the path of a login below the folder on the host."""
        return f"credentials/{credentials.name}"

    def _login(self, credentials: Path) -> Iterator[tuple[str, bytes]]:
        login = BusAddress.read(credentials)
        changes: dict[str, Any] = {"url": ",".join(self._reached(url) for url in login.url.split(","))}
        for field in _SECRETS:
            if name := getattr(login, field):
                kept = f"credentials/{credentials.stem}.{field}"
                yield kept, Path(name).read_bytes()
                changes[field] = str(self.home / kept)
        if login.tls_ca and "\n" not in login.tls_ca:
            changes["tls_ca"] = Path(login.tls_ca).read_text(encoding="utf-8")
        yield self.login_name(credentials), msgspec.json.encode(msgspec.structs.replace(login, **changes))

    def _reached(self, url: str) -> str:
        """A server that listens on all addresses of this machine is known here by its loopback address."""
        scheme, _, rest = url.partition("://")
        host, _, port = rest.rpartition(":")
        return f"{scheme}://{self.here}:{port}" if self.here and is_here(host) else url


def is_here(host: str) -> bool:
    """Return whether a host of a URL is this machine's loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def user_files(names: Sequence[str], base: Path) -> list[Path]:
    """Return the files of these names (`placement.files`), those of its folders with them.

    Raises:
        FileNotFoundError: one is not there.
    """
    found = []
    for name in names:
        path = base / name
        if not path.exists():
            raise FileNotFoundError(f"{path} is not there")
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        found += [file for file in inside if file.is_file() and "__pycache__" not in file.parts]
    return found


async def send_model(call: Callable[..., Awaitable[Any]], model: Path, *, whole: bool) -> None:
    """Send a model directory to a host, unless it has it: pieces of 32 MiB, each taken before the next one is read.

    Args:
        call: calls a method of the host.
        whole: with its weights; else what a tokenizer needs.
    """
    files, name = await asyncio.to_thread(_listed, model, whole)
    if await call("has_model", name):
        return
    copy = f"{name}-{secrets.token_hex(4)}"
    for path in files:
        with path.open("rb") as file:
            await call("write", copy, path.name, b"")  # an empty file is one, too
            while content := await asyncio.to_thread(file.read, _CHUNK):
                await call("write", copy, path.name, content)
    await call("finish_model", copy, name)


def _listed(model: Path, whole: bool) -> tuple[list[Path], str]:
    """Return the files of a model, and a name that changes with any of them."""
    files = [path for path in sorted(model.iterdir()) if path.is_file() and (whole or path.suffix not in _WEIGHTS)]
    seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return files, xxhash.xxh3_128_hexdigest(msgspec.json.encode([str(model.absolute()), seen]))
