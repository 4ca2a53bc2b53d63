"""The speed of the embedded engine, compared with transformers and through HTTP, in interleaved rounds."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.algorithms.rows import TrainRow
from asyncrl.config.settings import CreateModelSettings
from asyncrl.data.sources import open_source
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.engine.client import Chunk, EngineClient, SamplingParams
from asyncrl.engine.embedded.request import Request, Sampling
from asyncrl.engine.embedded.scheduler import Engine
from asyncrl.engine.errors import EngineError
from asyncrl.process import ChildProcess, python
from asyncrl.training.init_model import ModelShape, create_model
from asyncrl.training.torch.trainer import TorchTrainer
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.model_folder import write_model
from benchmarks.engine_model import bench_model
from topics.batches import Objective

VOCAB = 512
CONTEXT = 128
PROMPT_TOKENS = (8, 32)
NEW_TOKENS = (64, 96)
RUNNING = (16, 64, 256)
STREAM_INTERVAL = 16
_START_DEADLINE_S = 300.0  # a loaded machine imports torch for minutes


def save_random_model(directory: Path, *, vocab: int = VOCAB, hidden: int = 128, layers: int = 4) -> Any:
    """Write a Qwen3 model with random weights, in Hugging Face format; return it in evaluation mode."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(directory)
    return model.eval()


def bench_engine(
    *, rounds: int = 3, seconds: float = 1.0, model_path: Path | None = None, dtype: str = "float32"
) -> dict[str, float]:
    """Measure on one thread per process.

    Args:
        model_path: another model to measure, as `benchmarks.engine_model` does, in `dtype`.
        rounds: every figure is the median of this many rounds; a round measures everything once.
        seconds: length of one measurement.

    Returns:
        Tokens per second (`..._tokens_per_s`), ratios, and the greatest log-prob difference from the training forward.
    """
    if model_path is not None:
        return bench_model(model_path, dtype=dtype, rounds=rounds)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as directory:
            model = save_random_model(Path(directory))
            figures = asyncio.run(_measure(model, Path(directory), rounds, seconds))
            asks = [ask for ask, _ in zip(_asks(0), range(16), strict=False)]
            figures["random_weights_logprob_max_abs_diff_nats"] = logprob_difference(model, Path(directory), asks)
            figures["trained_weights_logprob_max_abs_diff_nats"] = _trained_difference(Path(directory) / "trained")
            return figures
    finally:
        torch.set_num_threads(threads)


async def _measure(model: Any, directory: Path, rounds: int, seconds: float) -> dict[str, float]:
    taken: dict[str, list[float]] = {}

    def note(name: str, value: float) -> float:
        taken.setdefault(name, []).append(value)
        return value

    local = {running: _InProcess(directory, running) for running in RUNNING}
    transformers_rates(model, most_tokens=8)  # warms up
    async with contextlib.AsyncExitStack() as stack:
        remote = {running: await stack.enter_async_context(_Remote.start(directory, running)) for running in RUNNING}
        for _ in range(rounds):
            reference, computed = transformers_rates(model)
            note("transformers_batch_64_tokens_per_s", reference)
            note("transformers_batch_64_with_surplus_tokens_per_s", computed)
            for running in RUNNING:
                rate = note(f"in_process_{running}_tokens_per_s", local[running].rate(seconds))
                note(f"in_process_{running}_to_transformers_ratio", rate / reference)
                through = note(f"http_{running}_tokens_per_s", await remote[running].rate(seconds))
                note(f"http_{running}_to_in_process_ratio", through / rate)
    return {name: statistics.median(values) for name, values in taken.items()}


def transformers_rates(model: Any, *, batch: int = 64, most_tokens: int = NEW_TOKENS[1]) -> tuple[float, float]:
    """Tokens per second of `generate` on one batch of the same requests, padded to the longest.

    Returns:
        The rate of requested tokens, and the rate of all computed tokens.
    """
    asks = [ask for ask, _ in zip(_asks(batch), range(batch), strict=False)]
    longest = max(len(prompt) for prompt, _ in asks)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in asks])
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in asks])
    steps = min(most_tokens, max(length for _, length in asks))
    started = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
            max_new_tokens=steps,
            min_new_tokens=steps,
        )
    elapsed = time.perf_counter() - started
    return sum(min(length, steps) for _, length in asks) / elapsed, batch * steps / elapsed


def _asks(seed: int) -> Iterator[tuple[list[int], int]]:
    """Yield prompts and lengths without end."""
    draw = random.Random(seed)
    while True:
        yield [draw.randrange(VOCAB) for _ in range(draw.randint(*PROMPT_TOKENS))], draw.randint(*NEW_TOKENS)


class _InProcess:
    """The engine without HTTP, always with the same number of requests."""

    def __init__(self, directory: Path, running: int) -> None:
        self._engine = Engine(directory, max_running=running, context_length=CONTEXT)
        self._asks = _asks(running)
        self._count = 0
        for _ in range(running):
            self._submit()
        for _ in range(NEW_TOKENS[1]):  # until the ends and starts of requests are spread out
            self._engine.step()

    def _submit(self) -> None:
        self._count += 1
        prompt, length = next(self._asks)
        sampling = Sampling(max_new_tokens=length)
        self._engine.submit(Request(str(self._count), prompt, sampling, listener=lambda _: self._submit()))

    def rate(self, seconds: float) -> float:
        before, started = self._engine.counters.generated_tokens, time.perf_counter()
        while time.perf_counter() - started < seconds:
            self._engine.step()
        return (self._engine.counters.generated_tokens - before) / (time.perf_counter() - started)


