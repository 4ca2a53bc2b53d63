"""One of four processes that take the same steps with four ranks divided in every way, and with two and one.

`python -m tests.harness.megatron_crossed RANK FOLDER`: FOLDER has the models, and gets files of each case and manner.
"""

import faulthandler
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file

from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.megatron.settings import MegatronSettings
from asyncrl.training.megatron.trainer import MegatronTrainer
from asyncrl.training.routing import Recorded
from tests.harness.groups import megatron_ranks
from tests.harness.megatron_cases import EPS, EXPERTS, FIRST, LAYOUTS, model_of, rows_of, share
from tests.harness.mixtures import MIXTURE, routed_rows
from tests.harness.training import copies
from topics.batches import Objective

DENSE, MIXED = "dense", "mixed"
_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}  # which four ranks can share
MODELS = {DENSE: ("qwen3", _HEADS), MIXED: ("qwen3_moe", _HEADS | MIXTURE)}
STEPS = 2  # of which the second has moments
FIGURES = ("loss", "grad_norm", "entropy")
OBJECTIVE = Objective(
    loss="decoupled",
    loss_options={"entropy": 0.01, "proximal": "recomputed"},
    learning_rate=1e-2,
    max_grad_norm=0.5,
    weight_decay=0.1,
)


class Manner(NamedTuple):
    """The way in which steps are taken, in whatever layout."""

    recompute: bool
    replays: bool  # the experts that rows name; else routers choose

    def __str__(self):
        return f"{'recomputed' if self.recompute else 'kept'}-{'replayed' if self.replays else 'chosen'}"


class Case(NamedTuple):
    """A layout, and the manners of its steps."""

    model: str
    ranks: int
    layout: Layout
    manners: tuple[Manner, ...]

    def __str__(self):
        sizes = {**self.layout._asdict(), "data": self.ranks // self.layout.model}
        return "-".join([self.model, *(f"{name}{size}" for name, size in sizes.items() if size > 1)])


KEPT, RECOMPUTED = CHOSEN = Manner(False, False), Manner(True, False)
ALL = (*CHOSEN, Manner(False, True), Manner(True, True))
EITHER = (KEPT, Manner(True, True))
PAIRS = {
    Layout(tensor=2, pipeline=2): 2,
    Layout(tensor=2, pipeline=2, virtual=2): 2,
    Layout(tensor=2, context=2): 4,
    Layout(tensor=2): 2,
    Layout(pipeline=2, context=2): 2,
    Layout(pipeline=2, context=2, virtual=2): 2,
    Layout(pipeline=2): 2,
    Layout(pipeline=2, virtual=2): 2,
    Layout(context=2): 4,
}
"""Four ranks divided in two ways, of which replicas are one; and how many of them share the experts."""
SINGLE = {Layout(tensor=4): 4, Layout(pipeline=4): 1, Layout(context=4): 4, Layout(): 4}
"""Four ranks divided in one way, likewise."""


def _known(model):
    """Layouts of four ranks in which `megatron_cases` takes steps: experts replayed, layers computed again and not."""
    own = (layout for case, (ranks, layout) in LAYOUTS.items() if ranks == 4 and model_of(case) == model)
    return {layout._replace(expert=1, expert_tensor=1) for layout in own}


KNOWN = {DENSE: _known(FIRST), MIXED: _known(EXPERTS)}
"""What is not repeated here."""
OF_TWO = (
    Layout(tensor=2),
    Layout(tensor=2, expert=2),
    Layout(tensor=2, expert_tensor=2),
    Layout(pipeline=2),
    Layout(pipeline=2, virtual=2),
    Layout(context=2),
    Layout(context=2, expert=2),
    Layout(),
    Layout(expert=2),
)
_ALL = (
    *(Case(DENSE, 4, layout, CHOSEN) for layout in (*PAIRS, *SINGLE) if layout not in KNOWN[DENSE]),
    *(
        Case(MIXED, 4, layout._replace(expert=ranks), CHOSEN if layout in KNOWN[MIXED] else ALL)
        for layout, ranks in PAIRS.items()
    ),
    *(Case(MIXED, 4, layout._replace(expert=ranks), EITHER) for layout, ranks in SINGLE.items() if ranks > 1),
    *(Case(MIXED, 4, layout, (RECOMPUTED,)) for layout in (*PAIRS, Layout(pipeline=4))),
    *(Case(MIXED, 2, layout, EITHER) for layout in OF_TWO),
    Case(MIXED, 1, Layout(), ALL),
)
CASES = {str(case): case for case in _ALL}


def trained_rows(step, *, replays):
    """Rows of a step, with the experts that their tokens went to where they are replayed."""
    return routed_rows(rows_of(step), step) if replays else rows_of(step)


def stepped(trainer, rows, taken):
    """Take a step; returns figures and, by trajectory of any replica, the experts in the pass before the update.

    Args:
        taken: gives the experts of the newest pass; None of a model without.
    """
    passes, kept, used = trainer._passes, Recorded(taken), []
    column = type(passes).column.__get__(passes)

    def kept_column(scorer, rows, _):
        used.extend(rows)
        return column(scorer, rows, kept.keep)

    if taken is not None:
        passes.column = kept_column
    metrics = trainer.step(rows, OBJECTIVE)
    own = {row.trajectory_id: torch.from_numpy(kept.of(row)) for row in used}
    everywhere = {name: one for part in passes.of_all(own) for name, one in part.items()}
    return [metrics[name] for name in FIGURES], everywhere


def trained(folder, case, manner, rank):
    """Weights after all steps that this rank writes, and of rank 0 figures and experts."""
    layout, (recompute, replays) = case.layout, manner
    budget = 64 // layout.context
    settings = MegatronSettings(layout, micro_batch_tokens=budget, eps=EPS, recompute=recompute, replays=replays)
    trainer, figures, found = MegatronTrainer(folder / case.model, settings), [], {}
    passes = []  # through a layer: whether activations were kept
    layer = trainer._policy.chunks[0].decoder.layers[0]
    layer.register_forward_hook(lambda *_: passes.append(torch.is_grad_enabled()))
    for step in range(STEPS):
        rows = share(trained_rows(step, replays=replays), layout, rank, case.ranks)
        own, experts = stepped(trainer, rows, trainer._policy.taken if case.model == MIXED else None)
        figures.append(own)
        found |= {f"experts.{step}.{name}": one for name, one in experts.items()}
    assert (passes.count(False) > passes.count(True)) == recompute
    own = {f"after.{name}": one for name, one in copies(trainer).items()}
    return own if rank else {**own, **found, "figures": torch.tensor(figures, dtype=torch.float64)}


def run(rank, folder):
    for name, case in CASES.items():
        if rank >= case.ranks:
            continue
        with megatron_ranks(folder / f"store-{name}", rank, case.ranks, deadline_s=590):
            for manner in case.manners:
                save_file(trained(folder, case, manner, rank), folder / f"{name}-{manner}-{rank}.safetensors")


if __name__ == "__main__":
    faulthandler.dump_traceback_later(590)  # says where a rank hangs, before the test gives up
    run(int(sys.argv[1]), Path(sys.argv[2]))
