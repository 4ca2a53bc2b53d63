"""One of four processes that train the same batches in several layouts of megatron-core.

`python -m tests.harness.megatron_cases RANK FOLDER [campaign]`: FOLDER has a model for each family, and gets a file of
each case.
Groups of one, two and four ranks follow one another in the same processes.
"""

import dataclasses
import faulthandler
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from asyncrl.algorithms.balance import balanced
from asyncrl.algorithms.losses import loss_of
from asyncrl.data.quantisation import quantised_as
from asyncrl.training.base_trainer import WEIGHTS
from asyncrl.training.masters import joined
from asyncrl.training.megatron import families as known
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.sharded_params import Reading
from asyncrl.training.megatron.trainer import MegatronTrainer
from asyncrl.weights.tensors import manifest_of_records, tensor_records
from tests.harness import own_family
from tests.harness.counted import counted_reads
from tests.harness.groups import megatron_ranks
from tests.harness.mixtures import SHAPE, SMALL, routed_rows
from tests.harness.training import policy_rows, save
from topics.batches import CriticStep, Distillation, Objective, Penalty

LAYOUTS = {
    "tensor": (2, Layout(tensor=2)),
    "pipeline": (2, Layout(pipeline=2, head=2)),
    "virtual": (2, Layout(pipeline=2, virtual=2)),
    "context": (2, Layout(context=2)),
    "data": (2, Layout()),
    "both": (4, Layout(2, 2)),
    "tokens": (4, Layout(tensor=2, context=2)),
    "stages": (4, Layout(pipeline=2, context=2, virtual=2)),
    "one": (1, Layout()),
    "experts": (2, Layout(expert=2)),
    "tensor-experts": (2, Layout(tensor=2, expert=2)),
    "copied-experts": (2, Layout(tensor=2)),
    "context-experts": (4, Layout(pipeline=2, context=2, virtual=2, expert=2)),
    "stages-experts": (4, Layout(tensor=2, pipeline=2, expert=2)),
    "tokens-experts": (4, Layout(tensor=2, context=2, expert=4)),
    "data-experts": (4, Layout(tensor=2, expert=2, expert_tensor=2)),
    "divided-experts": (2, Layout(tensor=2, expert_tensor=2)),
}
"""By name: ranks and layout."""
ROUNDED = {"rounded-products": (2, Layout(tensor=2)), "rounded-shares": (4, Layout(pipeline=2))}
"""As above, in bfloat16."""
CASES = {**LAYOUTS, **ROUNDED}
WITH_ROLES = ("tokens", "stages")
"""In which a critic learns, and a teacher's most probable tokens are followed."""
SOURCES = {
    "context": "torch",
    "data": "context",
    "both": "data",
    "tokens": "both",
    "stages": "tokens",
    "one": "stages",
    "rounded-products": "torch",
    "rounded-shares": "rounded-products",
    "experts": "torch",
    "context-experts": "experts",
    "tokens-experts": "context-experts",
    "data-experts": "tokens-experts",
    "tensor": "torch",
    "pipeline": "tensor",
    "virtual": "pipeline",
    "tensor-experts": "torch",
    "copied-experts": "tensor-experts",
    "stages-experts": "copied-experts",
    "divided-experts": "stages-experts",
}
"""Whose checkpoint each goes on from, in the order of their runs."""
CAMPAIGN = list(SOURCES)[12:]
"""Cases that divide ranks in one of the ways which other cases combine: they run with the campaigns only."""
RECOMPUTED = ("virtual", "both", "tokens", "context-experts", "data-experts", "tokens-experts")
"""With layers that are computed again in the backward pass; in the others they are when a checkpoint goes on."""
OF_FAMILIES = ("both", "one")
"""In which families are taken: every one in the first, and with the campaigns in the other too."""
OWN = "invented"
LATENT, OF_LATENT = "deepseek-v3", "context"
"""A family whose keys come from latents, and the case in which its scores are taken with the tokens divided."""
FIRST, EXPERTS = "qwen3", "qwen3-moe"
WHOLE = (EXPERTS, LATENT, "qwen3.5")
"""Families that are taken on one rank too, also without the campaigns."""
REPLAYED = ("glm4-moe", "deepseek-v3")
"""Families whose tokens go where they are said to have gone, when they are compared."""
FAMILIES = tuple(SMALL)
FIGURES = ("loss", "grad_norm", "entropy", "reference_kl", "rows", "rows_skipped")
SAVED_AT = 1  # steps
ROLES_SAVED_AT = 2  # steps: one of the critic alone, and one of both
ROWS = 8  # of a step: several micro-batches of each replica
SCORED = 12  # rows that families are compared by
PACKED = 4  # of them in a micro-batch
EPS = 1e-3  # of AdamW: what is rounding in a gradient shall not move a weight as a gradient does


