"""Placement of processes: this machine's implementation and another one keep the same promises."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import get_args, get_type_hints

import pytest

from actors.supervisor.actor import Supervisor
from actors.supervisor.starts import Starts
from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last_of_each
from asyncrl.bus.publish import publish
from asyncrl.config.process_settings import PLACEMENTS, PlacementKind, PlacementSettings, placement_kind
from asyncrl.config.settings import Config
from asyncrl.process import ChildProcess, log_tail
from asyncrl.run import placements
from asyncrl.run.directory import RunFiles
from asyncrl.run.placement import Job, Placement, open_placement
from asyncrl.run.placements import local
from asyncrl.run.placements.local import LocalProcesses
from harness.configs import the_problem
from harness.launches import prepared
from harness.stage import Stage, until
from topics.actors import ACTOR_STARTED, ActorStarted
from topics.topic import ACTORS


class ShellProcesses:
    """Starts each process by a shell in another folder, as a placement on another host would."""

    away_s = 0.0

    def __init__(self, logs: Path) -> None:
        self._logs = logs

    async def start(self, job: Job) -> ChildProcess:
        words = [*job.words, *(["--credentials", str(job.credentials)] if job.credentials else [])]
        script = 'cd / && exec "$0" "$@"'
        command = ["/bin/sh", "-c", script, sys.executable, "-P", "-m", job.module, *words]
        return await ChildProcess.start(command, log=self.log(job.name), environment=job.environment, apart=True)

    def here(self, _job: Job) -> bool:
        return True

    def log(self, name: str) -> Path:
        return self._logs / f"{name}.out"


def open_shell(_config: Config, files: RunFiles) -> Placement:
    return ShellProcesses(files.logs)


@pytest.fixture(params=["local", "shell"])
def opened_by_settings(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings open child processes of this machine, or the other placement."""
    if request.param == "shell":
        placement_kind.cache_clear()
        monkeypatch.setattr(local, "KIND", local.KIND._replace(opener=f"{__name__}:open_shell"))
        request.addfinalizer(placement_kind.cache_clear)


@pytest.fixture(params=[LocalProcesses, ShellProcesses])
def placement(request: pytest.FixtureRequest, tmp_path: Path) -> Placement:
    (tmp_path / "logs").mkdir()
    return request.param(tmp_path / "logs")


async def test_the_end_of_a_process_is_told_with_its_last_lines(placement: Placement):
    ended = await placement.start(Job("one", "no_such_module"))

    assert await ended.wait() == ended.returncode == 1
    assert ended.end_text.startswith("exit code 1: ")
    assert "No module named no_such_module" in ended.end_text
    assert "no_such_module" in placement.log("one").read_text()

    again = await placement.start(Job("one", "platform"))
    assert await again.wait() == 0
    assert "no_such_module" not in again.end_text  # what an earlier process of that name printed is not its own


def test_the_end_of_a_log_is_told_in_words(tmp_path: Path):
    line = {
        "actor": "a-1",
        "level": "error",
        "timestamp": "t",
        "event": "crashed",
        "exception": "at line 3\nOSError: x",
    }
    log = tmp_path / "a-1.log"
    log.write_text(f'plain\n{json.dumps(line)}\n{{"no": "event"}}\n')

    assert log_tail(log) == 'plain | crashed exception=OSError: x | {"no": "event"}'
    with log.open("a") as file:
        file.write(json.dumps({"event": "actor stopped", "reason": "learner-1: the disk is full"}) + "\n")
    assert log_tail(log) == "learner-1: the disk is full"