class _Remote:
    """A server in a separate process and a client here that keeps it full, streaming with log-probs."""

    def __init__(self, client: EngineClient, running: int) -> None:
        self._client = client
        self._running = running
        self._asks = _asks(running)
        self._tokens = 0

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, directory: Path, running: int) -> AsyncIterator[_Remote]:
        """Start the server, wait until it is ready, stop it at the end."""
        async with served(directory, "--max-running-requests", str(running)) as address:
            client = EngineClient(address)
            try:
                yield cls(client, running)
            finally:
                await client.close()

    async def rate(self, seconds: float) -> float:
        """Tokens per second as they arrive, once all requests run."""
        clients = [asyncio.create_task(self._keep_asking()) for _ in range(self._running)]
        await asyncio.sleep(seconds / 2)
        before, started = self._tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        rate = (self._tokens - before) / (time.perf_counter() - started)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await self._client.abort_all()
        await self._client.wait_idle(10.0)
        return rate

    async def _keep_asking(self) -> None:
        while True:
            prompt, length = next(self._asks)
            sampling = SamplingParams(max_new_tokens=length)
            await self._client.generate(prompt, sampling, on_tokens=self._arrived, stream_interval=STREAM_INTERVAL)

    def _arrived(self, chunk: Chunk) -> None:
        self._tokens += len(chunk.token_ids)


@contextlib.asynccontextmanager
async def served(model_path: Path, *options: str, incremental: bool = True) -> AsyncIterator[str]:
    """Serve this model with an embedded server for the length of the block; yields the address.

    Raises:
        EngineError: the server ended, or did not answer in time.
    """
    with tempfile.TemporaryDirectory() as scratch:
        port_file = Path(scratch) / "address"
        arguments = ["--model-path", str(model_path), "--port", "0", "--port-file", str(port_file), *options]
        if incremental:
            arguments.append("--incremental-streaming-output")
        command = python("-m", "asyncrl.engine.embedded", "--context-length", str(CONTEXT), *arguments)
        process = await ChildProcess.start(command, piped=True, environment={"OMP_NUM_THREADS": "1"})
        try:
            assert process.process.stderr is not None
            async with asyncio.timeout(_START_DEADLINE_S):
                line = await process.process.stderr.readline()
            if b"serving" not in line:
                raise EngineError(f"the server of {model_path} did not start: {line.decode().strip()}")
            yield port_file.read_text().strip()
        finally:
            await process.end()


def logprob_difference(model: Any, directory: Path, asks: Sequence[tuple[list[int], int]]) -> float:
    """Return the greatest log-prob difference between the engine and the training forward on the same tokens."""
    ended: list[Request] = []
    engine = Engine(directory, max_running=len(asks), context_length=CONTEXT)
    for index, (prompt, length) in enumerate(asks):
        engine.submit(Request(str(index), prompt, Sampling(max_new_tokens=length), listener=ended.append))
    while engine.runnable:
        engine.step()
    worst = 0.0
    for request in ended:
        ids = torch.tensor([request.prompt + request.tokens])
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.prompt) - 1 : -1]
        trained = logits.log_softmax(-1).gather(1, ids[0, len(request.prompt) :, None]).squeeze(1)
        worst = max(worst, float((trained - torch.tensor(request.logprobs)).abs().max()))
    return worst


def _trained_difference(directory: Path, *, steps: int = 100, rows: int = 256) -> float:
    """Return the same difference for a small model after supervised steps on words written backwards."""
    from transformers import AutoModelForCausalLM

    create_model(directory / "made", alphabet=CreateModelSettings().alphabet, seed=1, shape=ModelShape(context=CONTEXT))
    tokenizer = TaskTokenizer.load(directory / "made")
    source = open_source("reverse", options={"letters": 8}, seed=1, base=directory)
    trainer = TorchTrainer(directory / "made")
    for step in range(1, steps + 1):
        batch = []
        for number in range(step * rows, (step + 1) * rows):
            ((tokens, mask),) = tokenizer.encode_supervised(source.row(number))
            nothing = np.zeros(len(tokens), np.float32)
            weights = np.full(len(tokens), 1 / rows, np.float32)
            batch.append(
                TrainRow(str(number), tokens, mask, nothing, np.full(len(tokens), -1, np.int32), nothing, weights)
            )
        trainer.step(batch, Objective(loss="sft", learning_rate=4e-3 * min(1.0, step / 20)))
    (directory / "exported").mkdir()
    write_model(DiskFolder(directory / "exported"), trainer.copy_weights().files(), trainer.source)
    model: Any = AutoModelForCausalLM.from_pretrained(directory / "exported")
    model.eval()
    asks = [(tokenizer.encode_prompt(source.row(number), max_tokens=None).tolist(), 11) for number in range(64)]
    return logprob_difference(model, directory / "exported", asks)
