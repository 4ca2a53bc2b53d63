"""One of two processes that take a step as it is right, and with an error that nothing would report.

`python -m tests.harness.planted_errors RANK FOLDER [campaign]`: FOLDER has the models; rank 0 prints the norms of the
gradients. Errors are planted with the campaigns only.
"""

import json
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from asyncrl.algorithms.losses import loss_of
from asyncrl.training.checkpoint import CheckpointError, OtherModel
from asyncrl.training.megatron import experts, mla, modules
from asyncrl.training.megatron import schedule as schedules
from asyncrl.training.megatron import trainer as trainers
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.schedule import Schedule
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.trainer import MegatronTrainer
from asyncrl.training.routing import replayed
from tests.harness.mixtures import routed_rows
from tests.harness.training import policy_rows
from topics.batches import Objective

EQUAL = 16  # tokens of the rows that are all of one length
OBJECTIVE = Objective(learning_rate=1e-2)
DECOUPLED = Objective(loss="decoupled", loss_options={"proximal": "recomputed"}, learning_rate=1e-2)
RECORDED = {
    "stages": Layout(pipeline=2, virtual=2),
    "tokens": Layout(context=2),
    "tokens of products": Layout(tensor=2, expert=2),
}
"""Layouts in which the experts of the pass before the update are those of the next, by name."""


def rows_of(name):
    if name == "qwen2":  # all of them are trained, and none is added to fill up
        some = policy_rows(np.random.default_rng(0), 400)
        return [row for row in some if len(row.tokens) == EQUAL and row.advantages.any()][:8]
    rows = policy_rows(np.random.default_rng(0), 12)
    return routed_rows(rows, 0) if name == "qwen3-moe" else rows


@contextmanager
def replaced(owner, **others):
    """Attributes of a module or class, for a while."""
    before = {name: getattr(owner, name) for name in others}
    for name, other in others.items():
        setattr(owner, name, other)
    try:
        yield
    finally:
        for name, one in before.items():
            setattr(owner, name, one)


def latents_of_each_rank():
    """Gradients of the products to latents, which every rank has whole, are not summed over the ranks."""

    class Forgetful(mla.Whole):
        def __init__(self, *given):
            super().__init__(*given)
            self.weight.sequence_parallel = False

    return replaced(mla, Whole=Forgetful)


def experts_without_mark():
    """The norm misses the experts of the other rank."""
    return replaced(experts, set_tensor_model_parallel_attributes=lambda *_: None)


def experts_as_other_weights():
    """Gradients of experts are summed over the replicas of all other weights: not over those with the same experts."""
    mark = experts.set_tensor_model_parallel_attributes

    def marked(parameter, *given):
        mark(parameter, *given)
        parameter.allreduce = True

    return replaced(experts, set_tensor_model_parallel_attributes=marked)


def exchanges_of_one_chunk():
    """Stages that take several chunks in turn exchange them as stages of one do: gradients of chunks are mixed up.

    Of micro-batches of one length alone, and without telling it: else the stages wait for one another for ever.
    """
    config, schedule = modules.TransformerConfig, schedules.get_forward_backward_func
    flags = {"batch_p2p_comm": True, "overlap_p2p_comm": False, "variable_seq_lengths": False}
    both = ExitStack()
    both.enter_context(replaced(modules, TransformerConfig=lambda **given: config(**given | flags)))
    both.enter_context(
        replaced(
            schedules, get_forward_backward_func=lambda: lambda **given: schedule()(**given | {"seq_length": EQUAL - 1})
        )
    )
    return both


def losses_of_two_values():
    """The library multiplies the loss by the context-parallel ranks, and divides it by the micro-batches."""
    own = Schedule._loss

    def loss(self, *given):
        total, _, sums = own(self, *given)
        return total, sums

    both = ExitStack()
    both.enter_context(replaced(Schedule, _loss=loss))
    both.enter_context(replaced(modules, OPTIONS={**modules.OPTIONS, "calculate_per_token_loss": False}))
    return both


