"""A learner whose versions are adapters, inside a test."""

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from actors.engine.actor import EngineActor
from actors.runtime.actor import Context
from asyncrl.bus.chunks import ChunkLog
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import WRITER, publish
from asyncrl.config.weights_settings import store_kind
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.training.lora import Lora
from asyncrl.training.publisher import Publisher
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from asyncrl.weights.store import StorePlace
from harness.roles import scored
from harness.stage import DEADLINE_S, until
from harness.training import policy_rows
from harness.versions import Answers
from topics.batches import Objective
from topics.weights import WEIGHTS_STORED, WeightsPublished


@asynccontextmanager
async def playing(actor: EngineActor) -> AsyncIterator[EngineActor]:
    """An engine actor inside this process, which has ended behind the block."""
    task = asyncio.create_task(actor.run())
    try:
        yield actor
    finally:
        actor.context.stop.set()
        await asyncio.gather(task, return_exceptions=True)


async def confirmed(answers: Answers, versions: list[int]) -> None:
    """Wait until engines have confirmed these versions, and no others."""
    await until(lambda: answers.ready() == versions, f"versions {versions} are there", DEADLINE_S)


class Adapting:
    """Trains the adapter of a run's model, and publishes each step."""

    def __init__(self, bus: Bus, context: Context, dtype: str = "float32", device: str = "cpu") -> None:
        given = context.config.learner.lora
        lora = Lora(given.rank, given.alpha, tuple(given.targets), published=True)
        model = context.files.model_path(context.config.model)
        self.trainer = TorchTrainer(model, TorchSettings(lora=lora, dtype=dtype, device=device))
        self.rows = policy_rows(np.random.default_rng(1), 12)
        place = StorePlace(context.files.weights.absolute(), ChunkLog(bus, WEIGHTS_STORED))
        store = store_kind(context.config.weights.store).open(place)
        self._publisher = Publisher(self.trainer, store=store, checkpoints=Path())
        self._bus, self._version = bus, -1

    async def publish(self) -> WeightsPublished:
        """Train a step, and publish what it made."""
        self._version += 1
        await asyncio.to_thread(self.trainer.step, self.rows, Objective(learning_rate=1e-2))
        self._publisher.copy_weights()
        message = await asyncio.to_thread(self._publisher.publish, lineage=0, version=self._version)
        await self.announce(message)
        return message

    async def announce(self, message: WeightsPublished) -> int:
        """Announce a version, perhaps once more; returns its sequence."""
        return await publish(self._bus, message, headers={WRITER: "learner"})

    async def gap(self, client: EngineClient, adapter: str = "") -> float:
        """Return the largest difference between log-probs of sampled tokens and the trainer's of the same tokens."""
        prompt = [3, 4, 5, 6]
        sampling = SamplingParams(12, temperature=1.0, ignore_eos=True, adapter=adapter)
        key = secrets.token_hex(8)  # else the prompt may be met in the cache, as the version before computed it
        generation = await client.generate(prompt, sampling, extra_key=key)
        size = len(prompt) + len(generation.token_ids)
        row = dataclasses.replace(
            self.rows[0],
            tokens=np.array([*prompt, *generation.token_ids], np.int32),
            mask=np.array([0] * len(prompt) + [1] * len(generation.token_ids), np.uint8),
            temperature=1.0,
            **{name: np.zeros(size, np.float32) for name in ("logprobs", "advantages", "weights")},
            versions=np.zeros(size, np.int32),
        )
        expected = scored(self.trainer, [row], "proximal")
        return float(np.abs(expected - np.asarray(generation.logprobs)).max())
