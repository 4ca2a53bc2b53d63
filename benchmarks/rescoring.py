"""Log-probs of a server under load, compared with the trainer's forward under the weights that each token names.

The weights change several times during some answers; other answers have one version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from asyncrl.algorithms.rows import TrainRow
from asyncrl.data.model_dir import ModelInfo
from asyncrl.engine.client import SamplingParams
from asyncrl.engine.generator import Generator, Watch
from asyncrl.training.passes import Passes
from asyncrl.training.policy import Loading, load_policy
from benchmarks.load import fleet_of
from benchmarks.random_model import SHAPES
from benchmarks.stage import BenchError, report
from benchmarks.updates import DEADLINE_S, Served, Updates
from topics.trajectories import Answer
from topics.weights import WeightsPublished

_PROMPT = 32
_SPARE = 8  # tokens of the context that no answer reaches


class _Tokens(Watch):
    """Counts the tokens of all answers."""

    def __init__(self) -> None:
        self.count = 0
        self._news = asyncio.Event()

    def on_tokens(self, tokens: int, discarded: int, lineage: int) -> None:
        """See `Watch`."""
        self.count += tokens
        self._news.set()

    async def reached(self, count: int) -> None:
        """Wait until this many tokens are sampled."""
        while self.count < count:
            self._news.clear()
            await self._news.wait()


async def bench_rescoring(*, tokens: int, crossed: int, **options: Any) -> dict[str, float]:
    """Measure answers without an update, then answers with several updates each.

    Args:
        tokens: tokens of an answer.
        crossed: updates during an answer.
        options: the other fields of `Served`.

    Returns:
        Mean absolute differences of the log-probs of all tokens, in nats: of answers of one version, of answers that
        crossed all updates, and their ratio. Also of the latter under the version before or after the named one. The
        last figure must be much greater; otherwise the versions are too similar to tell them apart.

    Raises:
        BenchError: the server failed, or no answer crossed enough updates.
    """
    served = Served("files", "resume", context=_PROMPT + tokens + _SPARE, **options)
    async with Updates.opened(served) as updates:
        stage = updates.stage
        key = stage.files.engine_key_file(stage.config.engine, "engine-1")
        assert key is not None  # a private server has a key
        async with fleet_of(stage.bus, key) as fleet:
            vocabulary = SHAPES[served.shape].vocabulary
            generator = Generator(fleet, ModelInfo("any", vocabulary, served.context), str, counts={})
            still = await stage.until(_sampled(generator, served, tokens, 0), DEADLINE_S)
            report(f"{served.running} answers of {tokens} tokens without an update")
            sampling = asyncio.create_task(_sampled(generator, served, tokens, 1, watch := _Tokens()))
            for number in range(1, crossed + 1):
                await updates.step()
                part = served.running * tokens * number // (crossed + 2)
                await stage.until(watch.reached(part), DEADLINE_S)
                await updates.copy()
                await updates.loaded(await updates.announce(number))
                report(f"version {number} has arrived after {watch.count / served.running:.0f} tokens of each")
            moved = await stage.until(sampling, DEADLINE_S)
        moved = [row for row in moved if np.count_nonzero(np.diff(row.versions[_PROMPT:])) >= crossed]
        if not moved:
            raise BenchError(f"no answer crossed {crossed} updates: they need more tokens than {tokens}")
        figures = await asyncio.to_thread(_compare, served, updates.versions, still, moved)
        return {"crossed_answers": float(len(moved)), **figures}


async def _sampled(
    generator: Generator, served: Served, tokens: int, seed: int, watch: Watch | None = None
) -> list[TrainRow]:
    """Return this many answers, sampled at once."""
    rng, vocabulary = np.random.default_rng(seed), SHAPES[served.shape].vocabulary
    prompts = rng.integers(3, vocabulary, (served.running, _PROMPT)).astype(np.int32)
    sampling = SamplingParams(tokens, ignore_eos=True)
    answers = await asyncio.gather(*[generator.generate(prompt, sampling, watch=watch) for prompt in prompts])
    return [_row(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]


def _row(prompt: npt.NDArray[np.int32], answer: Answer) -> TrainRow:
    def behind(columns: Any, value: float) -> Any:
        return np.concatenate([np.full(len(prompt), value, columns.dtype), columns])

    count = len(answer.tokens)
    ones = np.ones(count, np.float32)
    return TrainRow(
        trajectory_id="",
        tokens=np.concatenate([prompt, answer.tokens]),
        mask=behind(np.ones(count, np.uint8), 0),
        logprobs=behind(answer.logprobs, 0.0),
        versions=behind(answer.versions, -1),
        advantages=behind(ones, 0.0),
        weights=behind(ones, 0.0),
    )


def _compare(
    served: Served, versions: Sequence[WeightsPublished], still: list[TrainRow], moved: list[TrainRow]
) -> dict[str, float]:
    device = torch.device(served.device)
    dtype = torch.float32 if served.dtype == "float32" else torch.bfloat16
    passes = Passes(device, micro_batch_tokens=served.context)
    named = {"still": list[float](), "crossed": list[float](), "neighbour": list[float]()}
    for published in versions:
        policy = load_policy(Path(published.location), Loading(device, dtype, compiled=False))
        for kind, rows in (("still", still), ("crossed", moved)):
            found = passes.column(policy, rows)
            for row in rows:
                differences = np.abs(found[id(row)] - row.logprobs)
                own = row.versions == published.version
                named[kind] += differences[own].tolist()
                if kind == "crossed":
                    beside = (row.versions >= 0) & (np.abs(row.versions - published.version) == 1)
                    named["neighbour"] += differences[beside].tolist()
        words = ", ".join(f"{kind} {np.mean(values):.2e}" for kind, values in named.items() if values)
        report(f"up to version {published.version}: {words}")
        del policy
    means = {f"{kind}_mean_abs_nats": float(np.mean(values)) for kind, values in named.items()}
    return {**means, "crossed_over_still": means["crossed_mean_abs_nats"] / means["still_mean_abs_nats"]}
