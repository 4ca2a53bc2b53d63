"""Our formulas against what the published packages of peers compute from the same numbers.

peers.json holds the batch, and what functions of verl, AReaL, SkyRL, OpenRLHF and TRL gave for it: `scripts/peers`
installs them, records it anew, and runs these tests on that. Where a definition differs, the test says how.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncrl.algorithms.advantages import group_advantages
from asyncrl.algorithms.aggregation import token_weights
from asyncrl.algorithms.clipped_losses import Ppo, interpolated
from asyncrl.algorithms.distillation import DIRECTIONS, with_rest
from asyncrl.algorithms.gae import gae_of_row
from asyncrl.algorithms.kl import KL_ESTIMATORS
from asyncrl.algorithms.masks import MASKS, second_moments
from asyncrl.algorithms.rows import TrainRow
from asyncrl.algorithms.sums import metrics
from asyncrl.algorithms.value_loss import value_loss
from asyncrl.algorithms.whitening import whitened
from asyncrl.rewards.shaping import overlong_penalty
from asyncrl.training.vocabulary import Kernels, chosen_logprobs
from harness.losses import tokens_of
from harness.peers.ours import POLICY_LOSSES, PPO, Ours
from topics.batches import CriticStep, Objective

FIXTURE = Path(__file__).with_name("peers.json")
FOLDER = os.environ.get("ASYNCRL_PEERS", "")
ABSENT = "ASYNCRL_PEERS names no folder with the peers; scripts/peers makes one (60 MB) and runs this test"
RECORDED = json.loads(FIXTURE.read_text())
CASES = {f"{peer}: {name}": case for peer, cases in RECORDED["cases"].items() for name, case in cases.items()}
BATCH = {name: np.array(values) for name, values in RECORDED["batch"].items()}
MASK, GROUPS = BATCH["mask"], BATCH["groups"]
ROWS = np.nonzero(MASK)[0]  # of the trained tokens
CLOSE = {"rel": 3e-5, "abs": 3e-7}  # all of it is float32


def tokens(ours):
    counts = [[int(MASK[row].sum()) for row in np.flatnonzero(group == GROUPS)] for group in np.unique(GROUPS)]
    weights = token_weights(counts, kind=ours.aggregation, constant_tokens=ours.constant)
    by_row = np.array([weight for group in weights for weight in group])  # groups stand in order
    columns = {"proximal": "start", "reference": "reference", "entropy": "entropies"}
    return tokens_of(
        BATCH[ours.behaviour][MASK],
        BATCH[ours.advantages][MASK],
        by_row[ROWS],
        rows=ROWS.tolist(),
        in_queue=BATCH["lags"][MASK].tolist(),
        **{name: BATCH[source][MASK] for name, source in columns.items()},
    )


def leaf(name):
    return torch.tensor(BATCH[name][MASK], dtype=torch.float32, requires_grad=True)


def same_loss(case, loss, of, *, value=True):
    loss.backward()
    assert of.grad.flatten().tolist() == pytest.approx(case["gradient"], **CLOSE)
    if value:
        assert loss.item() == pytest.approx(case["loss"], **CLOSE)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_losses_and_gradients_are_those_of_peers(name):
    ours, current = POLICY_LOSSES[name], leaf("current")

    loss, _ = ours.loss(current, tokens(ours))

    same_loss(CASES[name], loss, current, value=ours.value)


KL = [f"{peer}: kl, {kind}" for peer in ("verl", "areal", "skyrl", "openrlhf") for kind in KL_ESTIMATORS]


@pytest.mark.parametrize("name", KL)
def test_estimates_of_a_divergence_and_their_gradients_are_those_of_peers(name):
    current = leaf("current")  # no difference here is above 10, where verl, SkyRL and OpenRLHF bound them

    nats = KL_ESTIMATORS[name.split()[-1]](current - torch.tensor(BATCH["reference"][MASK], dtype=torch.float32))

    same_loss(CASES[name], nats.sum(), current)


VALUE_LOSSES = {
    "verl: value loss": "token",
    "areal: value loss": "token",
    "skyrl: value loss": "trajectory",
    "openrlhf: value loss": "token",
}


@pytest.mark.parametrize("name", VALUE_LOSSES)
def test_losses_of_values_are_those_of_peers(name):
    values, given = leaf("values"), tokens(Ours(PPO, VALUE_LOSSES[name]))
    columns = {"values": BATCH["values_before"][MASK], "returns": BATCH["returns"][MASK]}
    given = given._replace(columns={key: torch.tensor(column, dtype=torch.float32) for key, column in columns.items()})

    loss, _ = value_loss(values, given, clip=0.5)

    same_loss(CASES[name], loss, values)


def advantages(estimator, groups):
    """One number of each row; rows of a group stand together."""
    of_groups = [BATCH["rewards"][groups == group] for group in np.unique(groups)]
    return np.concatenate(group_advantages(of_groups, [estimator] * len(of_groups)))


ADVANTAGES = {
    "verl: grpo": "grpo",
    "verl: grpo without std": "centered",
    "verl: grpo, vectorised": "grpo",
    "verl: rloo": "rloo",
    "verl: rloo, vectorised": "rloo",
    "skyrl: grpo": "grpo",
    "skyrl: rloo": "rloo",
}

ALONE_IS_ZERO = {"verl: rloo, vectorised", "skyrl: rloo"}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_of_groups_are_those_of_peers(name):
    """A group of one has advantage 0 here and in two of theirs; the others leave it its reward."""
    found = np.array(CASES[name]["values"])
    several = GROUPS[ROWS] != 2

    assert advantages(ADVANTAGES[name], GROUPS)[ROWS][several] == pytest.approx(found[several], **CLOSE)
    alone = 0.0 if name in ALONE_IS_ZERO else BATCH["rewards"][5]
    assert advantages(ADVANTAGES[name], GROUPS)[5] == 0.0
    assert found[~several] == pytest.approx(alone, rel=1e-5)


REINFORCE = {
    "verl: reinforce++": ("reinforce_pp", np.zeros_like(GROUPS)),
    "skyrl: reinforce++": ("reinforce_pp", np.zeros_like(GROUPS)),
    "verl: reinforce++ baseline": ("reinforce_pp_baseline", (GROUPS > 0).astype(int)),
}


@pytest.mark.parametrize("name", REINFORCE)
def test_advantages_of_a_batch_are_those_of_peers(name):
    """They take mean and deviation over tokens, we over trajectories: the same mean where all are as long, and the
    deviation but for the unbiased divisor and the floor, 1e-8 in their variance, 1e-6 on our deviation."""
    estimator, groups = REINFORCE[name]
    found = np.array(CASES[name]["values"]).reshape(MASK.shape)
    baselines = np.array([BATCH["rewards"][groups == group].mean() for group in groups])
    spread = BATCH["rewards"] - (baselines if estimator == "reinforce_pp_baseline" else BATCH["rewards"].mean())
    deviation = np.sqrt(np.repeat(spread, MASK.shape[1]).var(ddof=1) + 1e-8)

    ours = advantages(estimator, groups) * (spread.std(ddof=1) + 1e-6) / deviation

    assert np.repeat(ours[:, None], MASK.shape[1], axis=1) == pytest.approx(found, **CLOSE)
    rewards = advantages("centered" if estimator == "reinforce_pp_baseline" else "none", groups)
    rows = [row_of(np.ones(MASK.shape[1], bool), reward) for reward in rewards]
    assert of_tokens(whitened(rows, alone)) == pytest.approx(found.ravel(), **CLOSE)  # without a difference


def row_of(trained, reward=0.0, logprobs=None, **columns):
    """A row with one token of a prompt before those of a peer's."""

    def behind(values):
        return np.append(0.0, values).astype(np.float32)

    size = len(trained) + 1
    return TrainRow(
        trajectory_id="t",
        tokens=np.zeros(size, np.int32),
        mask=behind(trained).astype(np.uint8),
        logprobs=behind(np.zeros(size - 1) if logprobs is None else logprobs),
        versions=np.zeros(size, np.int32),
        advantages=np.full(size, reward, np.float32),
        weights=np.ones(size, np.float32),
        columns={name: behind(column) for name, column in columns.items()},
    )


