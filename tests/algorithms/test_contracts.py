"""Contract of every entry of each dictionary of algorithms, and of entries of these tests."""

import importlib.util
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import ADVANTAGES, Estimator
from asyncrl.algorithms.aggregation import AGGREGATIONS, token_weights
from asyncrl.algorithms.contract import advantage_problem, chosen, loss_problem, some_tokens
from asyncrl.algorithms.corrections import CORRECTIONS
from asyncrl.algorithms.filters import FILTERS
from asyncrl.algorithms.held_losses import DIVERGENCES
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.losses import LOSSES, loss_of
from asyncrl.algorithms.masks import MASKS
from asyncrl.algorithms.named import AlgorithmError
from asyncrl.algorithms.schedules import SCHEDULES
from asyncrl.algorithms.sequences import LEVELS
from asyncrl.algorithms.token_loss import Loss, Tokens
from asyncrl.config.load import load_config
from topics.batches import Objective
from topics.trajectories import Reference, TrajectoryGraded

ROOT = Path(__file__).parents[2]
TABLES = {
    "loss": LOSSES,
    "advantage": ADVANTAGES,
    "aggregation": AGGREGATIONS,
    "correction": CORRECTIONS,
    "correction_level": LEVELS,
    "mask": MASKS,
    "kl_estimator": KL_ESTIMATORS,
    "divergence": DIVERGENCES,
    "filter": FILTERS,
    "schedule": SCHEDULES,
}


