"""Runs of a model with experts whose processes are killed: what replay leaves of the gap that a noisy router makes.

The gap of a step is the mean distance of the log-probs of sampler and learner over all tokens that it trained, as the
learner tells it in `metrics.jsonl`. With `buffer.max_lag = 0` both have the same weights, so nothing else is in it.
"""

import asyncio
import statistics
from pathlib import Path

import numpy as np
import pytest

from asyncrl.crash import CRASH_FOLDER, arm
from asyncrl.training.init_model import write_tokenizer
from harness.audited import assert_consistent, audited_clean, messages_on, topics_left_by
from harness.gated import closed_gate
from harness.mixtures import MIXTURE, write_transformers_model
from harness.runs import LIMIT_S, Run, up
from topics.topic import TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED

STEPS, GATE = 9, 3
DEATHS = {  # of rollout workers: where rows are written that are to be replayed, and where there are none
    "replay": ("blob.stored", "blob.inside", "progress.stored"),
    "own": ("progress.held", "progress.before", "progress.stored"),
}
VARIANTS = ((0.0, "replay"), (2.0, "replay"), (2.0, "own"))
"""Standard deviation of what is added to the logits that choose experts, and `learner.routing`."""
LIMIT = len(VARIANTS) * LIMIT_S  # they share the machine
ARMED = "engine-dies"

# The engine's Python imports a module of this name before anything else. Its routers choose by noise that is drawn anew
# whenever they choose, so tokens that are read again go to other experts than before.
NOISY = f"""
import os
import signal
import sys

if sys.orig_argv[2:4] == ["-m", "asyncrl.engine.embedded"]:
    import torch
    from asyncrl.engine.embedded.matrix import Experts
    from asyncrl.engine.embedded.scheduler import Engine

    choose, step, noise = Experts.choose, Engine._step, float(os.environ["ROUTER_NOISE"])

    def step_or_die(engine):
        if sum(len(request.tokens) >= 4 for request in engine.running) > 1 and os.path.exists("{ARMED}"):
            os.unlink("{ARMED}")
            os.kill(os.getpid(), signal.SIGKILL)
        return step(engine)

    Experts.choose = lambda experts, logits: choose(experts, logits + noise * torch.randn_like(logits))
    Engine._step = step_or_die
"""

DEMO = '''
from asyncrl.algorithms.clipped_losses import Decoupled
from gated import pass_gate

class Measured(Decoupled, frozen=True):
    """The default loss, which tells how far the log-probs of sampler and learner are apart, in nats per token."""

    @property
    def uses_advantages(self):
        return False  # all rows are measured

    def __call__(self, logprobs, tokens):
        loss, sums = super().__call__(logprobs, tokens)
        apart = (logprobs.detach() - tokens.behaviour).abs() * (tokens.weights > 0)
        return loss, {**sums, "gap": apart.sum()}

def letters(completion):
    return len(set(completion)) / 12

async def rollout(row, context):
    ids = context.tokenizer.encode_prompt(row, max_tokens=None)
    assert len(ids) == 9
    found = await context.generate(ids, max_new_tokens=8)
    if len(found.tokens) == 8:  # 16 were fed: a block of the prefix cache, so the next turn reads none of them again
        await context.tool("look", int)
        await context.generate([*ids, *found.tokens.tolist(), ids[-1]], max_new_tokens=4)
    await pass_gate(context)
'''


async def measured(folder: Path, noise: float, routing: str) -> Run:
    """A run whose rollout worker dies three times, then its engine while it samples, and its learner behind a step."""
    (folder / "site").mkdir(parents=True)
    (folder / "site" / "sitecustomize.py").write_text(NOISY)
    (folder / "demo.py").write_text(DEMO)
    write_transformers_model(folder / "mixture", "qwen3_moe", MIXTURE)
    write_tokenizer(folder / "mixture", "abcdefghijklmnopqrstuvwxyz^=", context=64)
    settings = [f"model.path={folder / 'mixture'}", f"learner.routing={routing}", f"learner.steps={STEPS}"]
    settings += [f"engine.environment={{PYTHONPATH='{folder / 'site'}',ROUTER_NOISE='{noise}'}}"]
    settings += ["task.options.letters=7", "task.rollout=demo.py:rollout", "reward.function=demo.py:letters"]
    settings += ["learner.loss=demo.py:Measured", "buffer.max_lag=0", "rollout.progress_tokens=2"]
    settings += ["workers.lease_s=1", "nats.keep=run"]
    points = [arm(folder / "points", name, "rollout") for name in DEATHS[routing]]
    gate = closed_gate(folder, GATE)
    async with up(folder, *settings) as run:
        await run.reaches(lambda: not any(point.exists() for point in points), "a death at each point", LIMIT)
        await run.reaches(lambda: len(run.steps()) >= GATE, "the steps before the gate", LIMIT)
        (folder / ARMED).touch()
        points = [arm(folder / "points", "learner.stepped", "learner"), folder / ARMED]
        gate.unlink()
        assert await run.ended(LIMIT) == 0, run.story
    assert not any(point.exists() for point in points)
    assert_consistent(run, steps=STEPS, warmup_steps=4)
    await audited_clean(folder)
    return run


async def assert_recorded(run: Run) -> None:
    async with topics_left_by(run) as bus:
        results = (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)
    assert all((one.routing is None) == (one.stage == "warmup") for one in results)
    known = np.concatenate([np.frombuffer(one.routing.known, np.uint8) for one in results if one.routing is not None])
    tokens = sum(one.routing.tokens[-1] for one in results if one.routing is not None)
    assert np.unpackbits(known).sum() > 0.8 * tokens  # all but the last of each, and what died with engine or worker


def gaps_of(run: Run, noise: float, routing: str) -> list[float]:
    """The gaps of its steps, printed with the greatest share of a step's tokens whose experts were lost."""
    rows = [row for row in run.rows() if row["stage"] == "rl"]
    gaps = [row["gap"] for row in rows]
    shown = f"least {min(gaps):.1e}, median {statistics.median(gaps):.1e}, greatest {max(gaps):.1e}"
    lost = max((row["routed_anew"] for row in rows if "routed_anew" in row), default=None)
    print(f"noise {noise:g}, {routing}: {shown}" + (f"; lost {lost:.0%}" if lost is not None else ""))
    return gaps


@pytest.mark.slow
@pytest.mark.nightly
async def test_replay_leaves_no_gap_of_a_noisy_router_but_in_steps_in_which_processes_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A token whose rows died with a process is trained on the learner's own routing, and counted (`routed_anew`); it
    has the gap of a run without replay, and so have those behind it, and those behind tokens that an engine read again.
    All of them are in the figure of their step, so the steps are compared by their median. No batch is sampled before
    the one ahead of it is trained: a death touches one step at most.
    """
    monkeypatch.setenv(CRASH_FOLDER, "points")  # in the folder of each run, which its processes work in
    async with asyncio.TaskGroup() as tasks:
        started = {one: tasks.create_task(measured(tmp_path / "-".join(map(str, one)), *one)) for one in VARIANTS}
    runs = [task.result() for task in started.values()]
    exact, replayed, own = (gaps_of(run, *one) for one, run in zip(VARIANTS, runs, strict=True))

    bound = 2 * statistics.median(exact)
    assert statistics.median(replayed) <= bound
    assert sum(gap > bound for gap in replayed) <= len(DEATHS["replay"]) + 1  # with the engine's
    assert min(own) >= 10 * statistics.median(exact)
    assert sum(row.get("routed_anew", 0.0) for row in runs[1].rows()) > 0  # deaths did cost rows
    for run in runs[:2]:
        await assert_recorded(run)