def model_of(case):
    """Name of the model that is trained."""
    return EXPERTS if case == EXPERTS or "experts" in case else FIRST


def objective(step):
    """With a reference that is made anew, an entropy and a recomputed column."""
    return Objective(
        loss="decoupled",
        loss_options={"entropy": 0.01, "proximal": "recomputed"},
        learning_rate=1e-2,
        max_grad_norm=0.5,
        weight_decay=0.1,
        penalties=[Penalty("reference", 0.1, "k3", False)],
        reference=SAVED_AT if step >= SAVED_AT else 0,
    )


def rows_of(step, count=ROWS):
    return policy_rows(np.random.default_rng(step), count)


def scored_rows(name):
    """Rows that a family is compared by; those of some mixtures were routed."""
    rows = rows_of(0, SCORED)
    if name not in REPLAYED:
        return rows
    options = SMALL[name][1]
    return routed_rows(rows, 0, options["n_routed_experts"], options["num_experts_per_tok"])


def trained_rows(case, step):
    """Rows of a training; tokens of a model with experts go where they went when they were sampled."""
    return routed_rows(rows_of(step), step) if model_of(case) == EXPERTS else rows_of(step)


def held(row, place):
    """A row as a rank has it that fetched its layers and positions."""
    if row.routing is None:
        return row
    layers = SHAPE["num_hidden_layers"]
    whole = row.routing.reshape(len(row.tokens), layers, -1)
    found = np.zeros_like(whole)
    for tokens, own in itertools.product(place.tokens(len(row.tokens)), place.layers(layers)):
        area = np.s_[tokens.start : tokens.stop, own.start : own.stop]
        found[area] = whole[area]
    return dataclasses.replace(row, routing=found.reshape(row.routing.shape))