def alone(values):
    """All ranks' values, where there is one rank."""
    return values


def episodes(mask):
    """Rows with generalised advantage estimates."""
    for number, trained in enumerate(mask):
        columns = {"values": BATCH["values"][number], "penalty": BATCH["penalties"][number]}
        episode = row_of(trained, BATCH["rewards"][number], **columns)
        made = gae_of_row(episode, Objective(critic=CriticStep(discount=0.9, gae_lambda=0.8)))
        yield dataclasses.replace(episode, advantages=made)


def of_tokens(rows):
    return np.concatenate([row.advantages[row.mask != 0] for row in rows])


def test_generalised_advantages_are_those_of_verl():
    ours = list(episodes(MASK))

    returns = of_tokens(ours) + BATCH["values"][MASK]
    assert returns == pytest.approx(np.array(CASES["verl: gae, returns"]["values"]), **CLOSE)
    white = of_tokens(whitened(ours, alone))
    assert white == pytest.approx(np.array(CASES["verl: gae, whitened"]["values"]), **CLOSE)


def test_generalised_advantages_are_those_of_skyrl():
    """Compare where all tokens are trained: the peer has no mask, its untrained tokens are actions."""
    whole = np.ones_like(MASK)
    ours = of_tokens(episodes(whole))

    assert ours + BATCH["values"].ravel() == pytest.approx(np.array(CASES["skyrl: gae, returns"]["values"]), **CLOSE)


