"""A whole run in steady state: its rate as a share of its engine alone and its trainer alone, and what is idle."""

from __future__ import annotations

import asyncio
import random
import shlex
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from asyncrl.background import sleep_unless_failed
from asyncrl.bus.log import Record
from asyncrl.config.engine_settings import Capability, kind_of
from asyncrl.config.load import with_overrides
from asyncrl.config.settings import Config
from asyncrl.config.slots import first_slots
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.clients import open_client
from asyncrl.engine.fleet import Sampler
from asyncrl.engine.scripted.load_client import Lengths
from asyncrl.engine.scripted.rate_curve import SGLANG_0_6B
from benchmarks.learner import measured
from benchmarks.learner_process import Measurement
from benchmarks.loop_figures import SlotMeter, Window, window_figures
from benchmarks.loop_model import LoopRules, simulate_loop
from benchmarks.random_model import Served, dtype_of
from benchmarks.stage import Stage, bench_config, report
from topics.batches import BATCH_TRAINED, BatchTrained
from topics.engines import ENGINE_READY, EngineReady
from topics.topic import ENGINES, TRAINING
from topics.wire import decode

_PROMPT = [29, 3, 4, 5, 6, 7, 8, 28]  # as long as a row of the task
_STEP_S = 0.3  # of a scripted trainer at speed 1, beside its tokens
_ENDLESS = 100_000  # steps
_DEADLINE_S = 3000.0
_MODULE = """
import math

async def rollout(row, context):
    tokens = context.tokenizer.encode_prompt(row, max_tokens=None).tolist()
    length = int(context.random().lognormvariate(math.log({mean}) - {sigma} ** 2 / 2, {sigma}))
    await context.generate(tokens, max_new_tokens=min({most}, max(16, length)))
"""


class LoopSetup(msgspec.Struct):
    """The options of a measurement; `benchmarks/options.py` describes them."""

    kind: str
    trainer: str
    shape: str
    device: str
    arguments: str
    pythonpath: str
    slots: str
    batch: int
    group: int
    lag: int
    mean: int
    sigma: float
    most: int
    update: str
    warm: int
    steps: int
    sweep: list[int]
    sweep_s: float
    speed: float
    train_rate: float
    update_s: float
    settings: list[str]

    @property
    def has_model(self) -> bool:
        """Return whether the engine samples from a model; otherwise it is scripted."""
        return Capability.MODEL in kind_of(self.kind).capabilities

    @property
    def rows(self) -> int:
        """Trajectories of a batch."""
        return self.batch * self.group


async def bench_loop(*, synchronous: bool, **options: Any) -> dict[str, float]:
    """Measure a whole run, its engine alone at several numbers of requests, and its trainer alone on the same rows.

    The ideal is the lower of the best rate of the engine and the rate of the trainer.

    Args:
        synchronous: also measure the run with max_lag = 0.
        options: fields of `LoopSetup`.

    Returns:
        Tokens per second, shares of the ideal, shares of busy time, and shares of the sampled tokens that were masked,
        dropped or sampled twice.

    Raises:
        BenchError: an actor failed, or a step took too long.
    """
    setup = msgspec.convert(options, LoopSetup)
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        model = Path(scratch) / "model"
        Served(setup.kind, setup.shape, "", "").write_model(model, context=setup.most + 32, dtype=dtype_of(setup.kind))
        trainer = _trainer_alone(setup, model, Path(scratch))
        run = await _run(setup, model, setup.lag, sweep=setup.sweep)
        figures, scripted = run.figures, setup.trainer == "scripted" and not setup.has_model
        if scripted:
            figures["simulated_tokens_per_s"] = _simulated(setup, setup.lag, figures)
            figures["share_of_simulated"] = figures["trained_tokens_per_s"] / figures["simulated_tokens_per_s"]
        if synchronous:
            other = (await _run(setup, model, 0, sweep=[])).figures
            gain = figures["trained_tokens_per_s"] / other["trained_tokens_per_s"]
            figures["synchronous_tokens_per_s"] = other["trained_tokens_per_s"]
            figures["asynchronous_over_synchronous"] = gain
            if scripted:
                figures["simulated_gain"] = figures["simulated_tokens_per_s"] / _simulated(setup, 0, other)
                figures["share_of_simulated_gain"] = gain / figures["simulated_gain"]
    engine = max(run.alone.values(), default=0.0)
    figures |= {f"engine_alone_{count}_tokens_per_s": rate for count, rate in run.alone.items()}
    figures |= {"trainer_alone_tokens_per_s": trainer} if trainer else {}
    if engine and trainer:
        figures["share_of_ideal"] = figures["trained_tokens_per_s"] / min(engine, trainer)
        figures["engine_busy_share"] = figures["sampled_tokens_per_s"] / engine
    return figures


