"""Limits of streams: a run that cannot fit is refused at its start, and one with a full stream waits for room."""

import asyncio
import contextlib
import json
import math
import re
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusGone, ServerFull
from asyncrl.bus.provision import UNLIMITED, equal_sizes, held_bytes, provision, stream_states
from asyncrl.bus.publish import publish
from asyncrl.bus.server import EmbeddedServer, find_server
from asyncrl.config.load import load_config
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.stream_capacity import MB, PAUSE_SHARE, Needs, needs, store_limit
from asyncrl.errors import LaunchError
from asyncrl.ports import free_port
from asyncrl.run.preflight import check_surroundings
from asyncrl.run.sizing import Plan, plan, provision_sized
from asyncrl.state.records import StreamFill
from harness import gyms
from harness.audited import audited_clean, topics_left_by
from harness.configs import the_problem
from harness.disks import leave_free, small_disk
from harness.runs import Run, address_of, command, resume, up
from harness.scripted import FLAT, SCRIPTED
from harness.stage import Connect, Stage, until
from harness.states import MadeState
from topics.topic import GRADES, PROMPTS, STREAMS, TRAJECTORIES, Retention
from topics.trajectories import ARTEFACT_BYTES, ARTEFACTS, METRICS, TURNS, Outcome, Segment, TrajectoryGenerated

SLOW = pytest.mark.slow


def config_of(**tables: object) -> Config:
    return msgspec.convert(tables, Config)


# --- what is needed


def test_payload_follows_from_the_longest_trajectory():
    def found(**tables: object) -> Needs:
        return needs(config_of(model={"create": {"context": 100}}, **tables), 300)

    batch = 64 * 8 * (100 * 18 + 300 + 700)
    short, long = found(rollout={"max_new_tokens": 64}), found(rollout={"max_new_tokens": 65})
    assert short.tokens == math.ceil(5 * batch / PAUSE_SHARE)  # 3 open with max_lag = 2, 2 between checkpoints
    assert short.tokens_kept == (3 + 2 * 20) * batch
    assert long.tokens_kept - short.tokens_kept == 3 * batch  # progress, which 64 tokens do not store


def test_experts_of_tokens_take_room():
    config = config_of(rollout={"max_new_tokens": 64}, model={"create": {"context": 100}})
    before, after = (needs(config, 300, route_bytes=size) for size in (0, 384))

    assert after.tokens_kept - before.tokens_kept == (3 + 2 * 20) * 64 * 8 * 100 * 384
    assert after.logs == before.logs


