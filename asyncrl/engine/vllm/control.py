"""Control of vLLM servers: those that the run starts, and those of other owners."""

from __future__ import annotations

import json
from typing import ClassVar

from asyncrl.engine.control import ServerSpec
from asyncrl.engine.errors import RequestFailed
from asyncrl.engine.http_control import HTTPControl, OwnControl, memory_words
from asyncrl.engine.starting import EngineFailed
from asyncrl.engine.vllm.api import ADAPTERS, ALWAYS, DIRECT, SLEEP, lacking
from asyncrl.engine.vllm.arguments import FRONTS, KEY_FILE, LOGPROBS, SCALED, WORKER, adapter_room
from asyncrl.engine.vllm.arguments import SLEEP as SLEEP_MODE
from asyncrl.engine.vllm.client import VLLMClient
from asyncrl.guard import guarded_python

_TRANSFER = {"backend": "asyncrl"}
_INTERVAL = "16"  # tokens of an event: vLLM takes no interval of a request


class VLLMServer(VLLMClient, HTTPControl):
    """A vLLM server."""

    _home: ServerSpec
    _keeps = False  # requests while it is held

    async def find(self) -> None:
        """Check that a server which answers has the calls and settings that the run needs.

        Raises:
            EngineFailed: it does not; the message names them.
            EngineError: it does not answer.
        """
        needed = {**ALWAYS, **(ADAPTERS if self._home.serves else {})}
        if self.own:
            needed |= {**DIRECT, **(SLEEP if SLEEP_MODE in self._home.group.arguments else {})}
        if missing := lacking(await self.paths(), needed):
            raise EngineFailed(f"this vLLM lacks {missing}; expected vLLM 0.32 with these calls")
        info = await self.server_info()
        self.extended = info.get("parallel_config", {}).get("worker_extension_cls") == WORKER
        if not self.extended and info.get("device_config", {}).get("device") == "cpu":
            message = "a vLLM for the CPU does not load tied output layers again; start it with "
            raise EngineFailed(f"{message}--worker-extension-cls {WORKER}")
        mode = info.get("model_config", {}).get("logprobs_mode")
        if mode != SCALED:
            message = f"found {LOGPROBS} {mode}, expected {SCALED}: log-probs at the temperature of a request; start"
            raise EngineFailed(f"{message} it with that")

    async def hold(self, *, keep: bool = False) -> None:
        self._keeps = keep
        await self.pause("in_place" if keep else "abort")

    async def drain(self) -> None:
        await self.hold()

    async def resume(self) -> None:
        """Sample again; requests that arrived during the pause were sent for the old weights and are aborted."""
        if not self._keeps:
            await self.abort_all()
        await self.continue_generation()

    async def weights(self) -> tuple[str, str]:
        """Return the name of its weights, without a path."""
        return await self.label(), ""


class VLLMControl(VLLMServer, OwnControl):
    """vLLM, started by the run."""

    command = staticmethod(guarded_python)  # its child processes may outlive it and hold GPU memory
    tracked = True
    fixed: ClassVar[dict[str, str]] = {
        **OwnControl.fixed,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",  # longer than a client keeps a connection: else both may end it at once
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",  # vLLM takes the name of an absent directory for a repository
    }

    def __init__(self, home: ServerSpec) -> None:
        self.device = "cuda" if home.group.on_gpus else "cpu"
        super().__init__(home)

    async def start(self) -> None:
        await OwnControl.start(self)
        await self.find()
        await self.name_weights(self._home.label)

    def environment(self) -> dict[str, str]:
        key_file = self._home.key_file
        return {**super().environment(), **({KEY_FILE: str(key_file.resolve())} if key_file is not None else {})}

    def arguments(self) -> list[str]:
        home, group = self._home, self._home.group
        arguments = ["-m", "vllm.entrypoints.cli.main", "serve", str(home.model), "--host", home.host]
        arguments += ["--port", str(self._port), "--enable-scale-out", LOGPROBS, SCALED, FRONTS, "1"]
        arguments += ["--max-num-seqs", str(group.max_running), "--stream-interval", _INTERVAL]
        arguments += ["--enable-prompt-tokens-details", "--enable-server-load-tracking"]
        arguments += ["--disable-uvicorn-access-log"]
        arguments += ["--worker-extension-cls", WORKER]
        arguments += ["--weight-transfer-config", json.dumps(_TRANSFER)]
        arguments += ["--max-model-len", str(home.settings.context)] if home.settings.context else ()
        arguments += ["--scheduling-policy", "priority"] if home.priorities else ()
        arguments += ["--middleware", "asyncrl.engine.vllm.key_guard.KeyGuard"] if home.key_file is not None else ()
        arguments += adapter_room(home.serves.rank) if home.serves is not None else ()
        return [*arguments, *group.arguments, *memory_words(home)]


class ExternalVLLM(VLLMServer):
    """vLLM, started by its owner."""

    def __init__(self, home: ServerSpec) -> None:
        self._home = home
        HTTPControl.__init__(self, home, home.group.addresses[home.number])

    async def start(self) -> None:
        try:
            await self.find()
        except RequestFailed as error:  # of a call that a server in another mode does not have
            calls = ", ".join(f"{path} ({how})" for path, how in ALWAYS.items())
            raise EngineFailed(f"{error}; expected vLLM 0.32 with {calls}") from error
