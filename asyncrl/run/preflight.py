"""Pre-flight checks of what a config names outside itself: files, functions, data and models."""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from pkgutil import resolve_name

import msgspec

from asyncrl.bus.errors import BusUnreachable
from asyncrl.bus.logins import given_logins, numbered
from asyncrl.child_pool.frames import Setup
from asyncrl.child_pool.pool import load_problems
from asyncrl.config.finding import Finding
from asyncrl.config.harness_settings import harness_name
from asyncrl.config.held_out import graded_tasks
from asyncrl.config.live_settings import judge_kind
from asyncrl.config.process_settings import placement_kind
from asyncrl.config.settings import Config
from asyncrl.config.trainers import trainer_kind
from asyncrl.config.worker_pools import reward_of_task, reward_tables
from asyncrl.environment_names import ROLLOUT
from asyncrl.environments.protocol import DataError
from asyncrl.files import secret_fault
from asyncrl.live.redaction import redaction_setup
from asyncrl.ports import is_ip, listen_problem
from asyncrl.rewards.kinds import BUILT_IN, reward_of
from asyncrl.rewards.rubrics import rubric_problem
from asyncrl.rewards.serving import reward_setup, rollout_setup
from asyncrl.run.autoscale_function import autoscale_setup
from asyncrl.run.preflight_harness import check_harnesses, harness_setups
from asyncrl.run.preflight_model import (
    check_adapters,
    check_algorithms,
    check_further_models,
    check_gateway,
    check_machine,
    check_model,
    check_routing_replay,
)
from asyncrl.run.preflight_quantised import check_quantised
from asyncrl.run.preflight_rows import check_data
from asyncrl.run.preflight_tools import check_tools, tool_setups
from asyncrl.run.reward_trial import label_faults
from asyncrl.run.sizing import plan
from asyncrl.run.user_actors import ActorsError, run_tables
from asyncrl.training.checkpoint import CheckpointError, read_checkpoint
from topics.roles import OPERATOR

ROLLOUTS = ("single_turn", ROLLOUT)

_JOB_FOLDERS = "working_dir_files"  # where Ray keeps what `ray job submit --working-dir` sends
_LEAST_MEMORY_MB = 128


def check_surroundings(config: Config, base: Path) -> list[Finding]:
    """Everything about what a config names outside itself that can be known before a start.

    User functions are loaded in child processes; data is opened and some of its rows are turned into tokens.

    Args:
        config: the settings.
    """
    checks = (
        _actors,
        _placement,
        _directory,
        _secrets,
        _logins,
        _ports,
        check_model,
        check_further_models,
        check_adapters,
        lambda config, base: trainer_kind(config.learner.trainer).preflight(config, base),
        check_routing_replay,
        check_quantised,
        check_gateway,
        check_algorithms,
        check_harnesses,
        check_tools,
        _start,
        _functions,
        _functions_beside,
        _data,
        _sinks,
    )
    return [*(finding for check in checks for finding in check(config, base)), *check_machine(config)]


def _actors(config: Config, base: Path) -> Iterator[Finding]:
    try:
        run_tables(config, base)
    except ActorsError as error:
        yield Finding(("actors",), str(error).removeprefix("actors: "))


def _placement(config: Config, base: Path) -> Iterator[Finding]:
    if check := placement_kind(config.placement.kind).check:
        yield from resolve_name(check)(config, base)


def _directory(config: Config, base: Path) -> Iterator[Finding]:
    wanted = Path(config.directory).resolve()
    if _JOB_FOLDERS in wanted.parts:
        message = f"{wanted} is in the working folder of a submitted job, which Ray replaces at the next submission"
        yield Finding(("directory",), f"{message}; name a folder that stays")
    if any(0xD800 <= ord(letter) < 0xE000 for letter in f"{wanted}{base}"):  # how Python writes other bytes
        yield Finding(("directory",), f"{wanted} and {base}: these paths must be UTF-8; messages carry them")
        return
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        message = f"{wanted} cannot be made: {there} is no folder that can be written; name another"
        yield Finding(("directory",), message)


