"""An estimate of the memory of the torch trainer on GPUs. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.check_learner import has_critic
from asyncrl.config.settings import Config
from asyncrl.data.model_dir import ModelError
from asyncrl.engine.errors import EngineError
from asyncrl.training.megatron.families import read_family
from asyncrl.training.megatron.layout import Layout
from asyncrl.training.megatron.memory import parameters_of
from asyncrl.training.memory import Learning, torch_memory


def torch_memory_lines(config: Config, base: Path) -> Iterator[str]:
    """Estimate the memory of a rank, where the torch trainer compiles the layers of a dense model of a known family."""
    learner = config.learner
    compiled = learner.device.startswith("cuda") and learner.dtype == "bfloat16" and learner.compile
    if learner.trainer != "torch" or not compiled or learner.lora.rank or not config.model.path:
        return
    try:
        family, shape = read_family(base / config.model.path)
    except (ModelError, EngineError):
        return
    if shape.experts or shape.latent:
        return
    [parameters] = parameters_of(family, shape, Layout())
    learning = Learning(
        ranks=learner.ranks,
        tokens=learner.micro_batch_tokens,
        moments=8 if learner.moments == "float32" else 4,
        activations=learner.activations,
        recompute=learner.recompute,
        copies=int(learner.reference.kl_coef > 0),
        once=learner.exchange == "step",
    )
    found = torch_memory(shape, parameters.dense, learning)
    yield f"memory of a rank of the learner, estimated: {found}"
    if learner.exchange == "auto" and learner.ranks > 1:
        more = sum(torch_memory(shape, parameters.dense, learning._replace(once=True))) - sum(found)
        yield f"{more / 2**30:.1f} GiB more where its card has room to exchange once a step (learner.exchange)"
    if learner.teacher.model or has_critic(config):
        yield "a teacher's weights and a critic's weights, gradients and optimiser come on top"
