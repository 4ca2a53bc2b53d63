"""Control of an SGLang server."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import ClassVar

from asyncrl.data.quantisation import served_otherwise
from asyncrl.engine.errors import EngineError
from asyncrl.engine.http_control import OwnControl
from asyncrl.engine.sglang.arguments import bootstrap_port
from asyncrl.files import write_private
from asyncrl.guard import guarded_python


class SGLangControl(OwnControl):
    """SGLang."""

    module = "sglang.launch_server"
    device = "cuda"
    command = staticmethod(guarded_python)  # its child processes may outlive it and hold GPU memory
    fixed: ClassVar[dict[str, str]] = {
        **OwnControl.fixed,
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else a paused server answers /health after 20 s, with 503
    }
    behind_a_router = ("--stream-interval", "16")  # it drops the stream interval of a request

    async def start(self) -> None:
        """Start the server, and exempt its objects from Python's garbage collector.

        A pass over all that its front process has imported keeps the tokens of all streams back for half a second.
        """
        await super().start()
        with contextlib.suppress(EngineError):  # it may have no such call; if it is gone, others find out
            await self._call("POST", "/freeze_gc", {})

    async def hold(self, *, keep: bool = False) -> None:
        """Hold it without a wait for the answers of aborted requests: SGLang hands them out while it loads."""
        group = self._home.group
        # With a detokenizer process between the two, answers could arrive after the next label.
        if keep or group.role != "regular" or group.copies > 1 or "--skip-tokenizer-init" not in group.arguments:
            return await super().hold(keep=keep)
        await self.halt()

    async def release_memory(self) -> None:
        """Give it back; SGLang ends if anything is left, and clients send until they see that it is held."""
        await self.halt()
        await super().release_memory()

    def arguments(self) -> list[str]:
        """Return its command line; each prefill server has a separate bootstrap port."""
        group = self._home.group
        port = ["--disaggregation-bootstrap-port", str(bootstrap_port(group) + self._home.number)]
        first = ["--enable-priority-scheduling"] if self._home.priorities else []
        # Weights of another form than the versions have cannot be its first ones, from which nothing is sampled.
        other = served_otherwise(self._home.model, self._home.form) if self._home.form != "model" else ""
        form = ["--json-model-override-args", other, "--load-format", "dummy"] if other else []
        adapters = self._home.serves.arguments if self._home.serves else []
        return [*super().arguments(), *adapters, *(port if group.role == "prefill" else []), *first, *form]

    def key_arguments(self, key_file: Path) -> list[str]:
        """Return the name of an options file that holds the key."""
        options = self._home.log_file.with_suffix(".yaml")
        write_private(options, f"api-key: {json.dumps(self._home.key)}\n".encode())
        return ["--config", str(options)]
