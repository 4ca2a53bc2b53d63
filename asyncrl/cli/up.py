"""`asyncrl up`: start a run here, or resume one, and watch it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusError
from asyncrl.cli.options import add_flag, add_option
from asyncrl.cli.output import Terminal, add_json
from asyncrl.cli.target import add_config, add_settings, given_config
from asyncrl.config.hints import hints
from asyncrl.config.load import ConfigError, load_config
from asyncrl.config.settings import Config
from asyncrl.errors import AsyncRLError, LaunchError, WrongUsage
from asyncrl.models.get import get_model
from asyncrl.models.known import KNOWN, kept_at
from asyncrl.own_code import use_copies
from asyncrl.page.report import write_report
from asyncrl.page.serve import served_page
from asyncrl.run.connect import FoundRun, find_run
from asyncrl.run.detach import detached, on_hangup
from asyncrl.run.first_keys import served_lines
from asyncrl.run.inputs import Accepted
from asyncrl.run.launch import Launch
from asyncrl.run.preflight import check_surroundings
from asyncrl.run.sizing import plan
from asyncrl.state.live_screen import RunView, shown
from asyncrl.state.published import follow_status
from asyncrl.state.status import run_status
from asyncrl.state.summary import summary_panel, summary_text
from asyncrl.state.watch import read_state
from topics.roles import MONITOR
from topics.runs import RunStatus

T = TypeVar("T")
_END_S = 10.0  # to read the logs of a run that ended
_REPORT_S = 60.0  # to read the data of its report

Work: TypeAlias = Callable[[Bus, RunView], Coroutine[Any, Any, None]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config(parser)
    add_settings(parser)
    add_option(parser, "--run NAME", "", "id of the run (default: the config's)", "run_id")
    add_option(parser, "--only ROLES", "", "run only these roles; `engine`, for example, makes a run that only serves")
    add_option(parser, "--resume RUN", "", "continue a stopped or crashed run, given by its id or directory")
    add_option(parser, "--skip-batch N", int, "with --resume: skip batch N, which cannot be trained")
    add_flag(parser, "--accept-data", "with --resume: continue although data files differ from those it began with")
    add_flag(parser, "--refresh-code", "with --resume: take your current code files, not the run's copies")
    add_flag(parser, "--web", "serve the page of the run on loopback, and print its URL")
    add_flag(parser, "--detach", "return once the run has started; it continues in the background")
    add_json(parser, "with --detach: at the end the id and directory of the run as one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Start, watch, and end the run; returns 0 when it finished or was asked to stop, else 1."""
    import uvloop

    given = {"skip-batch": arguments.skip_batch is not None, "accept-data": arguments.accept_data}
    for name in [name for name, is_given in (given | {"refresh-code": arguments.refresh_code}).items() if is_given]:
        if not arguments.resume:
            raise LaunchError(f"--{name} is for a run that continues: give --resume RUN, too")
    if arguments.web and arguments.detach:
        raise WrongUsage("--web serves the page while this process runs; with --detach, start `asyncrl web` afterwards")
    launch = _resumed(arguments) if arguments.resume else _new(arguments)
    launch.prepare()
    name = launch.config.run
    print("\n".join([f"run {name} in {launch.files.root}", *launch.changes]), flush=True)
    if not arguments.detach:
        with contextlib.ExitStack() as pages:
            return int(uvloop.run(bring_up(launch, lambda: _serve_page(launch, pages) if arguments.web else None)))
    output = launch.files.root / "up.log"
    ready, words = detached(output, lambda on_started: int(uvloop.run(bring_up(launch, on_started))))
    if not ready:
        print(words or f"run {name} did not start; see {output}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"run": name, "directory": str(launch.files.root)}))
    else:
        print(f"it continues in the background: asyncrl status {name}, asyncrl down {name}; its output is in {output}")
    return 0


def _serve_page(launch: Launch, pages: contextlib.ExitStack) -> None:
    """Serve the page until the end of the command."""
    url = pages.enter_context(served_page(FoundRun(launch.config.run, launch.files.root), MONITOR))
    print(f"page {url}", flush=True)


def _new(arguments: argparse.Namespace) -> Launch:
    overrides = [*arguments.set, *([f"run={arguments.run_id}"] if arguments.run_id else [])]
    overrides += [f"only={arguments.only.split(',')}"] if arguments.only else []
    config = given_config(arguments)
    with contextlib.suppress(ConfigError):  # every problem of the config is reported at once below
        _fetch_known_models(load_config(config, overrides=overrides).config)
    loaded = load_config(config, overrides=overrides, further=check_surroundings)
    launch = Launch(loaded)
    for hint in (*loaded.warnings, *hints(launch.config), *plan(launch.config, launch.base).hints()):
        print(f"hint: {hint}")
    return launch


def _fetch_known_models(config: Config) -> None:
    """Fetch the known models that a config names and the user's cache does not hold yet."""
    named = {config.model.path, config.learner.teacher.model, config.learner.critic.model}
    for name in KNOWN:
        folder = kept_at(name)
        if str(folder) in named and not folder.exists():
            get_model(name, folder, lambda line: print(line, flush=True))


def _resumed(arguments: argparse.Namespace) -> Launch:
    if arguments.config or arguments.run_id or arguments.only:
        raise LaunchError("--resume continues a run with its config and id; give neither a config nor --run nor --only")
    found = find_run(arguments.resume, Path("runs"), live=False)
    if not arguments.refresh_code:
        use_copies(found.files.root)
    launch = Launch.of(found.files.root, arguments.set)
    launch.skip_batch = arguments.skip_batch
    launch.accepted = Accepted(data=arguments.accept_data, code=arguments.refresh_code)
    return launch


async def bring_up(launch: Launch, on_started: Callable[[], None] = lambda: None, work: Work | None = None) -> int:
    """Start a prepared run, watch it and end it; returns the exit code.

    Args:
        on_started: is called once the run has started.
        work: the run is stopped when this has ended.
    """
    view = RunView()
    launch.report = lambda text: view.report("warning", text)
    stop = _on_interrupt(launch, view)
    bus: Bus | None = None
    try:
        bus = await _unless(stop.wait(), launch.start())
        if bus is not None:
            if launch.changes:
                print(f"current inputs count from step {launch.trained + 1}", flush=True)
            print(*served_lines(launch.config.gateway, launch.files), sep="", end="", flush=True)
            on_started()
        reason = "" if bus is None else await _watch(launch, bus, view, stop, work)
    except AsyncRLError as error:
        reason = str(error)
    finally:
        await launch.stop()
    if bus is not None and (figures := launch.files.read_summary()):
        figures |= {"report": str(launch.files.report)} if launch.files.report.exists() else {}
        console = Terminal()
        console.print(summary_panel(figures)) if console.is_terminal else print(summary_text(figures))
        if not (figures["finished"] or reason or work):
            print(f"to continue: asyncrl up --resume {launch.files.root}")
    elif not reason and (bus is None or launch.files.end == "not begun"):
        print(f"stopped before it trained; to continue: asyncrl up --resume {launch.files.root}")
    elif not reason:
        print(f"no summary of run {launch.config.run} was written: see {launch.files.logs}/recorder-1.log")
    if reason:
        if bus is not None:
            with contextlib.suppress(OSError):  # its disk may be full
                launch.files.failure.write_text(reason, encoding="utf-8")
        print(f"run {launch.config.run} failed: {reason}\nlogs: {launch.files.logs}", file=sys.stderr)
    return 1 if reason else 0


async def _watch(launch: Launch, bus: Bus, view: RunView, stop: asyncio.Event, work: Work | None) -> str:
    """Show the run until it has ended; returns why it failed, or nothing."""
    published = await follow_status(bus, view.take)
    async with shown(view, Terminal()):
        ended = launch.ended()
        code = await _unless(stop.wait(), ended if work is None else _unless(work(bus, view), ended))
        if code is None:
            if view.status is not None:
                view.status.state = "stopping"
            code = await launch.dismiss()
        await published.close()
        failure = await _show_end(launch, bus, view)
    await bus.close()
    if launch.killed:
        return f"killed by a second interrupt; to continue: asyncrl up --resume {launch.files.root}"
    return launch.failure or failure or (f"the supervisor ended with {launch.supervisor_end}" if code else "")


async def _show_end(launch: Launch, bus: Bus, view: RunView) -> str:
    """Show what the supervisor did not publish before it ended, from the logs; returns why the run failed, or nothing.

    A server that cannot be asked any more leaves the published state.
    """
    try:
        async with asyncio.timeout(_END_S):
            state = await read_state(bus)
    except (BusError, TimeoutError):
        return ""
    status = run_status(state, time.time_ns(), state.take_events())
    view.take_end(status)
    if launch.config.recorder.report and not launch.killed:
        await _report(launch, bus, view, status)
    return state.failure


async def _report(launch: Launch, bus: Bus, view: RunView, status: RunStatus) -> None:
    """Write `report.html`; a report that cannot be written fails no run."""
    files = launch.files
    files.report.unlink(missing_ok=True)  # of the part before a resumption
    try:
        async with asyncio.timeout(_REPORT_S):
            await write_report(files.report, bus, status, files.model_path(launch.config.model), files.metrics)
    except (AsyncRLError, OSError, TimeoutError) as error:
        reason = f"reading its data took more than {_REPORT_S:.0f} s" if isinstance(error, TimeoutError) else error
        view.report("warning", f"report.html is not written: {reason}; write it with asyncrl report {files.root.name}")


def _on_interrupt(launch: Launch, view: RunView) -> asyncio.Event:
    """An event that the first Ctrl-C (or SIGTERM) sets; the second kills."""
    stop = asyncio.Event()

    def interrupt() -> None:
        if stop.is_set():
            launch.kill()
            return
        stop.set()
        if view.status is None:
            print("stopping", file=sys.stderr, flush=True)  # nothing is shown yet
        else:
            words = "stopping: all actors finish or hand back their work; Ctrl-C again kills"
            view.report("news", words)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, interrupt)
    loop = asyncio.get_running_loop()
    on_hangup(lambda: loop.call_soon_threadsafe(stop.set))
    return stop


async def _unless(other: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of some work, or None when other work ended first."""
    ending, working = asyncio.create_task(other), asyncio.create_task(work)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        ending.result()
        return None
    finally:
        for task in (working, ending):
            task.cancel()
        await asyncio.wait({working, ending})