async def test_the_largest_trajectory_with_all_that_its_function_may_give_takes_no_more_than_is_counted(
    bus: Bus, stage: Callable[..., Stage]
):
    tables = {"rollout": {"max_new_tokens": 400}, "model": {"create": {"context": 512}}}
    built_in, own = (needs(config_of(**tables, **task), 0) for task in ({}, {"task": {"rollout": "guess.py:rollout"}}))
    counted = (own.tokens_made - own.tokens_kept) / (64 * 8 * (LearnerSettings().steps - LearnerSettings().kept_steps))
    await stage().open()
    artefacts = {f"{number:064}": b"x" * (ARTEFACT_BYTES // ARTEFACTS) for number in range(ARTEFACTS)}
    metrics = {f"{number:064}": 0.1 for number in range(METRICS)}
    segment = Segment(*(np.zeros(512, kind) for kind in ("<i4", "u1", "<f4", "<i4")))
    before = (await stream_states(bus, [TRAJECTORIES]))["TRAJECTORIES"]["bytes"]
    await publish(
        bus,
        TrajectoryGenerated(
            **{"trajectory_id": "p000000-0", "prompt_id": "p000000", "member": 0, "group_size": 1, "stage": "rl"},
            rows=[],
            segments=[segment],
            completion="a" * 400,
            versions=[],
            outcome=Outcome(0.5, metrics, artefacts, [0.1] * TURNS),
        ),
    )
    stored = (await stream_states(bus, [TRAJECTORIES]))["TRAJECTORIES"]["bytes"] - before

    assert 0.5 * counted < stored <= counted
    assert built_in.tokens < own.tokens / 4  # a built-in rollout gives none, and needs less


def test_a_size_without_room_for_artefacts_is_refused_where_the_rollout_function_may_give_them(tmp_path: Path):
    (tmp_path / "guess.py").write_text("async def rollout(row, context): ...\n")
    (tmp_path / "config.toml").write_text(SCRIPTED)
    own = f"task.rollout={tmp_path / 'guess.py'}:rollout"

    load_config(str(tmp_path / "config.toml"), overrides=["nats.stream_max_mb=2"], further=check_surroundings)
    found = the_problem(str(tmp_path / "config.toml"), "nats.stream_max_mb=2", own, files=True)

    assert re.match(r"2 MB are too little: the run needs \d+ MB for tokens", found.message)


async def test_a_row_that_is_never_made_holds_up_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gyms.put_in_place(tmp_path, monkeypatch)
    config = config_of(task={"source": "reasoning-gym:hangs", "row_limit_s": 600})  # its third row never ends

    planned = await asyncio.wait_for(asyncio.to_thread(plan, config, tmp_path), 300)

    assert 20 < planned.row_bytes < 100  # of the rows before it


def test_logs_grow_with_steps_trajectories_and_rows():
    def log(steps: int, groups: int, size: int, row_bytes: int) -> int:
        tables = {"learner": {"steps": steps}, "buffer": {"batch_groups": groups}, "rollout": {"group_size": size}}
        return needs(config_of(**tables), row_bytes).log

    least = log(1000, 64, 8, 100)
    assert log(2000, 64, 8, 100) == pytest.approx(2 * least, rel=0.01)
    assert log(1000, 128, 8, 100) == pytest.approx(2 * least, rel=0.01)
    assert log(1000, 64, 8, 4100) - least == 1000 * 64 * 4000  # a row is stored once for its group


# --- what does not fit


@pytest.mark.parametrize(
    ("setting", "steps", "parts"),
    [
        ("nats.ledger_max_mb=1", 1000, ["1 MB are too little: the run needs 31", "MB for the largest log. Set nats."]),
        ("nats.stream_max_mb=3", 130, ["3 MB are too little: the run needs 6 MB for tokens. Set nats.stream_max_mb"]),
        ("nats.disk_max_mb=100", 1000, ["and there is room for 8", "learner.steps = 1", " would fit"]),
    ],
)
def test_what_cannot_fit_is_refused_with_the_setting_to_raise(setting: str, steps: int, parts: list[str]):
    found = the_problem("demo", setting, f"learner.steps={steps}", "learner.schedule=constant", files=True)

    assert found.key == f"--set {setting.partition('=')[0]}"
    for part in [*parts, f"({steps:,} steps of 512 trajectories; a row of the data has 3"]:
        assert part in found.message


def test_a_stream_of_tokens_takes_a_part_of_a_small_disk():
    need = needs(Config(), 100)
    least, most = (
        Plan(Config(), 100, need, Path("/"), need.files + room * MB).payload_limit for room in (300, 1_000_000)
    )

    assert least == need.tokens < most == need.ample


def test_moments_in_bfloat16_take_half_of_their_part_of_the_checkpoints():
    found = [needs(Config(learner=LearnerSettings(moments=kind)), 0, MB).files for kind in ("float32", "bfloat16")]

    assert found[0] - found[1] == 4 * MB * (Config().learner.keep_checkpoints + 1)


def test_long_rows_are_counted(tmp_path: Path):
    rows = [{"prompt": "^ab=", "label": "ba", "metadata": {"text": "x" * 4000}} for _ in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").write_text(SCRIPTED.replace("{ letters = 4 }", "{}"))
    sizes = ("nats.ledger_max_mb=20", "nats.stream_max_mb=0", "learner.steps=4000")

    found = the_problem(str(tmp_path / "config.toml"), f"task.source={tmp_path}/rows.jsonl", *sizes, files=True)

    assert re.search(r"the run needs 2\d\d MB for the largest log", found.message)
    assert "a row of the data has 4,0" in found.message


async def test_check_prints_what_streams_need_and_may_hold(tmp_path: Path):
    code, output = await command(tmp_path, "check", "demo", "--set", "nats.disk_max_mb=1000")

    assert code == 0, output
    assert output.splitlines()[0] == "ok"
    assert re.search(r"streams need \d+ MB: \d+ for logs, 6 for tokens \(each stream of tokens: at most 76 MB", output)
    assert "nats.disk_max_mb = 1,000" in output


# --- servers


@contextlib.asynccontextmanager
async def server_of_another(folder: Path, megabytes: int) -> AsyncIterator[BusAddress]:
    """A NATS server with a store of this size."""
    port = free_port()
    config = folder / "somebody.conf"
    config.write_text(
        f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{folder / "store"}", max_file_store: {megabytes}MB }}\n'
    )
    process = await asyncio.create_subprocess_exec(find_server(), "-c", str(config), stderr=subprocess.DEVNULL)
    try:
        yield BusAddress(f"nats://127.0.0.1:{port}")
    finally:
        process.kill()
        await process.wait()


async def test_a_server_without_room_keeps_nothing(tmp_path: Path):
    async with server_of_another(tmp_path, 100) as address:
        bus = await Bus.connect(address, "a-run")
        with pytest.raises(ServerFull, match=r"reserve 220 MB on the NATS server, more than its max_file_store"):
            await provision(bus, equal_sizes(payload_mb=30, ledger_mb=10), lease_s=1)
        assert await held_bytes(bus) == {}
        await bus.close()


async def test_streams_take_the_room_that_a_server_has_and_keep_it_when_a_run_resumes(tmp_path: Path):
    config = config_of(run="a-run", nats={"url": "nats://somebody:4222"}, learner={"steps": 100})
    async with server_of_another(tmp_path, 250) as address:  # too little for two streams of ample size
        bus = await Bus.connect(address, "a-run")
        sizes = await provision_sized(bus, config, tmp_path, tmp_path)
        found = await stream_states(bus)
        assert {name: state["max_bytes"] for name, state in found.items()} == sizes
        assert sizes["PROMPTS"] == UNLIMITED
        assert sizes["TRAJECTORIES"] == plan(config, tmp_path).needs.tokens
        await bus.close()

    async with server_of_another(tmp_path, 50) as address:  # its disk has become smaller
        bus = await Bus.connect(address, "a-run")
        assert await provision_sized(bus, config, tmp_path, tmp_path) == sizes
        config.nats.stream_max_mb = 60
        with pytest.raises(ServerFull):
            await provision_sized(bus, config, tmp_path, tmp_path)
        await bus.close()


async def test_a_run_that_was_stopped_at_a_full_log_resumes_only_with_more_room(bus: Bus, tmp_path: Path):
    config = config_of(run=bus.run, learner={"steps": 1}, nats={"ledger_max_mb": 1}, directory=str(tmp_path))
    await provision_sized(bus, config, tmp_path, tmp_path)
    for number in range(90):
        await bus.store(f"asyncrl.{bus.run}.trajectory.graded.p{number:06d}-0", b"x" * 10_000, {})

    with pytest.raises(LaunchError, match=r"nats\.ledger_max_mb: 1 MB are too little: the run needs 2 MB"):
        await provision_sized(bus, config, tmp_path, tmp_path)
    config.nats.ledger_max_mb = 2
    await provision_sized(bus, config, tmp_path, tmp_path)


async def test_a_run_that_fits_into_a_small_part_of_the_disk_gets_its_streams(tmp_path: Path):
    config = config_of(
        run="a-run",
        directory=str(tmp_path),
        nats={"disk_max_mb": 60},
        buffer={"batch_groups": 8},
        rollout={"group_size": 4},
        learner={"steps": 60},
    )
    server = EmbeddedServer(tmp_path / "a-run")
    server.most_bytes = store_limit(config.nats)
    try:
        bus = await Bus.connect(await server.start(), "a-run")
        sizes = await provision_sized(bus, config, tmp_path, server.directory)
        await bus.close()
    finally:
        await server.stop()

    assert 0 < sizes["DEAD"] < 10 * MB
    assert sum(sizes[name] for name in ("TRAJECTORIES", "BLOBS", "DEAD", "HISTORY")) < 50 * MB


async def test_a_server_whose_streams_may_take_no_more_of_the_disk_takes_messages_again_with_more_room(tmp_path: Path):
    server = EmbeddedServer(tmp_path)
    server.most_bytes = 20 * MB
    subject = "asyncrl.a-run.trajectory.graded.p000000-0"
    try:
        bus = await Bus.connect(await server.start(), "a-run", publish_deadline_s=0.5)
        await provision(bus, equal_sizes(payload_mb=1, ledger_mb=UNLIMITED), lease_s=1)
        with pytest.raises(BusGone, match="insufficient resources"):
            for _ in range(200):
                await bus.store(subject, b"x" * 200_000, {})
        held = (await stream_states(bus, [GRADES]))["GRADES"]
        assert 18 * MB < held["bytes"] < 21 * MB

        await server.stop()
        server.most_bytes = 40 * MB
        await server.start()
        await bus.store(subject, b"x" * 200_000, {})
        assert (await stream_states(bus, [GRADES]))["GRADES"]["messages"] == held["messages"] + 1
        await bus.close()
    finally:
        await server.stop()


async def test_a_full_log_takes_messages_again_when_it_is_given_more_room(bus: Bus, connect: Connect):
    hasty = await connect(bus.run, publish_deadline_s=0.5)
    await provision(bus, equal_sizes(payload_mb=64, ledger_mb=1), lease_s=1)
    subject = f"asyncrl.{bus.run}.trajectory.graded.p000000-0"
    with pytest.raises(BusGone, match="maximum bytes exceeded"):
        for _ in range(200):
            await hasty.store(subject, b"x" * 10_000, {})
    held = (await stream_states(bus, [GRADES]))["GRADES"]

    await provision(bus, equal_sizes(payload_mb=64, ledger_mb=2), lease_s=1)
    await hasty.store(subject, b"x" * 10_000, {})

    assert (await stream_states(bus, [GRADES]))["GRADES"]["messages"] == held["messages"] + 1


def test_streams_that_fill_their_part_of_the_disk_are_found():
    case = MadeState()
    case.state.config.nats.disk_max_mb = 1000
    case.state.streams["PROMPTS"] = StreamFill(830_000_000, -1)

    assert case.found() == [("stream full", "all streams")]
    assert case.evidence().startswith("830.0 of 833 MB are used (nats.disk_max_mb = 1000)")


# --- whole runs


async def stopped_after(run: Run, steps: int) -> None:
    """Stop a run by hand once it has trained so many steps more."""
    at = len(run.steps())
    await run.reaches(lambda: len(run.steps()) >= at + steps, f"{steps} steps more")
    run.interrupt()
    assert await run.ended() == 0, run.story


@pytest.mark.nightly
async def test_a_run_that_fits_goes_on_whatever_the_disk_did_meanwhile(tmp_path: Path):
    disk = tmp_path / "runs"
    with small_disk(disk, 1000):
        code, output = await command(tmp_path, "check", "demo")
        assert (code, output.splitlines()[0]) == (0, "ok"), output
        settings = ["nats.stream_max_mb=0", "learner.steps=120", "learner.checkpoint_every=20"]
        settings += ["learner.scripted_step_s=0.1"]  # few steps pass while it is being stopped
        async with up(tmp_path, *settings, config=SCRIPTED) as run:
            await stopped_after(run, 5)
        leave_free(disk, 320)
        async with resume(tmp_path, "short") as run:
            await stopped_after(run, 5)
        leave_free(disk, 150)
        async with resume(tmp_path, "short") as run:
            assert await run.ended() == 1, run.story
        reason = r"and there is room for 0 MB in \S+ \(1\d\d MB free, of which 200 stay free"
        assert re.search(reason, run.error)
        leave_free(disk, 320)
        async with resume(tmp_path, "short") as run:
            assert await run.ended() == 0, run.story
            assert run.summary["steps"] == 120
        await audited_clean(tmp_path)
        async with topics_left_by(run) as bus:
            held, states = await held_bytes(bus), await stream_states(bus, [PROMPTS])
        config = msgspec.json.decode((run.root / "config.json").read_bytes(), type=Config)
        needed = (await asyncio.to_thread(plan, config, tmp_path)).needs
        # Groups are dropped for their age, whose prompts are replaced: how often depends on the machine.
        more = max(1.0, states["PROMPTS"]["messages"] / run.summary["trajectories_trained"])
        logs = sum(held[stream.name].stored for stream in STREAMS if stream.keep is Retention.LEDGER)
        assert 0.5 < held["PROMPTS"].stored / needed.log / more < 1.1, (held, needed)
        assert 0.5 < logs / needed.logs / more < 1.1, (held, needed)


@SLOW
async def test_a_run_that_stands_still_on_a_full_log_goes_on_with_more_room(tmp_path: Path):
    """Half of the groups are dropped: the log of prompts grows twice as fast as the settings say."""
    (tmp_path / "flat.py").write_text(FLAT)
    rows = [{"prompt": "^ab=", "label": "flat" if number % 2 else "ba"} for number in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["task.source=rows.jsonl", "task.options={}", "reward.function=flat.py:reward", "learner.steps=45"]
    settings += ["learner.filters=['zero_variance']", "warmup.steps=0", "nats.ledger_max_mb=1"]
    async with up(tmp_path, *settings, config=SCRIPTED) as run:
        await run.reaches(lambda: len(run.steps()) >= 1, "its first step")
        bus = await Bus.connect(address_of(run), "short")

        async def full() -> bool:
            state = (await stream_states(bus, [PROMPTS]))["PROMPTS"]
            return bool(state["bytes"] > 0.985 * state["max_bytes"])

        await until(full, "a full log")
        await bus.close()
        code, output = await command(tmp_path, "doctor")
        assert (code, "stream full: PROMPTS" in output) == (1, True), output
        at = len(run.steps())
        run.interrupt()
        assert await run.ended() == 0, run.story
    async with resume(tmp_path, "short", "--set", "nats.ledger_max_mb=100") as run:
        assert await run.ended() == 0, run.story
    assert at < 45 == len(run.steps())
    await audited_clean(tmp_path)