def _secrets(config: Config, base: Path) -> Iterator[Finding]:
    tables = {"engine": config.engine, **config.engine.tables}
    of_servers = {f"{table}.api_key_file": group.of_kind for table, group in tables.items()}
    for key, name in (
        ("nats.password_file", config.nats.password_file),
        ("learner.teacher.api_key_file", config.learner.teacher.api_key_file),
        ("live.judge.api_key_file", config.live.judge.api_key_file),
        *((f"{table}.api_key_file", group.api_key_file) for table, group in tables.items()),
    ):
        if not name:
            continue
        path = base / name
        if found := secret_fault(path, header=key != "nats.password_file"):
            yield Finding((key,), f"{path}: found {found.lower()}, expected a readable file that holds the secret")
            continue
        kind = of_servers.get(key)
        if kind is not None and (found := kind.key_problem(path.read_text(encoding="utf-8").strip())):
            yield Finding((key,), f"{path}: {found}")


def _logins(config: Config, base: Path) -> Iterator[Finding]:
    given = [key for key in ("credentials", "nkey_file", "tls_ca", "tls_cert") if getattr(config.nats, key)]
    if not (given and config.nats.url):
        return
    try:
        nats = msgspec.structs.replace(config.nats, password_file="")  # it is read by _secrets
        logins = given_logins(nats, base, run_tables(config, base))
        for login in logins.values():
            login.login()
    except ActorsError:  # _actors has it
        return
    except (BusUnreachable, OSError, ValueError) as error:
        yield Finding(tuple(f"nats.{key}" for key in given), str(error))
        return
    served, name = logins[OPERATOR].runs, next_name(config)
    if served and name not in served:
        message = (
            f"its users serve {', '.join(served)}, and this run would be called {name}; name it otherwise, let them "
            f"serve it, too (asyncrl roles {name} --config {config.nats.credentials}, and reload the server), or "
            "remove runs that are over (asyncrl rm)"
        )
        yield Finding(("nats.credentials", "run"), message)


def next_name(config: Config) -> str:
    """Return the name of the next run of a config: one that is over keeps its name while its directory exists."""
    folder = Path(config.directory)
    return next(name for name in numbered(config.run) if not (folder / name).exists())


def _sinks(config: Config, _base: Path) -> Iterator[Finding]:
    for number, sink in enumerate(config.metrics):
        if problem := sink.problem():
            yield Finding((f"metrics.{number}", "metrics"), problem)


def _ports(config: Config, _base: Path) -> Iterator[Finding]:
    nats, gateway = config.nats, config.gateway
    if not nats.url and is_ip(nats.host) and nats.port + nats.servers <= 65536:
        ports = [nats.port + number if nats.port else 0 for number in range(nats.servers)]
        yield from _taken("nats", nats.host, ports)
    if gateway.count and config.placement.one_machine:
        yield from _taken("gateway", gateway.host, [gateway.port])
    elif gateway.count and not gateway.port:
        message = "is 0: which port is free on the host of the gateway is not known; name one"
        yield Finding(("gateway.port", "placement.kind"), message)


def _taken(table: str, host: str, ports: list[int]) -> Iterator[Finding]:
    problem = next(filter(None, (listen_problem(host, port) for port in ports)), "")
    if problem:
        yield Finding((f"{table}.port", f"{table}.host"), f"{problem}; name another address or port (0: any free one)")


def _start(config: Config, base: Path) -> Iterator[Finding]:
    if not config.start.checkpoint:
        return
    try:
        found = read_checkpoint(base / config.start.checkpoint)
    except CheckpointError as error:
        yield Finding(("start.checkpoint",), str(error))
        return
    if found.step != config.start.step:
        message = f"found {config.start.step}, the checkpoint is of step {found.step}"
        yield Finding(("start.step", "start.checkpoint"), message)


def _data(config: Config, base: Path) -> Iterator[Finding]:
    """Return the faults of the data, or else the required room: data that hangs while it opens is opened only once."""
    findings = list(check_data(config, base))
    yield from findings
    with suppress(DataError, OSError, ActorsError):  # reported already
        yield from label_faults(config, base) if not findings else ()
        yield from plan(config, base).shortages() if not findings else ()


