"""Sizes of streams: what a run needs follows from its settings, what does not fit is refused, what fits goes on."""

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

from asyncrl.algorithms.contract import some_tokens
from asyncrl.algorithms.losses import LOSSES
from asyncrl.algorithms.sums import metrics
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusGone, ServerFull
from asyncrl.bus.provision import equal_sizes, held_bytes, provision, stream_states
from asyncrl.bus.publish import publish
from asyncrl.bus.server import find_server
from asyncrl.config.load import load_config
from asyncrl.config.settings import Config, LearnerSettings
from asyncrl.config.stream_capacity import MB, Progress, files_bytes, needs, needs_of_the_rest, payload_room
from asyncrl.errors import LaunchError
from asyncrl.ports import free_port
from asyncrl.run.preflight import check_surroundings
from asyncrl.run.sizing import Plan, plan, provision_sized
from harness import gyms
from harness.audited import audited_clean, topics_left_by
from harness.configs import the_problem
from harness.disks import leave_free, small_disk
from harness.runs import Run, address_of, command, resume, up
from harness.scripted import FLAT, SCRIPTED
from harness.stage import Connect, Stage, until
from topics.batches import BatchTrained
from topics.topic import GRADES, PROMPTS, STREAMS, TRAJECTORIES
from topics.trajectories import ARTEFACT_BYTES, ARTEFACTS, METRICS, TURNS, Outcome, Segment, TrajectoryGenerated
from topics.wire import encode

SLOW = pytest.mark.slow


def config_of(**tables: object) -> Config:
    return msgspec.convert(tables, Config)


# --- what is needed


def test_payload_follows_from_the_longest_trajectory():
    room = payload_room(config_of(rollout={"max_new_tokens": 64}, model={"create": {"context": 100}}), 300)

    assert room.trajectory == 100 * 18 + 300 + 700
    assert room.batch == 64 * 8 * room.trajectory
    assert room.least == 5 * room.batch  # 3 open with max_lag = 2, 2 between checkpoints
    assert room.full == (3 + 2 * 20) * room.batch


@pytest.mark.parametrize("max_lag", [0, 1, 5, 100])
def test_the_figures_of_a_step_by_lag_take_no_more_than_is_counted(max_lag: int):
    logprobs, tokens = some_tokens(np.random.default_rng(0), LOSSES["ppo"](), rows=300)
    lags = tokens.rows % (max_lag + 1)
    _, sums = LOSSES["ppo"]()(logprobs, tokens._replace(in_queue=lags, in_flight=lags))
    trainers = ("loss", "grad_norm", "learning_rate", "rows", "rows_skipped", "entropy", "train_s")
    figures = metrics(sums) | dict.fromkeys(trainers, 0.1)
    message = BatchTrained(9, 0, "rl", figures, dict.fromkeys(range(9), 10**6), 0, [0.5, 0.1], 512, 10**6)

    counted = needs(config_of(buffer={"max_lag": max_lag}, learner={"publish_every": 10**6}), 0)["TRAINING"].step
    assert len(encode(message)) < counted < 2 * len(encode(message))


async def test_the_largest_trajectory_with_all_that_its_function_may_give_takes_no_more_than_is_counted(
    bus: Bus, stage: Callable[..., Stage]
):
    tables = {"rollout": {"max_new_tokens": 400}, "model": {"create": {"context": 512}}}
    result = payload_room(config_of(**tables, task={"rollout": "guess.py:rollout"}), 0).batch / (64 * 8)
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

    assert 0.8 * result < stored <= result
    assert payload_room(config_of(**tables), 0).trajectory < stored  # a built-in rollout gives none, and needs less


