"""The embedded engine on a given model, against `transformers.generate` on the same batches, prompts included."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from asyncrl.engine.embedded.request import Request, Sampling
from asyncrl.engine.embedded.scheduler import Engine

PROMPT_TOKENS = (40, 48)


class Shape(NamedTuple):
    """A batch: prompts, answers to each, tokens of an answer."""

    prompts: int
    members: int
    tokens: int

    @property
    def name(self) -> str:
        """Prefix of its figures."""
        return f"{self.prompts}_prompts_of_{self.members}"


SHAPES = (Shape(1, 1, 32), Shape(8, 1, 16), Shape(64, 1, 16), Shape(8, 8, 16))


def bench_model(path: Path, *, dtype: str, rounds: int) -> dict[str, float]:
    """Measure on one thread; every figure is the median over the rounds, whose measurements are interleaved.

    Args:
        path: directory of the model.
        dtype: name of a torch type, for both.

    Returns:
        Tokens per second of CPU time of both (`..._tokens_per_cpu_s`), their ratios, and the engine's greatest log-prob
        difference from the float32 forward pass of transformers.
    """
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    model.eval()
    engine = Engine(path, max_running=64, dtype=getattr(torch, dtype))
    taken: dict[str, list[float]] = {}
    warming = Shape(8, 1, 2)
    _generate_s(model, _prompts(0, warming, engine.config.vocab_size), warming)
    for number in range(rounds):
        for shape in SHAPES:
            prompts = _prompts(number, shape, engine.config.vocab_size)
            wanted, found = _generate_s(model, prompts, shape), _engine_s(engine, prompts, shape)
            count = shape.prompts * shape.members * shape.tokens
            for figure, value in (
                ("transformers_tokens_per_cpu_s", count / wanted),
                ("engine_tokens_per_cpu_s", count / found),
                ("engine_to_transformers_ratio", wanted / found),
            ):
                taken.setdefault(f"{shape.name}_{figure}", []).append(value)
    figures = {name: statistics.median(values) for name, values in taken.items()}
    return {**figures, "logprob_max_abs_diff_nats": _difference(model.float(), engine)}


def _prompts(seed: int, shape: Shape, vocabulary: int) -> list[list[int]]:
    draw = random.Random(seed)
    different = [
        [draw.randrange(vocabulary) for _ in range(draw.randint(*PROMPT_TOKENS))] for _ in range(shape.prompts)
    ]
    return [prompt for prompt in different for _ in range(shape.members)]


def _generate_s(model: Any, prompts: list[list[int]], shape: Shape) -> float:
    longest = max(map(len, prompts))
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    limits = {"max_new_tokens": shape.tokens, "min_new_tokens": shape.tokens}
    started = time.process_time()
    with torch.inference_mode():
        model.generate(ids, attention_mask=mask, do_sample=True, top_k=0, pad_token_id=0, **limits)
    return time.process_time() - started


def _engine_s(engine: Engine, prompts: list[list[int]], shape: Shape) -> float:
    engine.flush_cache()
    started = time.process_time()
    _sample(engine, prompts, shape.tokens)
    return time.process_time() - started


def _sample(engine: Engine, prompts: list[list[int]], tokens: int) -> list[Request]:
    sampling = Sampling(max_new_tokens=tokens, ignore_eos=True)
    requests = [Request(str(number), prompt, sampling) for number, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    while engine.runnable:
        engine.step()
    return requests


def _difference(model: Any, engine: Engine) -> float:
    worst = 0.0
    for request in _sample(engine, _prompts(0, Shape(8, 1, 16), engine.config.vocab_size), 16):
        ids = torch.tensor([request.prompt + request.tokens])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(request.prompt) - 1 : -1]
        known = logits.log_softmax(-1).gather(1, ids[0, len(request.prompt) :, None]).squeeze(1)
        worst = max(worst, float((known - torch.tensor(request.logprobs)).abs().max()))
    return worst