def share(rows, layout, rank, ranks):
    """Rows of the replica of a rank, with the experts that it fetches alone."""
    owners = balanced([float(len(row.tokens)) for row in rows], ranks // layout.model)
    replica = layout.replica(rank, ranks)
    place = layout.place(rank, ranks)
    return [held(row, place) for row, owner in zip(rows, owners, strict=True) if owner == replica]


def opened(folder, name, case, *, recompute=None, **further):
    layout = CASES[case][1]
    if "num_experts_per_tok" in SMALL.get(name, ("", {}))[1] and case in OF_FAMILIES:
        # Gradients are whole where nothing has replicas, which experts would have beside divided products.
        layout = layout._replace(expert=layout.tensor)
    settings = MegatronSettings(
        layout,
        dtype="bfloat16" if case in ROUNDED else "float32",
        micro_batch_tokens=64 // layout.context,
        eps=EPS,
        recompute=case in RECOMPUTED if recompute is None else recompute,
        replays=name in (EXPERTS, *REPLAYED),
        **further,
    )
    return MegatronTrainer(folder / name, settings)


def packs(rows):
    """Micro-batches: a pass costs a tiny model the same with one row and with several."""
    return [rows[at : at + PACKED] for at in range(0, len(rows), PACKED)]


def gradient(trainer, rows):
    """Gradients by Hugging Face names; whole where there is one replica."""
    kept = set()  # whether activations were kept, of the passes through a layer
    layer = trainer._policy.chunks[0].decoder.layers[0]
    hook = layer.register_forward_hook(lambda *_: kept.add(torch.is_grad_enabled()))
    trainer._gradient(packs(rows), loss_of(objective(0)))
    hook.remove()
    assert kept == ({True, False} if trainer.settings.recompute else {True})
    spread = trainer._policy.parts.trained(Reading(lambda parameter: parameter.main_grad))
    found = {name: on_every_rank(one) for name, one in spread}
    trainer._own.forget()
    return found


def on_every_rank(gathered):
    """A tensor that one rank gathers."""
    owner = gathered.holders[-1] if gathered.holders else dist.get_rank()
    found = gathered.whole(owner)
    assert (found is None) == (dist.get_rank() != owner)
    found = torch.empty(gathered.shape, dtype=gathered.dtype) if found is None else found.clone()
    if gathered.holders:
        dist.broadcast(found, owner)
    return found


def whole(source):
    held = source.tensor.detach() if isinstance(source.tensor, torch.Tensor) else on_every_rank(source.tensor)
    return held.clone() if source.rest is None else joined(held, source.rest)


def weights(trainer):
    """Whole weights by name, on every rank."""
    return {source.name: whole(source) for source in trainer._weights()}


def roles_objective(step):
    """PPO, whose critic is alone in the first step, and a KL over several tokens of a teacher."""
    return Objective(
        loss="ppo",
        learning_rate=1e-2,
        distillation=Distillation(4, 0.5, "forward"),
        critic=CriticStep(learning_rate=1e-2, gae_lambda=0.9, value_clip=0.2, alone=step == 0),
    )


def roles_rows(step):
    """Rows whose advantages are rewards."""
    return [dataclasses.replace(row, estimator="gae") for row in rows_of(step)]


def roles(folder, case, layout, rank, ranks):
    """Three steps with all roles, the last one from a checkpoint."""
    further, found = {"teacher": folder / "qwen2", "critic": folder / "llama", "offloads": True}, []
    trainer = opened(folder, FIRST, case, **further)
    for step in range(ROLES_SAVED_AT + 1):
        if step == ROLES_SAVED_AT:
            place = folder / f"roles-{case}"
            place.mkdir(exist_ok=True)
            save(trainer, place)
            dist.barrier()
            trainer = opened(folder, FIRST, case, **further)
            trainer.load(place)
        found.append(trainer.step(share(roles_rows(step), layout, rank, ranks), roles_objective(step)))
        trainer.rest()
    with trainer.placed():
        after = weights(trainer)
    if rank == 0:
        (folder / f"roles-{case}.json").write_text(json.dumps(found))
        save_file(after, folder / f"roles-{case}.safetensors")


def masters(trainer):
    """Whole weights as the optimiser has them, on every rank."""
    return {source.name: whole(source) for source in trainer._own.sources() if source.stem == WEIGHTS}


def state(trainer):
    """Whole weights and moments, on every rank."""
    sources = [*trainer._own.sources(), *trainer._reference.sources()]
    return {f"{source.stem}.{source.name}": whole(source) for source in sources}


def family(folder, name, case):
    """Weights, gradients, log-probs and entropies of a model."""
    trainer = opened(folder, name, case)
    with trainer.placed():
        rows = trainer.with_gradient(scored_rows(name), loss_of(objective(0)))
        found = {f"gradient.{key}": one for key, one in gradient(trainer, rows).items()}
        scores = trainer._policy(*trainer._passes.lay(scored_rows(name)).inputs)
    return {
        "logprobs": scores[0],
        "entropies": scores[1],
        **found,
        **{f"weight.{key}": one for key, one in weights(trainer).items()},
    }


def quantised(folder, name, case, rank):
    """Write down what this rank has of a model in FP8."""
    trainer = opened(folder, name, case, quantised=quantised_as(folder / name, "fp8-blocks"))
    records = tensor_records(trainer.copy_weights().files())
    (folder / f"quantised-{name}-{case}-{rank}.jsonl").write_bytes(manifest_of_records(records))


def families(folder, case, rank, *, campaign):
    known.FAMILIES[own_family.FAMILY.architecture] = own_family.FAMILY
    for name in (*FAMILIES, OWN) if campaign or case == OF_FAMILIES[0] else WHOLE:
        found = family(folder, name, case)
        if rank == 0:
            save_file(found, folder / f"{name}-{case}.safetensors")
    for name in (EXPERTS, LATENT):
        quantised(folder, name, case, rank)


def rested(trainer):
    """Let a trainer rest, which leaves nothing on its device, and bring it back."""
    held = [*trainer._own.tensors(), *trainer._own.gradients(), *trainer._reference.tensors()]
    sizes = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in held}
    moved = trainer.rest().bytes
    assert not any(one.untyped_storage().nbytes() for one in held)
    gradients = sum(one.nbytes for one in trainer._own.gradients())
    assert 0 < moved < sum(sizes.values()) <= moved + gradients + 8, "gradients are zeros, and are not kept"
    with trainer.placed():
        assert sum(one.untyped_storage().nbytes() for one in held) > 0


