"""`asyncrl dump`: write one batch of a run, or the conversations of a tenant, as plain files."""

from __future__ import annotations

import argparse
from pathlib import Path

import msgspec

from actors.learner.fetching import PayloadGone, fetch_trajectories
from actors.learner.retraining import read_training
from asyncrl.bus.connection import Bus
from asyncrl.bus.merged_reader import read_log
from asyncrl.cli.options import add_flag, add_option
from asyncrl.cli.target import add_run, any_run, read_topics
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.errors import WrongUsage
from asyncrl.live.exported import exported_turns
from asyncrl.run.connect import FoundRun
from asyncrl.state.records import spans_text
from asyncrl.state.samples import samples_of, training_batch
from asyncrl.training.dump import DumpError, write_dump
from topics.topic import TRAJECTORIES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser, "the newest")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--step", type=int, metavar="N", help="the step of the batch")
    add_flag(what, "--live", "write conversations of the gateway instead, one reply a line")
    add_option(parser, "--tenant TENANT", "", "with --live: the tenant whose conversations are written")
    words = "a new folder (default: RUN/dumps/stepN); with --live a new file (default: RUN/dumps/live-TENANT.jsonl)"
    add_option(parser, "--output PATH", "", words)


def run(arguments: argparse.Namespace) -> int:
    """Write it."""
    if bool(arguments.tenant) != arguments.live:
        raise WrongUsage("asyncrl dump --live needs --tenant TENANT, and --tenant needs --live")
    found = any_run(arguments)
    name = f"live-{arguments.tenant}.jsonl" if arguments.live else f"step{arguments.step:06d}"
    if found.root is None and not arguments.output:
        raise WrongUsage(f"run {found.run} has no directory here; name what to write with --output")
    out = Path(arguments.output) if arguments.output else found.files.root / "dumps" / name
    if out.exists():
        raise DumpError(f"{out} exists; name another one with --output")
    if arguments.live:
        _dump_live(found, arguments.tenant, out)
    else:
        read_topics(found, "dump", lambda bus: _dump_batch(bus, found, arguments.step, out))
    print(out)
    return 0


async def _dump_batch(bus: Bus, found: FoundRun, step: int, out: Path) -> None:
    log = await read_training(bus)
    packed, _ = log.batch(step)
    try:
        groups = await fetch_trajectories(bus, packed)
    except PayloadGone as error:
        await read_log(bus, TRAJECTORIES, log)
        kept = spans_text([step for step, (batch, _) in log.batches.items() if log.has_tokens(batch)])
        raise DumpError(f"{error}; batches with all tokens: {kept} (nats.keep = run keeps those of all)") from error
    _, samples = await samples_of(bus, training_batch(packed), found, 0)
    write_dump(out, bus.run, (packed, log.trained.get(packed.step)), groups, samples)


def _dump_live(found: FoundRun, tenant: str, out: Path) -> None:
    if found.root is None:
        raise WrongUsage(f"run {found.run} has no directory here, and its tokenizer is there; run this command there")
    tokenizer = TaskTokenizer.load(found.files.model_path(found.files.read_config().model))
    exported = read_topics(found, "dump", lambda bus: exported_turns(bus, tenant, tokenizer.decode_all))
    if not exported.turns:
        words = f"run {found.run} has no stored conversation of tenant {tenant!r}"
        raise DumpError(f"{words}; `asyncrl keys list` shows the tenants")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.touch(0o600, exist_ok=False)
    out.write_bytes(b"".join(msgspec.json.encode(turn) + b"\n" for turn in exported.turns))
    if exported.unreadable:
        print(f"{exported.unreadable} messages of all tenants cannot be read: they were purged, or are damaged")