def test_a_size_without_room_for_artefacts_is_refused_where_the_rollout_function_may_give_them(tmp_path: Path):
    (tmp_path / "guess.py").write_text("async def rollout(row, context): ...\n")
    (tmp_path / "config.toml").write_text(SCRIPTED)
    own = f"task.rollout={tmp_path / 'guess.py'}:rollout"
    needed = needs(load_config(str(tmp_path / "config.toml"), overrides=[own]).config, 100)["TRAJECTORIES"].least
    size = f"nats.stream_max_mb={needed // MB}"

    load_config(str(tmp_path / "config.toml"), overrides=[size], further=check_surroundings)
    found = the_problem(str(tmp_path / "config.toml"), size, own, files=True)

    assert f"MB are too little: the run needs TRAJECTORIES {math.ceil(needed / MB)} MB" in found.message


async def test_a_row_that_is_never_made_holds_up_no_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    gyms.put_in_place(tmp_path, monkeypatch)
    config = config_of(task={"source": "reasoning-gym:hangs", "row_limit_s": 600})  # its third row never ends

    planned = await asyncio.wait_for(asyncio.to_thread(plan, config, tmp_path), 300)

    assert 20 < planned.row_bytes < 100  # of the rows before it


def test_progress_of_long_trajectories_takes_room_too():
    room = payload_room(config_of(rollout={"max_new_tokens": 1000, "progress_tokens": 100}), 0)
    assert room.trajectory > 512 * 18 + 512 * 12 + 2 * 5 * 256


def test_ledgers_grow_with_steps_trajectories_and_rows():
    def prompts(steps: int, groups: int, size: int, row_bytes: int) -> int:
        tables = {"learner": {"steps": steps}, "buffer": {"batch_groups": groups}, "rollout": {"group_size": size}}
        return needs(config_of(**tables), row_bytes)[PROMPTS.name].least

    least = prompts(1000, 64, 8, 100)
    assert prompts(2000, 64, 8, 100) == pytest.approx(2 * least, rel=0.01)
    assert prompts(1000, 128, 8, 100) == pytest.approx(2 * least, rel=0.01)
    assert prompts(1000, 64, 8, 4100) - least == 1000 * 64 * 4000  # a row is stored once for its group
    assert all(need.ample >= need.least for need in needs(Config(), 100).values())


def test_weights_take_room_on_the_server_only_where_they_lie_there():
    tables = {"learner": {"keep_versions": 5}, "engine": {"count": 3}}
    beside, there = (needs(config_of(**tables, weights={"store": store}), 10, 10 * MB) for store in ("files", "stream"))

    assert beside["WEIGHTS"].least == MB
    assert there["WEIGHTS"].least == pytest.approx(8 * 56 * MB, rel=0.02)  # float32, and the tokenizer
    assert there["WEIGHTS"].ample > there["WEIGHTS"].least + 6 * 56 * MB  # of engines, and of the channel `live`
    gated = needs(config_of(**tables, weights={"store": "stream", "gate_metric": "accuracy"}), 10, 10 * MB)
    assert gated["WEIGHTS"].least == pytest.approx(16 * 56 * MB, rel=0.02)  # three live ones, five under evaluation
    deltas = needs(config_of(**tables, weights={"store": "stream", "delta": "auto", "full_every": 9}), 10, 10 * MB)
    assert deltas["WEIGHTS"].least == pytest.approx((8 * 56 + 8 * 40) * MB, rel=0.02)  # and what the oldest stands on


def test_a_size_without_room_for_the_versions_that_are_kept_is_refused(tmp_path: Path):
    (tmp_path / "config.toml").write_text(SCRIPTED)
    words = ["weights.store=stream", "nats.stream_max_mb=50"]

    load_config(str(tmp_path / "config.toml"), overrides=words[1:], further=check_surroundings)
    found = the_problem(str(tmp_path / "config.toml"), *words, files=True)

    assert "50 MB are too little: the run needs WEIGHTS" in found.message


def test_large_batches_and_snapshots_lie_in_blob_streams():
    small, large = [needs(config_of(buffer={"batch_groups": groups}), 10) for groups in (64, 4096)]

    assert (small["LEDGER_BLOBS"].step, large["LEDGER_BLOBS"].step > 4096 * 8 * 100) == (0, True)
    assert large["BATCHES"].step < large["LEDGER_BLOBS"].step
    assert small["BLOBS"].least < 3 * MB
    assert large["BLOBS"].least > 4 * 3 * 4096 * 8 * 200  # four snapshots of the buffer's open trajectories


