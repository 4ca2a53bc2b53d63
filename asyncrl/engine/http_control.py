"""Control of a server over SGLang's HTTP API, and of one that is a process here."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from asyncrl.config.devices import gpus_of_server
from asyncrl.engine.client import EngineClient
from asyncrl.engine.control import EngineControl, ServerSpec
from asyncrl.engine.errors import EngineRefused, RequestFailed
from asyncrl.engine.lora_serving import ServedAdapters
from asyncrl.engine.staging import Staging
from asyncrl.engine.starting import check_front, end_of, name_of_gpu, start_at_free_port
from asyncrl.host import VISIBLE_GPUS
from asyncrl.ports import Listen, free_port, url_host
from asyncrl.process import ChildProcess, python

_SPARE = 6 << 30  # GPU bytes that a server may still allocate after its start, for long prompts


class HTTPControl(EngineClient, EngineControl):
    """A server with SGLang's API."""

    def __init__(self, home: ServerSpec, address: str) -> None:
        super().__init__(address, api_key=home.key, control_timeout_s=home.settings.update_deadline_s)
        self._adapters = ServedAdapters(self, home.serves) if home.serves is not None else None
        self.adds = home.serves is not None

    async def start(self) -> None:
        """Find the server as its owner has started it."""
        await check_front(self)
        if self._adapters is not None:
            await self._adapters.check()

    async def hold(self, *, keep: bool = False) -> None:
        """Freeze the sampler, after all requests have been aborted unless they are kept."""
        if keep:
            await self.pause("in_place")
        else:
            await self.drain()

    async def drain(self) -> None:
        """Abort all requests until none is left, then freeze the sampler."""
        await self.empty()
        await self.pause("in_place")

    async def load_weights(self, directory: Path, key: str) -> None:
        """Load from files: old caches stay under their own `extra_key`, and must not be flushed under requests."""
        if self._adapters is not None:
            self.adapter = await self._adapters.load(directory, key)
        else:
            await self.update_weights(directory, key, False)

    async def resume(self) -> None:
        await self.continue_generation()

    async def weights(self) -> tuple[str, str]:
        """Return name and path: a load that gives no name moves the path alone."""
        info = await self.model_info()
        return str(info.get("weight_version")), str(info.get("model_path", ""))


class OwnControl(HTTPControl):
    """A server that is a process of our own."""

    own = True
    module: str
    device: str  # where its weights lie
    command = staticmethod(python)  # line of a process with these words
    fixed: ClassVar[dict[str, str]] = {"OMP_NUM_THREADS": "1"}  # environment variables of each server
    behind_a_router: tuple[str, ...] = ()  # further arguments of a server with a router in front of it

    def __init__(self, home: ServerSpec) -> None:
        self._port = free_port(home.host)
        super().__init__(home, f"http://{url_host(home.host)}:{self._port}")
        self._home = home
        self._process: ChildProcess | None = None
        self._staging: Staging | None = None
        if home.staged:
            log_file = home.log_file.with_name(f"{home.name}.staging.log")
            # Nothing else: the packages that a server is given are not for this process.
            kept = {name: value for name, value in self.environment().items() if name in (*self.fixed, VISIBLE_GPUS)}
            self._staging = Staging(self.device, kept, log_file, home.settings.update_deadline_s)
            self._staging.spare = _SPARE if home.group.staged == "auto" else 0

    async def start(self) -> None:
        """Start the server on the weights of its model directory."""
        home, settings = self._home, self._home.settings
        if self._staging is not None:
            self._staging.start()
        place = Listen(home.host, self._port)
        await start_at_free_port("server", place, self._launch, self.health, settings.start_deadline_s)

    async def _launch(self, port: int) -> ChildProcess:
        self._port = port
        self.address = f"http://{url_host(self._home.host)}:{port}"
        # SGLang writes its arguments into its output, the key among them: only its owner reads the log.
        command, log_file = self.command(*self.arguments()), self._home.log_file
        # It leads a group, by which all that it has started is found when it has ended.
        self._process = await ChildProcess.start(command, log=log_file, environment=self.environment(), apart=True)
        return self._process

    async def ended(self) -> str:
        assert self._process is not None
        return await end_of(self._process)

    @property
    def frozen(self) -> bool:
        return self._process is not None and self._process.stopped

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    async def prepare(self, directory: Path) -> None:
        """Stage the weights in memory that the server can map, if configured."""
        if self._staging is not None:
            await self._staging.bring(directory)

    async def load_weights(self, directory: Path, key: str) -> None:
        """Load from memory where the weights were brought there, else from files."""
        if self._staging is not None and (packed := self._staging.take(directory)):
            try:
                await self.update_from_memory(packed, key)
                self._staging.settle()
                return
            except (EngineRefused, RequestFailed) as error:
                self._staging.fail(directory, error)
        await super().load_weights(directory, key)

    async def close(self) -> None:
        if self._staging is not None:
            self._staging.close()
        await super().close()
        if self._process is not None:
            await self._process.end()

    def environment(self) -> dict[str, str]:
        """Return the environment variables of the server, its GPUs among those of its group with them."""
        group, number = self._home.group, self._home.number
        gpus = gpus_of_server(group, number) if group.gpus else []
        visible = {VISIBLE_GPUS: ",".join(map(name_of_gpu, gpus))} if gpus else {}
        return {**self.fixed, **visible, **group.environment}

    def arguments(self) -> list[str]:
        """Return the command line of the server, after `python`."""
        home, group = self._home, self._home.group
        arguments = ["-m", self.module, "--model-path", str(home.model), "--host", home.host]
        arguments += ["--port", str(self._port), "--weight-version", home.label]
        arguments += ["--max-running-requests", str(group.max_running), "--incremental-streaming-output"]
        arguments += ["--context-length", str(home.settings.context)] if home.settings.context else ()
        if home.key_file is not None:
            arguments += self.key_arguments(home.key_file)
        router = self.behind_a_router if home.settings.router.count else ()
        return [*arguments, *router, *group.arguments, *memory_words(home)]

    def key_arguments(self, key_file: Path) -> list[str]:
        """Return the arguments that give the server its key: by file, since every user may read a command line."""
        return ["--api-key-file", str(key_file)]


def memory_words(home: ServerSpec) -> list[str]:
    """Return the argument with the part of the memory of its GPU that a server has; the last of two such counts."""
    return [home.group.of_kind.memory_option, f"{home.memory:g}"] if home.memory else []
