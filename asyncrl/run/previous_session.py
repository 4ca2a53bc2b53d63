"""What the part of a run before this one wrote of its end."""

from __future__ import annotations

import contextlib
from typing import Any

from asyncrl.files import write_json
from asyncrl.run.directory import RunFiles


class PartBefore:
    """The end of the previous session: void once the run resumes, and valid again if the resumption did not begin."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self._summary: dict[str, Any] = {}
        self._failure = ""

    def take_away(self) -> None:
        """Remove it."""
        self._summary = self._files.read_summary()
        (self._files.root / "summary.json").unlink(missing_ok=True)
        if self._files.failure.exists():
            self._failure = self._files.failure.read_text(encoding="utf-8")
            self._files.failure.unlink()

    def put_back(self) -> None:
        """Write it again, as far as the disk takes it; a run that was made longer has not finished any more."""
        with contextlib.suppress(OSError):
            if self._summary:
                write_json(self._files.root / "summary.json", self._summary | {"finished": False})
            if self._failure:
                self._files.failure.write_text(self._failure, encoding="utf-8")