def example() -> type[Loss]:
    """The loss that CONTRIBUTING.md adds, from the file that it shows."""
    (text,) = re.findall(r"```python\n(.*?class Gpg.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.DOTALL)
    spec = importlib.util.spec_from_loader("gpg", loader=None)
    module = importlib.util.module_from_spec(spec)
    exec(text, module.__dict__)
    return module.Gpg


class SequenceRatio(Loss, frozen=True):
    """A ratio of whole rows, as in GSPO, and a penalty on the distance from a column."""

    needs = ("reference",)

    def __call__(self, logprobs, tokens):
        trained = (tokens.weights > 0).float()
        count = int(tokens.rows.max()) + 1 if len(tokens.rows) else 0
        zeros = logprobs.new_zeros(count)
        lengths = zeros.index_add(0, tokens.rows, trained).clamp(min=1.0)
        log_ratio = zeros.index_add(0, tokens.rows, (logprobs - tokens.behaviour) * trained) / lengths
        ratio = log_ratio.clamp(-20.0, 20.0).exp()[tokens.rows]
        penalty = (logprobs - tokens.columns["reference"]).clamp(-20.0, 20.0)
        loss = -(tokens.weights * (ratio * tokens.advantages - 0.1 * penalty)).sum()
        return loss, {"tokens": trained.sum()}


WIDE = {"sequence_floor": 0.02, "sequence_cap": 50.0, "second_moment_cap": 4.0, "max_in_queue_lag": 2}
LOSS_CASES = {
    **{name: loss() for name, loss in LOSSES.items()},
    "decoupled, recomputed": LOSSES["decoupled"](proximal="recomputed", correction="mask"),
    **{
        f"decoupled, {level}, {proximal}": LOSSES["decoupled"](correction_level=level, proximal=proximal)
        for level, proximal in (("geometric", "interpolated"), ("product", "recomputed"))
    },
    "ppo, dual clip": LOSSES["ppo"](dual_clip=3.0),
    "dppo, kl": LOSSES["dppo"](divergence="kl"),
    "dppo, to the sampler": LOSSES["dppo"](divergence_cap_negative=0.3, sampler_kl=0.1),
    **{f"ppo, {name}": LOSSES["ppo"](masks=[name], **WIDE) for name in MASKS},
    **{
        f"reinforce, {name}": LOSSES["reinforce"](kl=0.1, kl_estimator=name, kl_unbiased=True) for name in KL_ESTIMATORS
    },
    "cispo, entropy": LOSSES["cispo"](entropy=0.01, masks=list(MASKS), **WIDE),
    "the example": example()(),
    "of this test": SequenceRatio(),
}
EVERY_LOSS = pytest.mark.parametrize("loss", LOSS_CASES.values(), ids=LOSS_CASES)


def computed(loss: Loss, logprobs: torch.Tensor, tokens: Tokens) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    logprobs = logprobs.clone().requires_grad_()
    total, sums = loss(logprobs, tokens)
    total.backward()
    return total.item(), logprobs.grad, sums


@EVERY_LOSS
def test_a_loss_keeps_the_contract_that_check_tries_on_users_own(loss):
    assert loss_problem(loss) == ""


@EVERY_LOSS
def test_a_loss_is_a_scalar_with_a_gradient_for_each_token_and_sums(loss):
    logprobs, tokens = some_tokens(np.random.default_rng(0), loss)

    total, gradient, sums = computed(loss, logprobs, tokens)

    assert np.isfinite(total)
    assert gradient.shape == logprobs.shape
    assert gradient.abs().sum() > 0
    assert sums["tokens"] == (tokens.weights > 0).sum()
    assert all(value.ndim == 0 and not value.requires_grad for value in sums.values())


@EVERY_LOSS
def test_a_token_without_weight_has_no_effect(loss):
    logprobs, tokens = some_tokens(np.random.default_rng(1), loss)
    without = tokens.weights == 0
    others = [torch.where(without, torch.full_like(values, -3.0), values) for values in (logprobs, *tokens[:2])]

    total, gradient, sums = computed(loss, logprobs, tokens)
    other = computed(loss, others[0], tokens._replace(behaviour=others[1], advantages=others[2]))

    assert (total, sums) == (other[0], other[2])
    assert torch.equal(gradient, other[1])
    assert not gradient[without].any()


@EVERY_LOSS
def test_micro_batches_in_any_order_add_up(loss):
    logprobs, tokens = some_tokens(np.random.default_rng(2), loss, rows=9)
    total, gradient, _ = computed(loss, logprobs, tokens)
    parts, found = [torch.isin(tokens.rows, torch.tensor(rows)) for rows in ([7, 2], [8, 0, 1, 3, 4], [5, 6])], []

    for part in parts:
        found.append(computed(loss, logprobs[part], chosen(tokens, part)))

    assert sum(one[0] for one in found) == pytest.approx(total, rel=1e-5)
    for part, (_, of_part, _) in zip(parts, found, strict=True):
        assert torch.allclose(of_part, gradient[part], rtol=1e-5, atol=1e-7)


@EVERY_LOSS
def test_a_loss_is_finite_at_extremes_and_empty(loss):
    values, signs = torch.tensor([0.0, -1e-8, -30.0, -1e4]), torch.tensor([-1e4, 1e4])
    logprobs, behaviour, advantages = (grid.flatten() for grid in torch.meshgrid(values, values, signs, indexing="ij"))
    columns = {name: behaviour.flip(0) for name in (*loss.needs, "entropy")}
    rows = torch.arange(len(behaviour))
    tokens = Tokens(behaviour, advantages, torch.full_like(behaviour, 0.1), rows, rows, rows // 2, columns)

    for some in (slice(None), slice(0, 0)):
        total, gradient, sums = computed(loss, logprobs[some], chosen(tokens, torch.arange(len(logprobs))[some]))
        assert np.isfinite(total)
        assert torch.isfinite(gradient).all()
        assert all(torch.isfinite(value) for value in sums.values())


def test_an_objective_that_is_not_known_here_lists_what_is():
    names = ", ".join(sorted(LOSSES))
    with pytest.raises(AlgorithmError, match=f'loss "grop" is not known here, expected one of {names}'):
        loss_of(Objective(loss="grop"))
    with pytest.raises(AlgorithmError, match=r'options .* of loss "ppo": Object contains unknown field `cap`'):
        loss_of(Objective(loss="ppo", loss_options={"cap": 2.0}))


def pass_rate(groups):
    """Rewards against the mean of the whole batch, as in REINFORCE++."""
    mean = np.concatenate(groups).mean() if groups else 0.0
    return [group - mean for group in groups]


ESTIMATORS = {**ADVANTAGES, "of this test": Estimator(pass_rate, compares=False)}


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_an_advantage_belongs_to_its_member_whatever_the_order(estimator):
    rng = np.random.default_rng(3)
    groups = [rng.normal(size=size) for size in (4, 1, 2, 8)] + [np.full(3, 0.1)]
    found = estimator.of_groups(groups)
    turned = estimator.of_groups([group[::-1] for group in groups[::-1]])

    assert advantage_problem(estimator) == ""
    assert [values.shape for values in found] == [group.shape for group in groups]
    for values, other in zip(found, turned[::-1], strict=True):
        assert values == pytest.approx(other[::-1], rel=1e-9, abs=1e-12)
    assert estimator.of_groups([]) == []
    assert np.isfinite(estimator.of_groups([np.array([1e30, -1e30, 1e-30])])[0]).all()
    if estimator.compares:
        assert [set(found[1].tolist()), set(found[4].tolist())] == [{0.0}, {0.0}]


@pytest.mark.parametrize("kind", AGGREGATIONS)
def test_a_weight_belongs_to_its_trajectory_and_nothing_without_tokens_has_one(kind):
    counts = [[3, 5], [7], [0, 1, 9], [0]]
    weights = token_weights(counts, kind=kind, constant_tokens=4)
    turned = token_weights([group[::-1] for group in counts[::-1]], kind=kind, constant_tokens=4)

    assert [group[::-1] for group in turned[::-1]] == weights
    for group, given in zip(weights, counts, strict=True):
        assert [weight > 0 for weight in group] == [count > 0 for count in given]


@pytest.mark.parametrize("correct", CORRECTIONS.values(), ids=CORRECTIONS)
def test_a_correction_bounds_weights_and_marks_those_it_changed(correct):
    logprobs, tokens = some_tokens(np.random.default_rng(4), LOSSES["ppo"]())
    weight = torch.exp(3 * logprobs.neg().sin())

    bounded, outside = correct(weight, tokens, (0.5, 2.0))

    assert bounded.shape == outside.shape == weight.shape
    assert outside.dtype == torch.bool
    assert ((bounded >= 0) & (bounded <= 2.0)).all()
    assert torch.equal(outside, (weight < 0.5) | (weight > 2.0)) or (bounded == 1).all()


def grade(member: int, reward: float) -> TrajectoryGraded:
    return TrajectoryGraded(
        trajectory_id=f"p0-{member}",
        prompt_id="p0",
        member=member,
        group_size=4,
        stage="rl",
        payload=Reference(1, "", 1),
        versions=[],
        reward=reward,
    )


@pytest.mark.parametrize("drops", FILTERS.values(), ids=FILTERS)
def test_a_filter_judges_a_group_in_any_order(drops):
    groups = [[grade(member, reward) for member, reward in enumerate(rewards)] for rewards in ([0, 1], [1], [0.5] * 4)]

    assert {type(drops()(group)) for group in groups} == {bool}
    assert [drops()(group) for group in groups] == [drops()(group[::-1]) for group in groups]


@pytest.mark.parametrize("factor", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_begins_at_the_full_rate_and_stays_within_it(factor):
    factors = [factor(share) for share in np.linspace(0.0, 1.0, 33)]

    assert factors[0] == 1.0
    assert all(0.0 <= value <= 1.0 for value in factors)


@pytest.mark.parametrize("kind", TABLES)
def test_the_page_lists_every_entry(kind):
    page = (ROOT / "docs" / "guides" / "algorithms.md").read_text()
    (table,) = re.findall(rf"^ *\| {kind} \|.*\n(?: *\|.*\n)+", page, flags=re.MULTILINE)

    assert sorted(re.findall(r"^ *\| `(\w+)`", table, flags=re.MULTILINE)) == sorted(TABLES[kind])


def test_the_settings_of_each_objective_by_name_are_those_of_a_run():
    page = (ROOT / "docs" / "guides" / "algorithms.md").read_text()
    (table,) = re.findall(r"^\| objective \|.*\n(?:\|.*\n)+", page, flags=re.MULTILINE)
    rows = [re.findall(r"`([^`]+)` \|$", line) for line in table.splitlines()[2:]]

    for [given] in rows:
        load_config("demo", overrides=[f"learner.{one}" for one in given.split()])  # refuses what has no effect
    assert {one for [given] in rows for one in re.findall(r"\bloss=(\w+)", given)} == set(LOSSES)


def test_every_option_of_a_loss_has_a_default_and_travels():
    for name, loss in LOSSES.items():
        objective = Objective(loss=name, loss_options=msgspec.to_builtins(loss()))
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(objective), type=Objective)
        assert loss_of(read) == loss()