def scores(folder, name, case, rank):
    """Log-probs and entropies of a model."""
    trainer = opened(folder, name, case)
    with trainer.placed():
        found = trainer._policy(*trainer._passes.lay(scored_rows(name)).inputs)
    if rank == 0:
        save_file({"logprobs": found[0], "entropies": found[1]}, folder / f"scores-{name}-{case}.safetensors")


def opened_and_counted(folder, name, case):
    """A trainer, which reads what it holds of a model and no more."""
    with counted_reads() as counted:
        trainer = opened(folder, name, case)
    held = sum(one.numel() for one in trainer._policy.model.state_dict().values() if one is not None)
    padding = SHAPE["hidden_size"] * 2 * CASES[case][1].tensor  # rows of no token
    times = 1 if case not in ROUNDED else 2  # masters are read apart
    assert times * (held - padding) <= counted.read <= times * held
    return trainer


def training(folder, case, layout, rank, ranks):
    """Two steps, with a checkpoint between them."""
    trainer, figures = opened_and_counted(folder, model_of(case), case), []
    for step in range(SAVED_AT + 1):
        if step == SAVED_AT:
            found = state(trainer)
            (folder / f"state-{case}").mkdir(exist_ok=True)
            save(trainer, folder / f"state-{case}")
            dist.barrier()
        metrics = trainer.step(share(trained_rows(case, step), layout, rank, ranks), objective(step))
        figures.append([metrics[name] for name in FIGURES])
        rested(trainer)
    found["parameters"] = torch.tensor(sum(one.numel() for one in trainer._policy.model.parameters()))
    dist.all_reduce(found["parameters"], dist.ReduceOp.MAX)  # of the fullest rank
    if case in ROUNDED:
        found |= {f"master.{name}": one for name, one in masters(trainer).items()}
    found |= {f"after.{name}": one for name, one in weights(trainer).items()}
    if rank == 0:
        save_file({**found, "figures": torch.tensor(figures, dtype=torch.float64)}, folder / f"{case}.safetensors")


def resumed(folder, case, layout, rank, ranks):
    """The second step from the checkpoint of another layout, or of the torch trainer."""
    trainer, source = opened(folder, model_of(case), case, recompute=case not in RECOMPUTED), SOURCES[case]
    trainer.load(folder / (f"state-{source}" if source != "torch" else f"state-torch-{model_of(case)}"))
    found = state(trainer)
    metrics = trainer.step(share(trained_rows(case, SAVED_AT), layout, rank, ranks), objective(SAVED_AT))
    found["figures"] = torch.tensor([metrics[name] for name in FIGURES], dtype=torch.float64)
    found |= {f"after.{name}": one for name, one in weights(trainer).items()}
    if rank == 0:
        save_file(found, folder / f"resumed-{case}.safetensors")
    dist.barrier()


def run(rank, folder, *, campaign):
    for case in SOURCES if campaign else list(SOURCES)[: -len(CAMPAIGN)]:
        ranks, layout = CASES[case]
        if rank >= ranks:
            continue
        with megatron_ranks(folder / f"store-{case}", rank, ranks, deadline_s=1190):
            if case in OF_FAMILIES:
                families(folder, case, rank, campaign=campaign)
            if case == OF_LATENT:
                scores(folder, LATENT, case, rank)
            training(folder, case, layout, rank, ranks)
            dist.barrier()
            resumed(folder, case, layout, rank, ranks)
            if case in WITH_ROLES:
                roles(folder, case, layout, rank, ranks)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(1190)  # says where a rank hangs, before the test gives up
    run(int(sys.argv[1]), Path(sys.argv[2]), campaign=sys.argv[3:] == ["campaign"])
