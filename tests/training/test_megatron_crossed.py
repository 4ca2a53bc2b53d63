"""The megatron trainer with four ranks divided in every way, and two and one, against the torch trainer.

Rows are packed, layers computed again or not, and experts those that rows name (R3) or those that routers choose.
"""

import itertools

import pytest
import torch
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from asyncrl.training.megatron.families import read_family
from asyncrl.training.megatron.parallel_config import Layout
from asyncrl.training.routing import as_bytes
from asyncrl.training.torch.trainer import TorchSettings, TorchTrainer
from harness.megatron_cases import EPS, ROWS
from harness.megatron_crossed import CASES, DENSE, KNOWN, MIXED, MODELS, STEPS, stepped, trained_rows
from harness.mixtures import MIXTURE, write_transformers_model
from harness.ranks import run_group
from harness.training import copies, of_all_ranks

pytestmark = [pytest.mark.slow, pytest.mark.nightly]  # every layout; test_megatron.py has one of each kind
RANKS = 4


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with what four processes found."""
    folder = tmp_path_factory.mktemp("crossed")
    for name, options in MODELS.items():
        write_transformers_model(folder / name, *options)
    run_group(["-m", "tests.harness.megatron_crossed"], RANKS, folder, deadline_s=600)
    return folder


class Routers:
    """The routers of a transformers model: what they chose, and by how much."""

    def __init__(self, model):
        self._newest = {}  # by layer
        self.narrowest = float("inf")  # least distance of the logits of an expert that was chosen and one that was not
        routers = [one for one in model.modules() if isinstance(one, Qwen3MoeTopKRouter)]
        for layer, router in enumerate(routers):
            router.register_forward_hook(lambda _, __, found, layer=layer: self._note(layer, *found))

    @torch.no_grad()
    def _note(self, layer, logits, _, chosen):
        self._newest[layer] = chosen
        last, next_one = logits.topk(MIXTURE["num_experts_per_tok"] + 1).values[:, -2:].unbind(1)
        self.narrowest = min(self.narrowest, float((last - next_one).min()))

    def taken(self):
        return as_bytes(torch.stack([chosen for _, chosen in sorted(self._newest.items())], 1), MIXTURE["num_experts"])


@pytest.fixture(scope="module")
def expected(results):
    """By model and whether experts are replayed: figures, experts, weights after and before, and the routers."""
    found = {}
    for model, replays in ((DENSE, False), (MIXED, False), (MIXED, True)):
        settings = TorchSettings(micro_batch_tokens=64, eps=EPS, replays=replays)
        trainer, figures, experts = TorchTrainer(results / model, settings), [], {}
        begun, routers = copies(trainer), Routers(trainer._policy.model)
        for step in range(STEPS):
            rows = trained_rows(step, replays=replays)
            own, went = stepped(trainer, rows, routers.taken if model == MIXED else None)
            figures.append(own)
            experts |= {f"experts.{step}.{name}": one for name, one in went.items()}
        found[model, replays] = torch.tensor(figures, dtype=torch.float64), experts, copies(trainer), begun, routers
    return found


def test_every_way_to_divide_four_ranks_is_a_case_with_experts_too(results):
    sizes = itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2))
    divided = {Layout(tensor, pipeline, context, virtual) for tensor, pipeline, context, virtual in sizes}
    _, shape = read_family(results / DENSE)
    valid = {one for one in divided if RANKS % one.model == 0 and not one.problem(shape)}
    assert len(valid) == 13

    cases = [case for case in CASES.values() if case.ranks == RANKS]
    assert {case.layout for case in cases if case.model == DENSE} == valid - KNOWN[DENSE]
    mixed = {case.layout for case in cases if case.model == MIXED}
    assert {one._replace(expert=1) for one in mixed} == valid
    assert {one._replace(expert=1) for one in mixed if one.expert > 1} == valid - {Layout(pipeline=4)}


def manners(model):
    return [(name, manner) for name, case in CASES.items() for manner in case.manners if case.model in model]


@pytest.mark.parametrize(("name", "manner"), manners((DENSE, MIXED)), ids=str)
def test_losses_norms_and_updates_are_those_of_the_torch_trainer_however_ranks_are_divided(
    results, expected, name, manner
):
    found = of_all_ranks(results, f"{name}-{manner}-")
    figures, _, after, begun, _ = expected[CASES[name].model, manner.replays]

    torch.testing.assert_close(found["figures"], figures, rtol=1e-5, atol=0.0)
    apart = torch.nn.utils.get_total_norm([found[f"after.{key}"] - one for key, one in after.items()])
    moved = torch.nn.utils.get_total_norm([one - begun[key] for key, one in after.items()])
    assert apart / moved < 1e-5
    assert {key for key in found if key.startswith("after.")} == {f"after.{key}" for key in after}


@pytest.mark.parametrize(("name", "manner"), manners((MIXED,)), ids=str)
def test_tokens_go_to_the_same_experts_however_ranks_are_divided(results, expected, name, manner):
    found = of_all_ranks(results, f"{name}-{manner}-")
    _, experts, *_, routers = expected[MIXED, manner.replays]

    # Where a router is as near to a tie as roundings are apart, layouts may choose otherwise: none is, of these rows.
    assert routers.narrowest > 1e-4
    assert len(experts) == STEPS * ROWS
    assert {key for key in found if key.startswith("experts.")} == experts.keys()
    for key, one in experts.items():
        assert torch.equal(found[key], one), key
