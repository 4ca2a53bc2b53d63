"""The harness `mini`: the policy calls tools, writes a file or shell commands, and reads what programs print."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from asyncrl.config.harness_settings import MiniSettings
from asyncrl.harnesses.harness import Attempt, Harness, HarnessFailed, HarnessKind
from asyncrl.live.apis.schema import TOO_LONG, LiveError
from asyncrl.shortened import shortened

_BLOCK = re.compile(r"```(?:sh|bash)\n(.*?)```", re.DOTALL)


class Mini:
    """See `asyncrl.harnesses.harness.Harness`."""

    def __init__(self, settings: MiniSettings) -> None:
        self._settings = settings

    async def run(self, attempt: Attempt) -> None:
        settings, given = self._settings, attempt.row.prompt
        messages: list[dict[str, Any]] = [{"role": "system", "content": settings.system}] if settings.system else []
        messages += [{"role": "user", "content": given}] if isinstance(given, str) else given
        for _ in range(settings.turns):
            try:
                reply = await attempt.endpoint.reply(messages, attempt.tools.schemas)
            except LiveError as error:
                if error.code == TOO_LONG:  # the conversation has filled the context of the model
                    return
                raise HarnessFailed(str(error)) from error
            attempt.context.completion = reply.text
            messages.append(reply.message)
            if reply.calls:
                messages += await attempt.tools.answer(reply.calls)
                continue
            output = await (self._write if settings.file else self._commands)(attempt, reply.text)
            if output is None:
                return
            messages.append({"role": "user", "content": shortened(output)})

    async def _write(self, attempt: Attempt, reply: str) -> str | None:
        """Return what the check says of a file; None if it has no objection."""
        await attempt.sandbox.put(self._settings.file, reply.encode())
        if not self._settings.check:
            return None
        result, output = await attempt.run_own(self._settings.check)
        return output if result.code else None

    async def _commands(self, attempt: Attempt, reply: str) -> str | None:
        """Return the output of the commands of a reply; None if it has none."""
        blocks = _BLOCK.findall(reply)
        if not blocks:
            return None
        result, output = await attempt.run(["sh", "-c", "\n".join(blocks)])
        return f"exit code {result.code}{f', stopped by {result.limit}' if result.limit else ''}\n{output}"


class _Kind(HarnessKind):
    """See `asyncrl.harnesses.harness.HarnessKind`."""

    def make(self, settings: MiniSettings, base: Path) -> Harness:
        return Mini(settings)


KIND = _Kind()