class _Run(NamedTuple):
    figures: dict[str, float]
    alone: dict[int, float]  # tokens/s of the engine alone, by concurrent requests


async def _run(setup: LoopSetup, model: Path, lag: int, *, sweep: Sequence[int]) -> _Run:
    config = _config(setup, model, lag)
    async with Stage.open(config) as stage:
        started = time.monotonic()
        await stage.enter_all(but=("prompter", "rollout"))
        report(f"lag {lag}: engine and learner ready after {time.monotonic() - started:.0f} s")
        ready = decode(EngineReady, (await stage.follow(ENGINES, ENGINE_READY, lambda record: True)).data)
        alone = {}
        for count in sweep:
            keys = stage.files.engine_key_file(config.engine, ready.engine_id)
            client = open_client(config.engine, ready.engine_id, ready.address, keys)
            alone[count] = await stage.until(_alone(client, setup, count), _DEADLINE_S)
            await client.close()
            report(f"engine alone, {count} requests: {alone[count]:,.0f} tokens/s")
        for worker in range(config.rollout.workers):
            await stage.enter("rollout", worker + 1)
        await stage.enter("prompter")
        async with SlotMeter.open(stage, first_slots(config)) as meter:
            begin = await _step(stage, setup.warm)
            report(f"lag {lag}: step {setup.warm} after {time.monotonic() - started:.0f} s")
            end = await _step(stage, setup.warm + setup.steps)
            figures = await window_figures(stage, Window(begin.time_ns, end.time_ns), meter, mean=setup.mean)
        report(f"lag {lag}: {figures['trained_tokens_per_s']:,.0f} trained tokens/s")
    return _Run(figures, alone)


async def _step(stage: Stage, step: int) -> Record:
    """Return the record of a step."""

    def is_step(record: Record) -> bool:
        return decode(BatchTrained, record.data).step == step

    return await stage.until(stage.follow(TRAINING, BATCH_TRAINED, is_step), _DEADLINE_S)


async def _alone(client: Sampler, setup: LoopSetup, count: int) -> float:
    """Return the tokens/s of an engine with this many requests at once, once two of each have been answered."""
    ended: list[tuple[float, int]] = []

    async def requests(number: int) -> None:
        drawn = random.Random(number)
        while True:
            length = Lengths(setup.mean, setup.sigma).draw(drawn, setup.most)
            # Scripted engines draw the length by the seed.
            sampling = SamplingParams(
                max_new_tokens=length if setup.has_model else setup.most, seed=drawn.getrandbits(40)
            )
            generation = await client.generate(np.array(_PROMPT, np.int32), sampling)
            ended.append((time.monotonic(), len(generation.token_ids)))

    tasks = [asyncio.create_task(requests(number)) for number in range(count)]
    try:
        while len(ended) < 2 * count:
            await sleep_unless_failed(tasks, 0.05)
        begin = time.monotonic()
        await sleep_unless_failed(tasks, setup.sweep_s)
        end = time.monotonic()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return sum(tokens for at, tokens in ended if at > begin) / (end - begin)


