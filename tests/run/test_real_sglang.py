"""Whole runs whose engines load new weights again and again: the embedded engine, a real SGLang and a real vLLM."""

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asyncrl.bus.connection import Bus
from asyncrl.training.init_model import ModelShape
from harness.audited import assert_consistent, assert_within_lag, messages_on
from harness.models import make_endless_model
from harness.runs import Run, address_of, command, kill, resume, topics_left_in, up
from harness.sglang_real import ABSENT, EXACT, FOUND, arguments, environment
from harness.stage import until
from harness.vllm_real import ABSENT as NO_VLLM
from harness.vllm_real import FOUND as VLLM_FOUND
from harness.vllm_real import VLLM
from topics.topic import TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, Segment, TrajectoryGenerated

pytestmark = pytest.mark.slow
WITH_SGLANG = pytest.mark.skipif(not FOUND, reason=ABSENT)
WITH_VLLM = pytest.mark.skipif(not VLLM_FOUND, reason=NO_VLLM)

SGLANG = [
    'engine.kind="sglang"',
    f"engine.arguments={json.dumps(arguments())}",
    f"engine.environment={{ PYTHONPATH = {json.dumps(environment()['PYTHONPATH'])} }}",
]
SHAPE = ModelShape(context=2048) if EXACT else ModelShape(hidden=256, head_dim=64, context=2048)
CREATED = [f"model.create.{name}={getattr(SHAPE, name)}" for name in ("hidden", "head_dim")]
ROUTED = pytest.param(
    ["engine.count=2", "engine.router.count=1"],
    marks=pytest.mark.skipif(find_spec("sglang_router") is None, reason="takes the package sglang-router"),
)
LONG_AND_SHORT = """
run = "short"
[model]
path = "model"
[task]
options = { letters = 4 }
rollout = "own.py:rollout"
[reward]
function = "own.py:reward"
[rollout]
group_size = 4
slots = 32
max_new_tokens = 1500
progress_tokens = 64
[buffer]
batch_groups = 1
max_lag = 100
[learner]
steps = 1000
lr = 1e-3
keep_versions = 1000
checkpoint_every = 1000
[engine]
max_running = 16
[nats]
keep = "run"
"""
OWN = """
import random

async def rollout(row, context):
    ids = context.tokenizer.encode_prompt(row, max_tokens=None)
    # However long an update takes in tokens, some answers cross none, and some cross many.
    await context.generate(ids, max_new_tokens=random.choices((8, 300, 1500), (7, 2, 1))[0])

def reward(completion):
    return random.random()
"""


@WITH_SGLANG
@pytest.mark.parametrize("further", [[], ROUTED], ids=["direct", "routed"])
async def test_a_run_trains_on_rollouts_of_sglang_and_survives_the_death_of_a_server(
    tmp_path: Path, further: list[str]
):
    settings = [
        *SGLANG,
        *CREATED,
        *further,
        "engine.max_running=16",
        "learner.steps=8",
        "rollout.progress_tokens=4",
        "eval.prompts=16",
    ]
    async with up(tmp_path, *settings) as run:
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step", limit_s=300)
        lines = {pid: line for pid, line in run.processes().items() if "asyncrl.guard" not in line}
        served = {pid for pid, line in lines.items() if "sglang.launch_server" in line and "--port" in line}
        kill(min(served))
        assert await run.ended(600) == 0, run.story

    assert_consistent(run, steps=8, warmup_steps=4)
    assert_within_lag(run, max_lag=2)
    said = (run.root / "logs" / "engine-1.server.log").read_text()
    assert all(f"Freezing GC in {process} process" in said for process in ("Scheduler", "Tokenizer Manager"))
    code, output = await command(tmp_path, "audit", "short", "--deep")
    assert code == 0, output


@pytest.mark.parametrize(
    "settings",
    [[], pytest.param(SGLANG, marks=WITH_SGLANG), pytest.param(VLLM, marks=WITH_VLLM)],
    ids=["embedded", "sglang", "vllm"],
)
async def test_log_probs_are_those_of_the_versions_that_the_tokens_name(tmp_path: Path, settings: list[str]):
    (tmp_path / "own.py").write_text(OWN)
    make_endless_model(tmp_path / "model", shape=SHAPE, spread=30)

    def are_enough(results: list[TrajectoryGenerated]) -> bool:
        crossed, others = parted(results)
        return min(len(crossed), len(others)) >= 5 and len(set[int]().union(*map(sampled_by, crossed + others))) >= 10

    async with up(tmp_path, *settings, config=LONG_AND_SHORT) as run:
        results = await trajectories_of(run, are_enough, "five crossed three updates and five none")
        run.interrupt()
        assert await run.ended(600) == 0, run.story

    models: dict[int, Any] = {}
    weights = run.root / "weights"
    segments, untouched = parted(results)
    crossed = [rescored_difference(weights, models, segment) for segment in segments]
    others = [rescored_difference(weights, models, segment) for segment in untouched]
    mistaken = list[float]()
    for segment in segments:
        versions = np.where(segment.mask != 0, min(sampled_by(segment)), segment.versions)
        mistaken.append(rescored_difference(weights, models, msgspec.structs.replace(segment, versions=versions)))
    print(
        f"mean difference {np.mean(crossed):.2g} across three updates or more, {np.mean(others):.2g} across none, "
        f"{np.mean(mistaken):.2g} under a wrong version"
    )
    assert np.mean(crossed) <= max(2 * np.mean(others), 1e-6)
    # The comparison tells one version from the next, unless rounding hides them.
    assert np.mean(mistaken) > (1.2 if settings == SGLANG and not EXACT else 1000) * np.mean(crossed)


