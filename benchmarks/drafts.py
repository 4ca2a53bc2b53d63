"""Tokens per pass of a real server whose model drafts them, before its draft layer is trained and after."""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.algorithms.rows import TrainRow
from asyncrl.config.engine_settings import EngineSettings
from asyncrl.engine.client import EngineClient, SamplingParams
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.sglang.control import SGLangControl
from asyncrl.training.init_model import write_tokenizer
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.trainer import MegatronTrainer
from asyncrl.training.publisher import Publisher
from asyncrl.weights.files.store import FileStore
from benchmarks.stage import report
from benchmarks.talks import LETTERS
from topics.batches import Objective
from topics.weights import WeightsPublished

_LAYERS, _HIDDEN, _CONTEXT = 4, 512, 1024
_PROMPT, _TEMPERATURE = 16, 0.7
_SHAPE = {
    "vocab_size": 128,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS + 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "use_qk_norm": True,
    "attention_bias": True,
    "max_position_embeddings": _CONTEXT,
    "tie_word_embeddings": False,
    "partial_rotary_factor": 0.5,
}


class Sample(NamedTuple):
    """A prompt and the server's answer."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    passes: int  # of the model


async def bench_drafts(
    *, pythonpath: str, arguments: str, prompts: int, tokens: int, steps: int, lr: float
) -> dict[str, float]:
    """Start SGLang on a GLM-4.5 with random weights and a draft layer, and measure three times.

    The first measurement uses the first weights. The second uses a version whose policy and draft layer were trained on
    the sampled answers. The third uses a version whose policy was trained in the same way, without the draft layer.

    Args:
        pythonpath: folders from which SGLang is imported.
        arguments: of SGLang, added to those for drafting.
        prompts: requests at once.
        tokens: of each answer.
        steps: of training.
        lr: learning rate.

    Returns:
        Tokens per pass of each measurement.
    """
    with tempfile.TemporaryDirectory(prefix="asyncrl-bench-") as scratch:
        folder = Path(scratch)
        write_model(folder / "model")
        settings = EngineSettings(
            kind="sglang",
            max_running=prompts,
            start_deadline_s=400.0,
            update_deadline_s=120.0,
            arguments=[*shlex.split(arguments), "--speculative-algorithm", "EAGLE"],
            environment={"PYTHONPATH": pythonpath} if pythonpath else {},
        )
        control = SGLangControl(ServerSpec("engine-1", settings, folder / "model", folder / "log", None))
        client: EngineClient | None = None
        try:
            await control.start()
            client = EngineClient(control.address)
            sampled = await _sampled(client, None, prompts, tokens)
            figures = {"untrained_accept_length": accept_length(sampled)}
            for name, weight in (("trained", 1.0), ("policy_alone", 0.0)):
                version = await asyncio.to_thread(trained, folder / name, folder / "model", sampled, weight, steps, lr)
                await control.hold()
                await control.load_weights(Path(version.location), version.key)
                await control.resume()
                found = await _sampled(client, version.key, prompts, tokens)
                figures[f"{name}_accept_length"] = accept_length(found)
        finally:
            if client is not None:
                await client.close()
            await control.close()
    return figures


def write_model(directory: Path) -> None:
    """Write four layers, the first dense, and a draft layer that shares embedding and head with them."""
    torch.manual_seed(0)
    kind: Any = AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model("glm4_moe", **_SHAPE), dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(6.0)  # otherwise all tokens have equal probability, and drafts are useless
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.mul_(20.0)
    model.to(torch.bfloat16).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config |= {"num_hidden_layers": _LAYERS, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config))
    tensors, prefix = load_file(directory / "model.safetensors"), f"model.layers.{_LAYERS}"
    for name in ("enorm", "hnorm", "shared_head.norm"):
        tensors[f"{prefix}.{name}.weight"] = torch.ones(_HIDDEN, dtype=torch.bfloat16)
    tensors[f"{prefix}.eh_proj.weight"] = (0.03 * torch.randn(_HIDDEN, 2 * _HIDDEN)).bfloat16()
    tensors[f"{prefix}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{prefix}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_tokenizer(directory, LETTERS, context=_CONTEXT)


async def _sampled(client: EngineClient, key: str | None, prompts: int, tokens: int) -> list[Sample]:
    random = np.random.default_rng(0)
    asked = [random.integers(3, 70, _PROMPT).astype(np.int32) for _ in range(prompts)]
    sampling = SamplingParams(tokens, temperature=_TEMPERATURE, ignore_eos=True)
    found = await asyncio.gather(*(client.generate(ids, sampling, extra_key=key) for ids in asked))
    return [
        Sample(ids.tolist(), one.token_ids.tolist(), one.logprobs.tolist(), one.passes)
        for ids, one in zip(asked, found, strict=True)
    ]


def accept_length(samples: list[Sample]) -> float:
    """Return the tokens per pass; NaN if the server reports no pass."""
    passes = sum(one.passes for one in samples)
    return sum(len(one.tokens) for one in samples) / passes if passes else float("nan")


def trained(folder: Path, model: Path, samples: list[Sample], weight: float, steps: int, lr: float) -> WeightsPublished:
    """Train the policy on samples for some steps, and its draft layer with a loss weight; return the version."""
    folder.mkdir()
    on_gpu = torch.cuda.is_available()
    settings = MegatronSettings(
        Layout(),
        device="cuda" if on_gpu else "cpu",
        dtype="bfloat16" if on_gpu else "float32",
        micro_batch_tokens=8192,
        mtp_weight=weight,
    )
    trainer, random = MegatronTrainer(model, settings), np.random.default_rng(1)
    publisher = Publisher(trainer, store=FileStore(folder), checkpoints=folder)
    for _ in range(steps):
        figures = trainer.step(_rows(samples, random), Objective(loss="sft", learning_rate=lr))
    report(
        f"mtp_weight {weight:g}: loss {figures['loss']:.4f}, of the layer {figures.get('mtp_loss', float('nan')):.4f}"
    )
    publisher.copy_weights()
    return publisher.publish(lineage=0, version=1 if weight else 2)


def _rows(samples: list[Sample], random: np.random.Generator) -> list[TrainRow]:
    weight = 1.0 / sum(len(one.tokens) for one in samples)
    rows = []
    for number in random.permutation(len(samples)):
        one = samples[number]
        tokens = np.array([*one.prompt, *one.tokens], np.int32)
        mask = np.array([0] * len(one.prompt) + [1] * len(one.tokens), np.uint8)
        rows.append(
            TrainRow(
                trajectory_id=f"p{number}",
                tokens=tokens,
                mask=mask,
                logprobs=np.array([0.0] * len(one.prompt) + one.logprobs, np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
                advantages=np.ones(len(tokens), np.float32),
                weights=(mask * weight).astype(np.float32),
                temperature=_TEMPERATURE,
                estimator="grpo",
            )
        )
    return rows