@pytest.mark.parametrize(("mask", "bounds"), [("geometric", (0.85, 1.1)), ("product", (0.5, 1.6))])
def test_rejected_rows_are_those_of_verl(mask, bounds):
    """Its bounds are of sampler over trainer, ours of trainer over sampler. Its loss is then divided by the tokens
    that are left, ours by all."""
    given = tokens(Ours(PPO, behaviour="sampler"))
    log_ratio = leaf("current").detach() - given.behaviour
    of_masks = Ppo(masks=[mask], sequence_floor=1 / bounds[1], sequence_cap=1 / bounds[0])._bounds()

    rejected = MASKS[mask](log_ratio, given, of_masks)

    assert (~rejected).int().tolist() == CASES[f"verl: rejection, {mask}"]["values"]
    assert 0 < rejected.sum() < len(rejected)


def test_figures_of_the_ratio_are_those_of_verl():
    _, sums = PPO(leaf("current"), tokens(Ours(PPO, behaviour="sampler")))
    found = metrics(sums)

    assert found["ess"] == pytest.approx(CASES["verl: effective sample share"]["values"][0], rel=1e-5)
    assert found["mismatch_k3"] == pytest.approx(CASES["verl: mismatch k3"]["values"][0], rel=1e-4)


def test_the_interpolated_policy_is_that_of_areal():
    """But for tokens of the current version: AReaL gives them the sampler's log-prob, A-3PO (and we) the trainer's."""
    given = tokens(Ours(PPO, behaviour="sampler"))
    ours = interpolated(leaf("current").detach(), given).numpy()
    found, fresh = np.array(CASES["areal: interpolated"]["values"]), BATCH["lags"][MASK] == 0

    assert ours[~fresh] == pytest.approx(found[~fresh], **CLOSE)
    assert ours[fresh] == pytest.approx(BATCH["current"][MASK][fresh], **CLOSE)
    assert found[fresh] == pytest.approx(BATCH["sampler"][MASK][fresh], **CLOSE)


def from_logits(logits, *ids):
    """Compare with a head whose hidden states are the logits, two tokens at a time."""
    head = torch.nn.Linear(logits.shape[1], logits.shape[1], bias=False)
    torch.nn.init.eye_(head.weight)
    columns = torch.tensor(BATCH["targets"]), torch.ones(len(logits))
    return chosen_logprobs(logits, head, columns, Kernels(compiled=False, chunk_elements=22), *ids)