def test_a_run_that_goes_on_needs_what_it_holds_and_what_is_to_come():
    whole = needs(config_of(learner={"steps": 1000}), 100)
    step = whole[PROMPTS.name].step

    def rest(stored: int) -> int:
        return needs_of_the_rest(whole, Progress({PROMPTS.name: stored}, {}, 250, 750))[PROMPTS.name].least

    assert rest(250 * step) == pytest.approx(1000 * step, rel=0.01)
    assert rest(500 * step) == pytest.approx(2000 * step, rel=0.01)  # half of its groups were dropped


def test_a_run_that_goes_on_in_its_warm_up_needs_all_that_the_warm_up_takes():
    whole = needs(config_of(warmup={"steps": 1000, "batch_rows": 512}, learner={"steps": 100}), 4000)
    progress = Progress({PROMPTS.name: whole[PROMPTS.name].least // 110}, {}, 10, 1090, warms=True)

    assert needs_of_the_rest(whole, progress)[PROMPTS.name].least >= whole[PROMPTS.name].least


# --- what does not fit


def test_sizes_lie_between_least_and_ample_as_far_as_there_is_room():
    planned = Plan(Config(), 100.0, needs(Config(), 100))
    least, ample = planned.least, sum(planned.sizes.values()) - planned.sizes["VITALS"]
    assert all(planned.sizes[name] == need.ample for name, need in planned.needs.items())

    for room in (least, (least + ample) // 2, ample, 2 * ample):
        sizes = Plan(Config(), 100.0, planned.needs, room=room).sizes
        assert all(sizes[name] >= need.least for name, need in planned.needs.items())
        assert sum(sizes.values()) - sizes["VITALS"] <= room


@pytest.mark.parametrize(
    ("setting", "steps", "parts"),
    [
        ("nats.ledger_max_mb=1", 1000, ["1 MB are too little: the run needs PROMPTS 29", "GRADES 20"]),
        ("nats.stream_max_mb=3", 130, ["3 MB are too little: the run needs TRAJECTORIES 6 MB. Set nats.stream_max_mb"]),
        ("nats.disk_max_mb=100", 1000, ["MB and there is room for 8", "learner.steps = 1", " would fit"]),
    ],
)
def test_what_cannot_fit_is_refused_with_the_setting_to_raise(setting: str, steps: int, parts: list[str]):
    found = the_problem("demo", setting, f"learner.steps={steps}", "learner.schedule=constant", files=True)

    assert found.key == f"--set {setting.partition('=')[0]}"
    for part in [*parts, f"({steps:,} steps of 512 trajectories; a row of the data has 3"]:
        assert part in found.message


def test_moments_in_bfloat16_take_half_of_their_part_of_the_checkpoints():
    found = [files_bytes(Config(learner=LearnerSettings(moments=kind)), MB) for kind in ("float32", "bfloat16")]

    assert found[0] - found[1] == 4 * MB * (Config().learner.keep_checkpoints + 1)


def test_long_rows_are_counted(tmp_path: Path):
    rows = [{"prompt": "^ab=", "label": "ba", "metadata": {"text": "x" * 4000}} for _ in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").write_text(SCRIPTED.replace("{ letters = 4 }", "{}"))
    sizes = ("nats.ledger_max_mb=20", "nats.stream_max_mb=0", "learner.steps=4000")

    found = the_problem(str(tmp_path / "config.toml"), f"task.source={tmp_path}/rows.jsonl", *sizes, files=True)

    assert "the run needs PROMPTS 2" in found.message
    assert "a row of the data has 4,0" in found.message


async def test_check_prints_what_each_stream_needs_and_may_hold_and_when_it_is_full(tmp_path: Path):
    code, output = await command(tmp_path, "check", "demo", "--streams", "--set", "nats.disk_max_mb=1000")

    assert code == 0, output
    lines = output.splitlines()
    assert lines[0] == "ok"
    rows = {line.split()[0]: line for line in lines}
    assert {stream.name for stream in STREAMS} <= rows.keys()
    assert re.search(r"nats.ledger_max_mb = 0  after step \d+ \(of 130\)$", rows["PROMPTS"])
    assert rows["TRAJECTORIES"].endswith("never: purged after checkpoints")
    assert "nats.disk_max_mb = 1,000" in rows["streams"]


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


async def test_a_server_without_room_is_reported_in_megabytes_and_keeps_nothing(tmp_path: Path):
    async with server_of_another(tmp_path, 100) as address:
        bus = await Bus.connect(address, "a-run")
        with pytest.raises(ServerFull) as refused:
            await provision(bus, equal_sizes(payload_mb=30, ledger_mb=10), lease_s=1)
        assert await held_bytes(bus) == {}
        config = config_of(run="a-run", nats={"url": address.url}, learner={"steps": 5000})
        with pytest.raises(LaunchError) as error:
            await provision_sized(bus, config, tmp_path, tmp_path)
        await bus.close()

    assert refused.value.wanted == 3 * 30 * MB + 13 * 10 * MB
    assert 99 * MB < refused.value.room < 105 * MB  # the server counts in MiB
    assert re.search(r"MB on the NATS server, which has 10[45] MB for them: its max_file_store", str(error.value))
    assert re.search(r"\(0 sizes each stream by itself\) or learner.steps; learner.steps = [1-9]\d* ", str(error.value))


async def test_streams_are_sized_for_the_room_a_server_has_and_anew_when_a_run_goes_on(tmp_path: Path):
    config = config_of(run="a-run", nats={"url": "nats://somebody:4222"}, learner={"steps": 100})
    async with server_of_another(tmp_path, 200) as address:
        bus = await Bus.connect(address, "a-run")
        sizes = await provision_sized(bus, config, tmp_path, tmp_path)
        found = await stream_states(bus)
        assert {name: state["max_bytes"] for name, state in found.items()} == sizes
        assert sum(sizes.values()) - sizes["VITALS"] > 195 * MB
        config.nats.ledger_max_mb = 40
        with pytest.raises(LaunchError, match=r"which has 2[01]\d MB for them"):
            await provision_sized(bus, config, tmp_path, tmp_path)
        await bus.close()

    async with server_of_another(tmp_path, 50) as address:  # its disk has become smaller
        bus = await Bus.connect(address, "a-run")
        config.nats.ledger_max_mb = 0
        assert (
            await provision_sized(bus, config, tmp_path, tmp_path) == sizes
        )  # it holds nothing but what it has room for
        await bus.close()


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
        reason = r"needs \d+ MB and there is room for 0 in \S+ \(1\d\d MB free, of which 200 stay free"
        assert re.search(reason, run.error)
        leave_free(disk, 320)
        async with resume(tmp_path, "short") as run:
            assert await run.ended() == 0, run.story
            assert run.summary["steps"] == 120
        await audited_clean(tmp_path)
        async with topics_left_by(run) as bus:
            held, states = await held_bytes(bus), await stream_states(bus, [PROMPTS, GRADES])
        config = msgspec.json.decode((run.root / "config.json").read_bytes(), type=Config)
        needed = (await asyncio.to_thread(plan, config, tmp_path)).needs
        # Groups are dropped for their age, whose prompts are replaced, and grades given twice where leases lapse: how
        # often depends on the machine. What is dropped is in the log of batches, too, smaller than what is packed.
        trained = run.summary["trajectories_trained"]
        more = {name: max(1.0, state["messages"] / trained) for name, state in states.items()}
        grown = {name: held[name].stored / needed[name].least for name in ("PROMPTS", "GRADES", "BATCHES")}
        assert all(share / more.get(name, 1.0) > 0.7 for name, share in grown.items()), (grown, more)
        assert all(share / more.get(name, more["PROMPTS"]) < 1.1 for name, share in grown.items()), (grown, more)


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
