"""Versions of weights as directories of this host: those in a shared folder, and those that have to be fetched first.

Fetched versions are shared by all engines of a host. An engine holds a lock on the directory that it uses, which ends
with its process; one that no process holds may be removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from actors.engine.lora_base import Adapting
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.config.weights_settings import STORES, store_kind
from asyncrl.host import boot_id
from asyncrl.locks import lock, lock_folder, try_lock
from asyncrl.run.directory import RunFiles
from asyncrl.weights.delta import DeltaRecord, apply_delta
from asyncrl.weights.directories import CheckpointError, remove_directory, version_name, written_aside
from asyncrl.weights.store import StorePlace
from asyncrl.weights.verify import TornVersion, check_version
from topics.weights import WEIGHTS_STORED, WeightsPublished
from topics.wire import WireError


class Fetcher:
    """The versions that one engine asks for."""

    def __init__(self, bus: Bus, files: RunFiles, adapting: Adapting | None = None) -> None:
        """
        Args:
            bus: of the run.
            files: of the run.
            adapting: the model that adapters are added to; None where all versions are whole models.
        """
        self._bus = bus
        self._adapting = adapting
        place = StorePlace(files.weights, ChunkLog(bus, WEIGHTS_STORED))
        self._stores = {name: store_kind(name).open(place) for name in STORES}
        self._folder = files.fetched.absolute() / boot_id(8)  # nothing is synced: another boot may find parts
        self._known: dict[str, WeightsPublished] = {}  # versions since the newest full one, by key
        self._ahead: dict[str, Path] = {}  # the directory of a version that was checked before it was asked for
        self._held: dict[Path, int] = {}  # directories in use here, with the handle that has the lock

    def check(self, published: WeightsPublished) -> None:
        """Refuse an announcement whose bytes cannot be this run's.

        Raises:
            WireError: it names another place.
        """
        if (source := self._stores.get(published.store)) is None:
            known = " or ".join(self._stores)
            raise WireError(f"its weights lie in a store {published.store[:64]!r}, expected {known}")
        source.check(published.location)

    def note(self, published: WeightsPublished) -> None:
        """Take note of a version that others may be a difference to."""
        if not published.base:
            self._known.clear()
        self._known[published.key] = published

    async def ahead(self, published: WeightsPublished | None, deadline_s: float) -> float:
        """Let `directory` return a version at once; what fails here is tried again there. Returns the seconds."""
        began = time.monotonic()
        if published is not None:
            with suppress(TornVersion, CheckpointError, OSError):  # a TimeoutError is one
                async with asyncio.timeout(deadline_s):
                    self._ahead = {published.key: await self.directory(published)}
        return time.monotonic() - began

    async def directory(self, published: WeightsPublished) -> Path:
        """Return the directory of a version on this host, whole, which stays until `release`.

        This process hashed every tensor in it, because a server loads any bytes that it finds. It is a Hugging Face
        model, or an adapter where the server adds it itself.

        Raises:
            TornVersion: its bytes are not there, or others.
            CheckpointError, OSError: the disk refused it.
        """
        if (ahead := self._ahead.pop(published.key, None)) is not None:
            return ahead
        if published.is_unchanged:
            return await self.directory(self._known_base(published))
        found = await self._stored(published)
        if not published.adapts or self._adapting is None:
            return found
        await asyncio.to_thread(self._adapting.check, published.adapts)
        return await self._merged(found, self._adapting) if self._adapting.merges else found

    async def _stored(self, published: WeightsPublished) -> Path:
        """Return the directory of a version as it was stored; see `directory`."""
        if self._is_local(published):
            directory = Path(published.location)
            await asyncio.to_thread(check_version, directory, published.digest)
            return directory
        target = self._folder / f"{version_name(published.lineage, published.version)}-{published.digest[:12]}"
        while not await self._hold_whole(target, published.digest):
            base = await self._base(published) if published.base else None
            await self._made_once(target, partial(self._make, published, base, target))
        return target

    async def _merged(self, adapter: Path, adapting: Adapting) -> Path:
        """Return the directory of the model with an adapter in it; see `directory`."""
        target = self._folder / f"{adapter.name}.merged"

        async def make() -> None:
            with written_aside(target, synced=False) as aside:
                await asyncio.to_thread(adapting.write, adapter, aside.path)

        while not await self._hold_whole(target):
            await self._made_once(target, make)
        return target

    async def _made_once(self, target: Path, make: Callable[[], Awaitable[None]]) -> None:
        """Make a directory that another engine of this host may be about to make."""
        self._folder.mkdir(parents=True, exist_ok=True)
        handle = await asyncio.to_thread(lock, self._folder / ".fetch")
        try:
            if not await asyncio.to_thread(target.exists):
                self._sweep()
                await make()
                self._hold(target)  # before the next one that has the lock removes what none uses
        finally:
            os.close(handle)

    def release(self, *, keep: Path) -> None:
        """Release all directories but one, and remove from this host those that no engine uses."""
        self._ahead.clear()
        for path in [path for path in self._held if path != keep]:
            os.close(self._held.pop(path))
        self._remove_unused()
        for other in self._folder.parent.glob("*"):
            if other != self._folder and self._held:
                shutil.rmtree(other, ignore_errors=True)  # of another boot

    def close(self) -> None:
        """Release everything."""
        for handle in self._held.values():
            os.close(handle)
        self._held.clear()

    def _sweep(self) -> None:
        """Remove what engines left that died, to make room; the caller has the lock, so no other is making anything."""
        for kind in (".read-*", ".*.partial", ".*.old"):
            for left in self._folder.glob(kind):
                shutil.rmtree(left, ignore_errors=True)
        self._remove_unused()

    def _remove_unused(self) -> None:
        for path in self._folder.glob("lineage*"):
            with _opened(path) as handle:
                if path in self._held or handle is None or not try_lock(handle):
                    continue
                if _is_at(handle, path):  # else another engine has removed or replaced it since
                    remove_directory(path)

    async def _hold_whole(self, target: Path, digest: str = "") -> bool:
        """Lock a directory that is there; one that another engine made and that is damaged since is removed.

        Args:
            target: the directory.
            digest: of its manifest; "": its files are to be those of the manifest that it has.
        """
        if target in self._held or not self._hold(target):
            return target in self._held
        handle = self._held.pop(target)
        with ExitStack() as closing:
            closing.callback(os.close, handle)
            try:
                await asyncio.to_thread(check_version, target, digest)
            except TornVersion:
                closing.callback(os.close, await asyncio.to_thread(lock, self._folder / ".fetch"))
                if _is_at(handle, target):  # else another engine has replaced it since
                    remove_directory(target)
                return False
            closing.pop_all()
        self._held[target] = handle
        return True

    def _hold(self, target: Path) -> bool:
        """Lock a directory against its removal; False if it does not exist."""
        try:
            handle = lock_folder(target, shared=True)
        except FileNotFoundError:
            return False
        if not _is_at(handle, target):
            os.close(handle)  # removed since
            return False
        self._held[target] = handle
        return True

    def _known_base(self, published: WeightsPublished) -> WeightsPublished:
        if (base := self._known.get(published.base)) is None:
            raise TornVersion(f"it is a difference to version {published.base}, which is not known here")
        return base

    async def _base(self, published: WeightsPublished) -> Path:
        """Return the directory of a difference's base version; only the result of the difference is checked."""
        base = self._known_base(published)
        return Path(base.location) if self._is_local(base) else await self.directory(base)

    async def _make(self, published: WeightsPublished, base: Path | None, target: Path) -> None:
        """Make the directory of a version under a temporary name; the base stays unchanged."""
        with (
            written_aside(target, synced=False) as aside,
            tempfile.TemporaryDirectory(dir=self._folder, prefix=".read-") as scratch,
        ):
            into = aside.path if base is None else Path(scratch)
            source = await self._stores[published.store].read(published.location, into)
            if base is None:
                await asyncio.to_thread(check_version, aside.path, published.digest)
            else:
                expected = DeltaRecord(self._bus.run, published.base, published.key, [])
                await asyncio.to_thread(apply_delta, source, base, aside.path, expected=expected)

    def _is_local(self, published: WeightsPublished) -> bool:
        """Return whether the store has a version as a directory that servers read."""
        return self._stores[published.store].is_local and not published.base


def _is_at(handle: int, path: Path) -> bool:
    """Return whether a path still leads to the directory that a handle has."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A handle of a directory; None if the directory is gone."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield None
        return
    try:
        yield handle
    finally:
        os.close(handle)