def test_log_probs_and_entropies_are_those_of_verl():
    found = from_logits(torch.tensor(BATCH["logits"], dtype=torch.float32))

    assert found[0].tolist() == pytest.approx(CASES["verl: log-probs"]["values"], **CLOSE)
    assert found[1].tolist() == pytest.approx(CASES["verl: entropy"]["values"], **CLOSE)


DISTILLED = {"trl: distillation, forward": 11, "trl: distillation, reverse": 11, "verl: distillation, forward": 4}


@pytest.mark.parametrize("name", DISTILLED)
def test_divergences_from_a_teacher_are_those_of_peers(name):
    """TRL's are over the whole vocabulary; verl leaves out the outcome of all tokens that the teacher did not name."""
    logits = torch.tensor(BATCH["logits"], dtype=torch.float32, requires_grad=True)
    teacher, ids = torch.tensor(BATCH["teacher_logits"], dtype=torch.float32).log_softmax(-1).topk(DISTILLED[name])
    policy = from_logits(logits, ids)[2]
    teacher = teacher if policy.shape[1] == teacher.shape[1] else with_rest(teacher)

    nats = DIRECTIONS[name.split()[-1]](policy, teacher)
    if name.startswith("verl"):
        nats = nats - teacher[:, -1].exp() * (teacher[:, -1] - policy[:, -1])

    same_loss(CASES[name], nats.sum(), logits)


def test_tokens_of_large_second_moments_are_those_of_areal():
    """Compare the bounds: the peer keeps tokens whose mean is below its own, we those whose mean is within ours."""
    log_probs = zip(BATCH["sampler"], BATCH["start"], strict=True)
    rows = [
        row_of(trained, logprobs=sampler, proximal=start)
        for trained, (sampler, start) in zip(MASK, log_probs, strict=True)
    ]

    named = np.stack(second_moments(rows, lambda values: values, cap=0.05))[:, 1:]

    assert (named[MASK] == 0).astype(float).tolist() == CASES["areal: m2po"]["values"]
    assert 0 < named.sum() < MASK.sum()


def test_punishments_of_over_long_rows_are_those_of_areal():
    found = [overlong_penalty(int(tokens), longest=8, interval=4) for tokens in MASK.sum(1)]

    assert found == pytest.approx(CASES["areal: over-long"]["values"], **CLOSE)
    assert min(found) < max(found) == 0


def test_every_recorded_case_is_compared():
    others = {"verl: gae, returns", "verl: gae, whitened", "skyrl: gae, returns", "areal: interpolated"}
    others |= {"verl: rejection, geometric", "verl: rejection, product", "verl: effective sample share"}
    others |= {"verl: mismatch k3", "verl: log-probs", "verl: entropy"}

    others |= {"areal: m2po", "areal: over-long"}

    assert {*POLICY_LOSSES, *KL, *VALUE_LOSSES, *ADVANTAGES, *REINFORCE, *DISTILLED, *others} == set(CASES)


@pytest.mark.skipif(not FOLDER, reason=ABSENT)
def test_the_record_is_what_the_peers_give_today():
    command = [sys.executable, "-m", "harness.peers.record", FOLDER]
    tests = FIXTURE.parent.parent
    live = json.loads(
        subprocess.check_output(command, cwd=tests, env=os.environ | {"PYTHONPATH": f"{tests}:{tests.parent}"})
    )

    assert live["versions"] == RECORDED["versions"]
    assert live["batch"] == RECORDED["batch"]
    for peer, cases in RECORDED["cases"].items():
        assert cases.keys() == live["cases"][peer].keys()
        for name, case in cases.items():
            for part, value in case.items():
                expected = value if part == "function" else pytest.approx(value, **CLOSE)
                assert live["cases"][peer][name][part] == expected, f"{peer}: {name}"