def _limits(config: Config) -> Iterator[Finding]:
    """Find limits of reward workers, of each pool, in which their functions cannot work."""
    for table, own in reward_tables(config).items():
        if 0 < own.memory_mb < _LEAST_MEMORY_MB:
            message = f"found {own.memory_mb} MB, Python alone takes {_LEAST_MEMORY_MB}; raise it, or 0 for no limit"
            yield Finding((f"{table}.memory_mb",), message)
        if own.batch > own.in_flight:
            message = f"found {own.batch}, but a worker holds {table}.in_flight = {own.in_flight}; expected no more"
            yield Finding(("reward.batch", f"{table}.in_flight"), message)


def _functions(config: Config, base: Path) -> Iterator[Finding]:
    """User functions are loaded where rewards run, with their limits: a file may print, hang or exit at its import."""
    reward = config.reward
    yield from _limits(config)
    asked: dict[tuple[str, ...], Setup] = {}
    for task in graded_tasks(config).values():
        keys, known = task.keys("reward"), reward_of(task.reward)
        if known is None and task.reward:
            yield Finding(keys, _unknown_function(task.reward, [*BUILT_IN, "http://host:port/path"]))
        elif known is not None and known.judged:
            if problem := rubric_problem(base / task.reward, by_engines=bool(reward.judge_engines)):
                yield Finding((*keys, "reward.judge_engines"), problem)
        elif known is not None and known.loaded:
            how = reward_setup(
                task.reward,
                base=base,
                time_limit_s=reward_of_task(config, task.name).time_limit_s,
                memory_mb=reward_of_task(config, task.name).memory_mb,
                batch=2 if task.reward_scope == "group" else reward.batch,
                tournament=task.tournament,
            )
            asked |= {keys: how} if how is not None else {}
        if harness_name(task.rollout):
            continue
        if ":" in task.rollout:
            asked[task.keys("rollout")] = rollout_setup(task.rollout, base=base, time_limit_s=reward.time_limit_s)
        elif task.rollout not in ROLLOUTS:
            yield Finding(task.keys("rollout"), _unknown_function(task.rollout, ROLLOUTS))
    asked |= harness_setups(config, base, reward.time_limit_s) | tool_setups(config.tools, base)
    if reward.batch > 1 and not any(how.arguments.get("lists") for how in asked.values()):
        yield Finding(("reward.batch",), "has no effect: no reward is a function of yours; leave it out")
    yield from _not_loaded(asked)


def _not_loaded(asked: Mapping[tuple[str, ...], Setup]) -> Iterator[Finding]:
    for keys, problem in zip(asked, asyncio.run(load_problems(asked.values())), strict=True):
        if problem:
            yield Finding(keys, problem)


def _unknown_function(spec: str, known: Sequence[str]) -> str:
    """The message about what names neither something built in, nor a function, nor a server."""
    if spec.startswith(("http:", "https:")):
        return f'found "{spec}", expected http://host:port/path'
    near = difflib.get_close_matches(spec, known, n=1)
    meant = f"; did you mean {near[0]}?" if near else ""
    forms = "path/to/file.py:function or package.module:function"
    return f'found "{spec}", expected {", ".join(known)}, {forms}{meant}'


def _functions_beside(config: Config, base: Path) -> Iterator[Finding]:
    """The user's judge, redaction, and scaling function are loaded in the same way as at run time."""
    live, judge, autoscale, asked = config.live, config.live.judge, config.autoscale, dict[tuple[str, ...], Setup]()
    if config.gateway.count and ":" in live.redact:
        asked["live.redact",] = redaction_setup(live.redact, base=base, limit_s=live.redact_s)
    if judge.kind and (setup := judge_kind(judge.kind).setup(judge, base)) is not None:
        asked["live.judge.function",] = setup
    if ":" in autoscale.function:
        asked["autoscale.function",] = autoscale_setup(autoscale.function, base=base, limit_s=autoscale.limit_s)
    yield from _not_loaded(asked)
