"""Snapshots of a workspace, from which a program continues by its own flag after its worker has died."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from asyncrl.rollout.snapshots import CallPacker, EndedCall, PackedCall, SnapshotLog
from asyncrl.sandboxes.sandbox import Sandbox, SandboxError

if TYPE_CHECKING:
    from asyncrl.rollout.endpoint import Endpoint

MOST_BYTES = 1 << 24
"""Bytes of one snapshot, compressed; no larger one is taken."""

_LIST = "find . -type f -exec stat -c '%y|%s|%n' {} +; find . -type d -o -type l; true"  # files may vanish meanwhile
_PACK = ["tar", "-czf", "-", "--no-recursion", "-T", "-"]
_CHANGED_MEANWHILE = 1  # exit code of tar


class Snapshot(msgspec.Struct, array_like=True):
    """The changes of a workspace since the snapshot before, and the calls that ended since."""

    archive: bytes  # tar, gzip: changed files, all folders and links
    removed: list[str]
    calls: list[PackedCall]


class Snapshots:
    """Takes a snapshot before each call of a program that makes one call at a time."""

    def __init__(self, log: SnapshotLog, sandbox: Sandbox, endpoint: Endpoint) -> None:
        self._log, self._sandbox, self._endpoint = log, sandbox, endpoint
        self._files: dict[str, str] = {}  # time of change and size, by path
        self._packer = CallPacker()

    async def resume(self) -> bool:
        """Bring the workspace and the conversations to the newest snapshot; returns whether there is one.

        Raises:
            SandboxError: the workspace cannot be written or read.
        """
        self._files, _ = await self._list()
        found = self._log.read()
        for raw in found:
            snapshot = msgspec.msgpack.decode(raw, type=Snapshot)
            await self._exec(["tar", "-xzf", "-"], snapshot.archive)
            if snapshot.removed:
                await self._exec(["rm", "-f", "--", *snapshot.removed])
            for call in snapshot.calls:
                self._endpoint.restore(self._packer.unpack(call, self._log.answers[call.path]))
        if found:
            self._files, _ = await self._list()
        return bool(found)

    async def take(self, ended: list[EndedCall]) -> bool:
        """Store what changed since the snapshot before; returns False if it is too large.

        Args:
            ended: calls that got their answers since.

        Raises:
            SandboxError: the workspace cannot be read.
        """
        files, others = await self._list()
        changed = [path for path, state in files.items() if self._files.get(path) != state]
        archive = await self._exec(_PACK, "\n".join([*others, *changed]).encode(), also=_CHANGED_MEANWHILE)
        if len(archive) > MOST_BYTES:
            return False
        calls = [self._packer.pack(call, self._log.answers[call.path]) for call in ended]
        removed = [path for path in self._files if path not in files]
        await self._log.append(msgspec.msgpack.encode(Snapshot(archive, removed, calls)))
        self._files = files
        return True

    async def _list(self) -> tuple[dict[str, str], list[str]]:
        """Return the state of each file by its path, and the paths of folders and links."""
        lines = (await self._exec(["sh", "-c", _LIST])).decode(errors="surrogateescape").splitlines()
        states = [line.split("|", 2) for line in lines if line.count("|") > 1 and not line.startswith(".")]
        files = {path: f"{changed} {size}" for changed, size, path in states}
        return files, [line for line in lines if line.startswith("./")]

    async def _exec(self, command: Sequence[str], stdin: bytes = b"", also: int = 0) -> bytes:
        """Return the output of a program.

        Args:
            also: another exit code than 0 that is no failure.
        """
        pieces: dict[str, list[bytes]] = {"stdout": [], "stderr": []}
        result = await self._sandbox.exec(
            command, on_output=lambda stream, piece: pieces[stream].append(piece), stdin=stdin
        )
        if result.code not in (0, also):
            words = b"".join(pieces["stderr"]).decode(errors="replace")[-300:]
            raise SandboxError(f"no snapshot: {command[0]} ended with exit code {result.code}: {words}")
        return b"".join(pieces["stdout"])