@pytest.mark.parametrize(("ask", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
async def test_a_process_is_ended_also_where_it_is_stopped_and_once_more_is_no_error(
    placement: Placement, ask: str, number: int
):
    process = await placement.start(Job("server", "http.server", ("0", "--bind", "127.0.0.1")))
    assert process.returncode is None
    if ask == "kill":
        os.kill(process.pid, signal.SIGSTOP)

    getattr(process, ask)()

    assert await asyncio.wait_for(process.wait(), 120) == -number
    assert process.end_text == f"exit code -{int(number)}"
    process.terminate()
    process.kill()


@pytest.mark.usefixtures("opened_by_settings")
async def test_up_starts_the_supervisor_in_the_placement_that_the_settings_name(tmp_path: Path):
    launch = prepared(tmp_path)
    launch.files.credentials.mkdir()

    await launch._start_supervisor()
    assert launch._supervisor is not None
    assert await launch._supervisor.wait() == 1  # it finds no login
    await launch.stop()

    (log,) = launch.files.logs.iterdir()
    assert log == open_placement(launch.config, launch.files).log("supervisor-1")
    assert "supervisor.json" in log.read_text()


def test_the_kinds_that_settings_take_are_those_with_a_description():
    found = {module.name for module in iter_modules(placements.__path__)}

    assert get_args(get_type_hints(PlacementSettings)["kind"]) == PLACEMENTS
    assert found == set(PLACEMENTS)


@pytest.mark.parametrize("name", PLACEMENTS)
def test_what_a_kind_names_is_there_and_makes_a_placement(name: str, tmp_path: Path):
    kind, settings = placement_kind(name), PlacementSettings(kind=name)

    assert isinstance(kind, PlacementKind)
    assert all(callable(resolve_name(text)) for text in (kind.check, kind.node_killer) if text)
    assert settings.elsewhere == ([] if kind.one_machine else settings.roles)
    launch = prepared(tmp_path, placement={"kind": name})
    placement = open_placement(launch.config, launch.files)
    assert placement.away_s == 0.0
    assert placement.here(Job("supervisor-1", "actors.main"))
    assert placement.here(Job("rollout-1", "actors.main")) == kind.one_machine
    assert placement.log("rollout-1").parent == launch.files.logs


def test_a_placement_that_is_not_there_is_refused():
    message = the_problem("demo", "placement.kind=slurm").message

    assert message == 'found "slurm" (string), expected one of "local", "ray"'


def test_a_directory_that_ray_replaces_is_refused(tmp_path: Path):
    directory = tmp_path / "runtime_resources" / "working_dir_files" / "pkg" / "runs"
    message = the_problem("demo", f"directory={directory}", files=True).message

    assert f"{directory} is in the working folder of a submitted job, which Ray replaces at the next" in message


@pytest.mark.usefixtures("opened_by_settings")
async def test_the_supervisor_keeps_an_actor_alive_wherever_it_is_placed(bus: Bus, stage: Callable[..., Stage]):
    play = stage(reward={"function": "exact"})
    await play.open()
    supervisor = Supervisor(play.context("supervisor", bus))
    subject = ACTOR_STARTED.subject(bus.run, "reward-1")

    async def started() -> int:
        records = await read_last_of_each(bus, ACTORS, [subject])
        return records[0].sequence if records else 0

    async def came_after(sequence: int) -> bool:
        return await started() > sequence

    supervisor._begin("reward-1")
    child = supervisor._children["reward-1"]
    try:
        await until(lambda: came_after(0), "the actor has started")
        before = await started()
        assert child.process is not None
        child.process.kill()
        await until(lambda: came_after(before), "it is started again")
    finally:
        supervisor._dismiss(child)
        assert child.task is not None
        await asyncio.wait_for(child.task, 120)


class Sleepers(LocalProcesses):
    """Starts processes that never publish their start."""

    def __init__(self, logs: Path) -> None:
        super().__init__(logs)
        self.begun: list[str] = []

    async def start(self, job: Job) -> ChildProcess:
        self.begun.append(job.name)
        return await ChildProcess.start(["sleep", "1000"], log=self.log(job.name))


async def test_few_begin_at_once_those_that_died_first_and_a_death_or_a_start_lets_the_next_one_begin(
    bus: Bus, stage: Callable[..., Stage]
):
    play = stage(reward={"function": "exact"})
    await play.open()
    context = play.context("supervisor", bus)
    placement = context.placement = Sleepers(context.files.logs)
    supervisor = Supervisor(context)
    supervisor._starts = Starts(1)
    await supervisor.keeper.start()

    async def publish_start(name: str) -> None:
        child = supervisor._children[name]
        await until(lambda: child.process is not None, "it is placed")
        assert child.process is not None
        await publish(bus, ActorStarted("reward", name, "host", child.process.pid))

    names = [f"reward-{number}" for number in (1, 2, 3)]
    for name in names:
        supervisor._begin(name)
    first, _, last = (supervisor._children[name] for name in names)
    await until(lambda: first.process is not None, "the first one has begun")
    assert first.process is not None and placement.begun == names[:1]

    first.process.kill()
    await until(lambda: bool(supervisor._starts._again), "it is to begin again")
    assert placement.begun == names[:2]
    await publish_start(names[1])
    await until(lambda: placement.begun[2:] == names[:1], "it begins again, ahead of the third")
    supervisor._dismiss(last)
    await publish_start(names[0])

    assert last.task is not None
    await last.task
    assert names[2] not in placement.begun
    for child in supervisor._children.values():
        supervisor._dismiss(child)
    await asyncio.gather(*(child.task for child in supervisor._children.values() if child.task is not None))
    await supervisor.keeper.close()
