"""The kind `none`: a folder of this machine without isolation, for trusted programs only."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.finding import Finding
from asyncrl.config.sandbox_settings import Launch, SandboxCapability, SandboxKind, SandboxSettings
from asyncrl.sandboxes import server
from asyncrl.sandboxes.control_groups import group_parents
from asyncrl.sandboxes.leftovers import name_of_mine

_MB = 1_000_000


class NoSandbox(SandboxKind):
    """A folder of this machine."""

    def checks(self, settings: SandboxSettings) -> Iterator[Finding]:
        if not settings.trusted:
            message = (
                'kind = "none" lets programs read and change all that the user of the worker may; set '
                "sandbox.trusted = true to allow it"
            )
            yield Finding(("sandbox.kind", "sandbox.trusted"), message)

    def capabilities(self) -> frozenset[SandboxCapability]:
        limited = {SandboxCapability.SHARED_MEMORY_LIMIT, SandboxCapability.PROCESS_LIMIT}
        return frozenset({SandboxCapability.REACHES_WORKER, *(limited if group_parents() else ())})

    def launch(self, settings: SandboxSettings) -> Launch:
        folder = Path(tempfile.gettempdir()).resolve() / name_of_mine()
        folder.mkdir(mode=0o700)
        limits = [f"DATA={settings.memory_mb * _MB}", f"FSIZE={settings.disk_mb * _MB}"]
        return Launch([sys.executable, "-I", "-S", server.__file__, str(folder), *limits], str(folder))


KIND = NoSandbox()