def replay_of_the_newest():
    """A layer that is computed again in the backward pass gets the experts of the newest micro-batch."""
    own, newest = experts.ExpertLayer.forward, {}

    def forward(self, hidden_states, *, packed_seq_params, **given):
        recorded = packed_seq_params.recorded
        if recorded is not None and torch.is_grad_enabled():
            times = -(-len(recorded) // len(newest[self]))
            packed_seq_params.recorded = newest[self].repeat(times, 1, 1)[: len(recorded)]
        elif recorded is not None:
            newest[self] = recorded
        found = own(self, hidden_states, packed_seq_params=packed_seq_params, **given)
        packed_seq_params.recorded = recorded
        return found

    return replaced(experts.ExpertLayer, forward=forward)


ERRORS = {
    "latents of each rank": ("deepseek-v3", Layout(tensor=2), latents_of_each_rank),
    "experts without a mark": ("qwen3-moe", Layout(tensor=2, expert=2), experts_without_mark),
    "experts of others": ("qwen3-moe", Layout(context=2, expert=2), experts_as_other_weights),
    "experts that are copied": ("qwen3-moe", Layout(tensor=2), experts_as_other_weights),
    "exchanges of one chunk": ("qwen2", Layout(pipeline=2, virtual=2), exchanges_of_one_chunk),
    "losses of two values": ("qwen3", Layout(context=2), losses_of_two_values),
    "replay of the newest": ("qwen3-moe", Layout(pipeline=2), replay_of_the_newest),
}
"""By name: the model, the layout that shows it, and what plants it."""


def norm(folder, name, layout, tokens=64):
    """Norm of the gradient of the first step, by micro-batches of so many tokens."""
    tokens = EQUAL if name == "qwen2" else tokens  # one row each
    how = {"recompute": True, "replays": name == "qwen3-moe"}
    settings = MegatronSettings(layout, micro_batch_tokens=tokens // layout.context, **how)
    return MegatronTrainer(folder / name, settings).step(rows_of(name), OBJECTIVE)["grad_norm"]


def unsteady(own, recorded):
    """A choice of experts that is another one in each pass, but for what is recorded."""
    return replayed(torch.remainder(own + int(torch.randint(1, 4, ())), 4), recorded)


def apart(trainer):
    """Greatest difference between the log-probs of the pass before the update and those of the next, in nats."""
    with trainer.placed():
        rows = trainer.with_gradient(policy_rows(np.random.default_rng(0), 12), loss_of(DECOUPLED))
        found = trainer._passes.column(trainer._policy, rows)
    return max(float(np.abs(found[id(row)] - row.columns["proximal"]).max()) for row in rows)


def multiplied(folder, name):
    """Norm of the gradient with products of another kind, and the matrices of layers that were multiplied otherwise."""
    seen = set()

    def multiply(hidden, weight, bias=None):
        seen.add(id(weight))
        return F.linear(hidden, weight, bias)

    settings = MegatronSettings(Layout(tensor=2), micro_batch_tokens=64, replays=name == "qwen3-moe")
    with replaced(trainers, multiply_of=lambda *_: multiply):
        trainer = MegatronTrainer(folder / name, settings)
    found = trainer.step(rows_of(name), OBJECTIVE)["grad_norm"]
    matrices = ((path, one) for path, one in trainer._policy.model.named_parameters() if one.dim() > 1)
    return found, [path for path, one in matrices if ".layers." in path and id(one) not in seen]


def refusal(folder, name, checkpoint):
    """Error of a trainer about a checkpoint that it cannot go on from."""
    trainer = MegatronTrainer(folder / name, MegatronSettings(Layout(tensor=2), micro_batch_tokens=64))
    try:
        trainer.load(folder / checkpoint)
    except (CheckpointError, OtherModel) as error:
        return str(error)
    return ""


def run(rank, folder, *, campaign):
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    found = {}
    for error, (name, layout, plant) in ERRORS.items() if campaign else ():
        right = norm(folder, name, layout)
        with plant():
            found[error] = [right, norm(folder, name, layout)]
    for name, layout in RECORDED.items():
        settings = MegatronSettings(layout, micro_batch_tokens=64, records=True)
        with replaced(experts, replayed=unsteady):
            found[name] = apart(MegatronTrainer(folder / "qwen3-moe", settings))
    found["long"] = norm(folder, "qwen3", Layout(context=2), tokens=4)
    found["products"] = {name: multiplied(folder, name) for name in ("qwen2", "qwen3-moe", "deepseek-v3")}
    found["others"] = refusal(folder, "qwen2", "state-qwen3")
    found |= {wrong: refusal(folder, "qwen3", f"state-{wrong}") for wrong in ("torn", "wider")}
    if rank == 0:
        print(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]), campaign=sys.argv[3:] == ["campaign"])