def _trainer_alone(setup: LoopSetup, model: Path, scratch: Path) -> float:
    """Return the tokens/s of the trainer alone on the rows of a batch; 0 if it is not measured."""
    draws = random.Random(0)
    lengths = [Lengths(setup.mean, setup.sigma).draw(draws, setup.most) + len(_PROMPT) for _ in range(setup.rows)]
    answers = sum(lengths) - len(_PROMPT) * setup.rows
    if setup.trainer == "scripted":
        return setup.speed * answers / (_STEP_S + sum(lengths) / setup.train_rate)
    if setup.trainer != "torch":
        return 0.0
    measurement = Measurement(
        kind="asyncrl",
        model=str(model),
        device="cuda" if setup.device.startswith("cuda") else "cpu",
        micro_batch_tokens=max(4096, setup.most + len(_PROMPT)),
        rounds=2,
        lengths={"batch": lengths},
    )
    found = measured(measurement, scratch / "trainer").rows.get("batch")
    return answers / found.step_s if found is not None else 0.0


def _simulated(setup: LoopSetup, lag: int, figures: dict[str, float]) -> float:
    rules = LoopRules(
        slots=round(figures["slots"]),
        batch_groups=setup.batch,
        group_size=setup.group,
        max_lag=lag,
        lengths=Lengths(setup.mean, setup.sigma),
        most=setup.most,
        curve=SGLANG_0_6B.faster(setup.speed),
        train_tokens_per_s=setup.train_rate * setup.speed,
        step_s=_STEP_S / setup.speed,
        update_s=setup.update_s / setup.speed,
        prompt_tokens=len(_PROMPT),
    )
    return simulate_loop(rules, steps=setup.warm + setup.steps, warm=setup.warm).trained_tokens_per_s


def _config(setup: LoopSetup, model: Path, lag: int) -> Config:
    engine: dict[str, Any] = {"kind": setup.kind, "max_running": max([256, *setup.sweep])}
    task: dict[str, Any] = {"source": "reverse", "options": {"letters": 6}}
    if not setup.has_model:
        curve = list(SGLANG_0_6B.faster(setup.speed))
        engine |= {"scripted_curve": curve, "scripted_tokens": setup.mean, "scripted_sigma": setup.sigma}
        engine["scripted_update_s"] = setup.update_s / setup.speed
    else:
        module = model.parent / "lengths.py"
        module.write_text(_MODULE.format(mean=setup.mean, sigma=setup.sigma, most=setup.most))
        task["rollout"] = f"{module}:rollout"
        engine |= {"arguments": shlex.split(setup.arguments)}
        engine |= {"environment": {"PYTHONPATH": setup.pythonpath}} if setup.pythonpath else {}
    learner: dict[str, Any] = {"steps": _ENDLESS, "checkpoint_every": _ENDLESS}
    learner |= {"trainer": setup.trainer, "device": setup.device}
    if setup.trainer == "scripted":
        learner |= {
            "scripted_step_s": _STEP_S / setup.speed,
            "scripted_tokens_per_s": setup.train_rate * setup.speed,
        }
    elif setup.device.startswith("cuda"):
        learner |= {"dtype": "bfloat16", "moments": "bfloat16"} if setup.trainer == "torch" else {"dtype": "bfloat16"}
    config = bench_config(
        f"bench-loop-{lag}",
        model={"path": str(model)},
        task=task,
        reward={"function": "random"},  # equal rewards have no gradient, and a trainer skips their rows
        rollout={
            "slots": setup.slots if setup.slots == "auto" else int(setup.slots),
            "group_size": setup.group,
            "max_new_tokens": setup.most,
        },
        buffer={"batch_groups": setup.batch, "max_lag": lag},
        weights={"update": setup.update},
        engine=engine,
        learner=learner,
    )
    return with_overrides(config, setup.settings)