@WITH_VLLM
async def test_tokens_of_vllm_are_those_of_their_versions_across_deaths_updates_and_a_resume(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN)
    make_endless_model(tmp_path / "model", shape=SHAPE, spread=30)

    def are_enough(results: list[TrajectoryGenerated]) -> bool:
        return len(results) >= before + 12 and len(parted(results)[0]) >= 3

    async with up(tmp_path, *VLLM, config=LONG_AND_SHORT) as run:
        before = len(await trajectories_of(run, lambda results: len(results) >= 4, "four trajectories"))
        await run.kill("rollout-1")
        await run.kill("engine-1")
        before = len(await trajectories_of(run, are_enough, "twelve more, and three across three updates"))
        kill(run.process.pid)
    async with resume(tmp_path, "short") as run:
        at = len(run.steps())
        await run.reaches(lambda: len(run.steps()) > at, "a step after the resume")
        results = await trajectories_of(run, are_enough, "twelve more")
        run.interrupt()
        assert await run.ended(600) == 0, run.story
    code, output = await command(tmp_path, "audit", "short", "--deep")
    models: dict[int, Any] = {}
    differences = [
        rescored_difference(run.root / "weights", models, segment) for result in results for segment in result.segments
    ]

    print(f"{len(differences)} segments, largest mean difference {max(differences):.2g}")
    assert code == 0, output
    assert max(differences) < 1e-4


@pytest.mark.parametrize(
    "settings",
    [[], pytest.param(SGLANG, marks=WITH_SGLANG)],
    ids=["embedded", "sglang"],
)
@pytest.mark.parametrize("further", [[], ROUTED], ids=["direct", "routed"])
async def test_requests_that_stay_while_weights_change_are_marked_and_within_the_lag_bound(
    tmp_path: Path, settings: list[str], further: list[str]
):
    (tmp_path / "own.py").write_text(OWN)
    make_endless_model(tmp_path / "model", shape=SHAPE, spread=30)
    in_place = ['weights.update="in_place"', "buffer.max_lag=12"]

    def are_enough(results: list[TrajectoryGenerated]) -> bool:
        trained = any(row.get("hybrid_share", 0.0) > 0 for row in run.rows())
        return trained and sum(result.hybrid for result in results) >= 5

    async with up(tmp_path, *settings, *further, *in_place, config=LONG_AND_SHORT) as run:
        await trajectories_of(run, are_enough, "five have tokens of several versions, and some of them are trained on")
        run.interrupt()
        assert await run.ended(600) == 0, run.story
    async with topics_left_in(run.root) as bus:
        results = (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)
    code, output = await command(tmp_path, "audit", "short", "--deep")

    assert code == 0, output
    assert_within_lag(run, max_lag=12)
    for result in results:
        versions = np.concatenate([segment.versions[segment.mask != 0] for segment in result.segments])
        assert (np.diff(versions) >= 0).all()
        assert result.hybrid or versions.min() == versions.max()


async def trajectories_of(
    run: Run, are_enough: Callable[[list[TrajectoryGenerated]], bool], what: str
) -> list[TrajectoryGenerated]:
    """Results of a run, once there are enough: how many of its answers cross updates depends on the machine."""
    await run.reaches(lambda: len(run.steps()) >= 1, "the first step", limit_s=300)
    results = list[TrajectoryGenerated]()

    async def is_there() -> bool:
        results[:] = (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)
        return are_enough(results)

    bus = await Bus.connect(address_of(run), "short")
    try:
        await until(is_there, what)
    finally:
        await bus.close()
    return results


def parted(results: list[TrajectoryGenerated]) -> tuple[list[Segment], list[Segment]]:
    """The segments that crossed three updates or more, and those that crossed none."""
    segments = [segment for result in results for segment in result.segments]
    return (
        [segment for segment in segments if len(sampled_by(segment)) > 3],
        [segment for segment in segments if len(sampled_by(segment)) == 1],
    )


def sampled_by(segment: Segment) -> set[int]:
    """Versions that the sampled tokens name."""
    return set(segment.versions[segment.mask != 0].tolist())


def rescored_difference(weights: Path, models: dict[int, Any], segment: Segment) -> float:
    """Mean absolute difference of recorded log-probs to those of the weights that the tokens name."""
    ids, sampled = torch.from_numpy(segment.tokens.astype(np.int64))[None], segment.mask != 0
    expected = np.zeros(len(segment.tokens), np.float32)
    for version in set(segment.versions[sampled].tolist()):
        if version not in models:
            (folder,) = weights.glob(f"lineage0-v{version:06d}-*")
            models[version] = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            logits = models[version](ids).logits[0, :-1]
        found = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy()
        mine = sampled & (segment.versions == version)
        expected[mine] = np.concatenate([[0.0], found])[mine]
    return float(np.abs(expected - segment.logprobs)[sampled].mean())
