"""Inference servers under the control of their engine actor: one class for each kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from asyncrl.config.engine_settings import EngineGroup, EngineSettings
from asyncrl.data.quantisation import served_otherwise
from asyncrl.engine.client import EngineClient
from asyncrl.engine.embedded.budget import memory_share
from asyncrl.engine.errors import EngineError, EngineRefused, RequestFailed
from asyncrl.engine.lora_serving import ServedAdapters, Shape
from asyncrl.engine.server_load import EngineLoad
from asyncrl.engine.staging import Staging
from asyncrl.engine.starting import check_front, end_of, name_of_gpu, start_at_free_port
from asyncrl.files import write_private
from asyncrl.guard import guarded_python
from asyncrl.host import VISIBLE_GPUS
from asyncrl.ports import LOOPBACK, Listen, free_port, url_host
from asyncrl.process import ChildProcess, python
from topics.roles import number_in_pool

_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # else a paused server answers /health after 20 s, with 503
}
_SPARE = 6 << 30  # GPU bytes that a server may still allocate after its start, for long prompts


class ServerSpec(NamedTuple):
    """The arguments of a server's start."""

    name: str  # "engine-2", or "engine-large-2" of several groups
    settings: EngineSettings
    model: Path  # directory that it starts from
    log_file: Path  # of its output
    key_file: Path | None  # holds the API key that it asks for; None for a server that asks for none
    address: str = ""  # of a server that was announced during the run
    label: str = "none"  # of the weights that it starts with
    priorities: bool = False  # some requests come before others
    form: str = "model"  # of versions: `weights.format`
    host: str = LOOPBACK  # IP address of this host that it listens on
    gap_s: float = 0.0  # for which an update waits for a moment without requests of clients
    staged: bool = False  # versions are staged in memory before its requests stop
    serves: Shape | None = None  # adapters that it adds to its model at each token; None: its versions are whole models

    @property
    def key(self) -> str | None:
        """The API key."""
        return read_key(self.key_file)

    @property
    def group(self) -> EngineGroup:
        """The settings of its group."""
        return self.settings.group_of(self.name)

    @property
    def number(self) -> int:
        """Its number in its group, from 0."""
        return number_in_pool(self.name) - 1


def read_key(key_file: Path | None) -> str | None:
    """The API key in a file."""
    return key_file.read_text().strip() if key_file is not None else None


class EngineControl(Protocol):
    """One inference server, as its engine actor controls it. The defaults are those of a server started elsewhere.

    Raises, from every coroutine:
        EngineError: the server does not do it, or does not answer.
    """

    address: str  # where rollout workers reach it
    own: bool = False  # it was started here, and ends with `close`
    adapter: str = ""  # name of the last loaded adapter for requests; "": none
    adds: bool = False  # it takes directories of adapters, and adds them to its model itself

    @property
    def frozen(self) -> bool:
        """Return whether its process is stopped, as far as that can be seen from here."""
        return False

    async def start(self) -> None:
        """Start the server and return when it answers; raises EngineFailed."""

    async def ended(self) -> str:
        """Return when the server has ended, with its last output; never, if this process cannot see that."""
        await asyncio.Event().wait()
        return ""

    async def health(self) -> bool:
        """Return whether it answers and is well."""

    async def weights(self) -> tuple[str, str]:
        """Return the name of its weights, and the path that it last read; "" if it names none."""

    async def load(self) -> EngineLoad:
        """Return its load at this moment."""

    async def hold(self, *, keep: bool = False) -> None:
        """Sample nothing until `resume`; requests return with their partial tokens, unless they are kept."""

    async def drain(self) -> None:
        """Hold, and return when no request is left."""

    async def release_memory(self) -> None:
        """Give the GPU's memory back; the server is held, without requests. One without a GPU has none."""

    async def resume_memory(self) -> None:
        """Reallocate GPU memory; the caller reloads weights afterwards."""

    async def prepare(self, directory: Path) -> None:
        """Do what makes the load of these weights quick, while the server samples."""

    async def wait_gap(self) -> None:
        """Wait for a moment without a request of a client, at most `ServerSpec.gap_s`, where the server reports it."""
        return  # most servers do not

    async def load_weights(self, directory: Path, key: str) -> None:
        """Load weights, and call them `key` from here on; the server is held."""

    async def resume(self) -> None:
        """Sample again."""

    def kill(self) -> None:
        """End a server of our own that does not answer."""

    async def close(self) -> None:
        """Release the server; end one of our own."""


class ExternalControl(EngineClient, EngineControl):
    """A server that others have started, at the address that the settings give."""

    def __init__(self, home: ServerSpec, address: str = "") -> None:
        address = address or home.address or home.group.addresses[home.number]
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


class OwnControl(ExternalControl):
    """A server that is a process of our own."""

    own = True
    module: str
    device: str  # where its weights lie
    command = staticmethod(python)  # line of a process with these words
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
            kept = {name: value for name, value in self.environment().items() if name in (*_ENVIRONMENT, VISIBLE_GPUS)}
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
        gpus = group.gpus[number * group.gpus_each : (number + 1) * group.gpus_each]
        visible = {VISIBLE_GPUS: ",".join(map(name_of_gpu, gpus))} if gpus else {}
        return {**_ENVIRONMENT, **visible, **group.environment}

    def arguments(self) -> list[str]:
        """Return the command line of the server, after `python`."""
        home, group = self._home, self._home.group
        arguments = ["-m", self.module, "--model-path", str(home.model), "--host", home.host]
        arguments += ["--port", str(self._port), "--weight-version", home.label]
        arguments += ["--max-running-requests", str(group.max_running), "--incremental-streaming-output"]
        arguments += ["--context-length", str(home.settings.context)] if home.settings.context else ()
        if home.key_file is not None:
            arguments += self.key_arguments(home.key_file)
        return [*arguments, *(self.behind_a_router if home.settings.router.count else ()), *group.arguments]

    def key_arguments(self, key_file: Path) -> list[str]:
        """Return the arguments that give the server its key: by file, since every user may read a command line."""
        return ["--api-key-file", str(key_file)]


class EmbeddedControl(OwnControl):
    """The CPU engine."""

    module = "asyncrl.engine.embedded"
    device = "cpu"
    _keeps = False  # requests while it is held

    def __init__(self, home: ServerSpec) -> None:
        super().__init__(home)
        self.adds = not home.staged  # the staging process reads whole models

    def arguments(self) -> list[str]:
        """Return its command line, with its part of the memory."""
        share = memory_share(self._home.settings, self._home.group)
        return [*super().arguments(), "--mem-fraction-static", f"{share:g}"]

    async def hold(self, *, keep: bool = False) -> None:
        self._keeps = keep
        await super().hold(keep=keep)

    async def drain(self) -> None:
        """End all requests, in the one call that pauses it."""
        await self.pause("abort")

    async def resume(self) -> None:
        """Continue sampling; requests that arrived during the pause were sent for the old weights and are aborted."""
        if not self._keeps:
            await self.abort_all()
        await super().resume()

    async def prepare(self, directory: Path) -> None:
        """Let the server read the weights ahead while it samples, unless a staging process does."""
        if self._staging is None:
            await self.read_weights_ahead(directory)
        await super().prepare(directory)

    async def wait_gap(self) -> None:
        """Wait until no request with a priority runs or waits."""
        if seconds := self._home.gap_s:
            await self._load(f"?wait_idle={seconds:.3f}&priority=1", extra_s=seconds)


class SGLangControl(OwnControl):
    """SGLang."""

    module = "sglang.launch_server"
    device = "cuda"
    command = staticmethod(guarded_python)  # its child processes may outlive it and hold GPU memory
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
        port = ["--disaggregation-bootstrap-port", str(group.bootstrap_port + self._home.number)]
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


class ScriptedControl(EngineControl):
    """No server at all: the clients of its address make tokens up, and label them as is announced."""

    adds = True

    def __init__(self, home: ServerSpec) -> None:
        self.address = f"scripted:{home.name}"
        self._label = home.label

    async def health(self) -> bool:
        return True

    async def weights(self) -> tuple[str, str]:
        """Return the last loaded name, without a path."""
        return self._label, ""

    async def load(self) -> EngineLoad:
        return EngineLoad(0, 0)

    async def load_weights(self, directory: Path, key: str) -> None:
        self._label = key


CONTROLS: dict[str, Callable[[ServerSpec], EngineControl]] = {
    "embedded": EmbeddedControl,
    "sglang": SGLangControl,
    "external": ExternalControl,
    "scripted": ScriptedControl,
}
"""Control of the servers of each kind."""
