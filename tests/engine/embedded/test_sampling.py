import numpy as np
import pytest
import torch

from asyncrl.engine.embedded.sampling import GREEDY, PLAIN, TRUNCATED, Rows, uniforms

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -30.0])
DRAWS = 20_000


def draw(kind=PLAIN, *, temperature=1.0, top_p=1.0, top_k=6, min_p=0.0, logits=LOGITS):
    rows = Rows(DRAWS)
    seeds = np.arange(DRAWS, dtype=np.uint64)
    for name, value in zip(
        ("seed", "kind", "temperature", "top_p", "top_k", "min_p"),
        (seeds, kind, temperature, top_p, top_k, min_p),
        strict=True,
    ):
        rows.records[name] = value
    sampled = rows.sample(logits.expand(DRAWS, -1).clone())
    return sampled.tokens, sampled.logprobs


def assert_distributed(tokens, probabilities):
    expected = DRAWS * np.asarray(probabilities)
    observed = np.bincount(tokens.numpy(), minlength=len(expected))
    assert (observed[expected == 0] == 0).all()
    possible = expected > 5
    chi_square = ((observed - expected) ** 2 / np.maximum(expected, 1e-9))[possible].sum()
    assert chi_square < 30  # five degrees of freedom: one in 70,000


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_follow_the_softmax_at_the_temperature_and_carry_its_logprobs(temperature):
    tokens, logprobs = draw(temperature=temperature)

    expected = torch.log_softmax(LOGITS / temperature, -1)
    assert_distributed(tokens, expected.exp().numpy())
    torch.testing.assert_close(logprobs, expected[tokens], atol=1e-5, rtol=0)


def cut(probabilities, kept):
    probabilities = np.where(np.isin(np.arange(6), kept), probabilities, 0.0)
    return probabilities / probabilities.sum()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_p": 0.5}, [0]),  # the first alone has 0.56
        ({"top_p": 0.6}, [0, 1]),
        ({"min_p": 0.2}, [0, 1, 2]),  # 1, 0.37, 0.22 of the greatest
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),
        ({"top_p": 0.9, "min_p": 0.3}, [0, 1]),
    ],
)
def test_cuts_leave_exactly_their_support_in_proportion(options, kept):
    tokens, logprobs = draw(TRUNCATED, **options)

    probabilities = torch.softmax(LOGITS, -1)
    assert_distributed(tokens, cut(probabilities.numpy(), kept))
    torch.testing.assert_close(logprobs, probabilities.log()[tokens], atol=1e-5, rtol=0)


def test_a_cut_that_cuts_nothing_changes_no_distribution():
    tokens, _ = draw(TRUNCATED)

    assert_distributed(tokens, torch.softmax(LOGITS, -1).numpy())


def test_greedy_takes_the_likeliest_at_temperature_one():
    tokens, logprobs = draw(GREEDY)

    assert (tokens == 0).all()
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, -1)[:1].expand(DRAWS))


def test_a_token_of_probability_zero_is_never_drawn():
    tokens, _ = draw(logits=torch.tensor([-torch.inf, 0.0, -torch.inf, 0.0, 0.0, -torch.inf]))

    assert_distributed(tokens, [0, 1 / 3, 0, 1 / 3, 1 / 3, 0])


def test_a_row_draws_the_same_alone_and_in_mixed_company():
    rows = Rows(4)
    rows.records["seed"] = [5, 6, 7, 8]
    rows.records["temperature"] = [1.0, 1.0, 0.7, 1.0]
    rows.records["kind"] = [PLAIN, TRUNCATED, PLAIN, GREEDY]
    rows.records["top_k"] = 4
    rows.records["top_p"] = 1.0
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    together = rows.sample(logits.clone()).tokens.tolist()

    for row in range(4):
        alone = Rows(1)
        alone.records[0] = rows.records[row]
        assert alone.sample(logits[row : row + 1].clone()).tokens.tolist() == [together[row]]


def test_draws_are_uniform_over_positions_and_over_neighbouring_seeds():
    positions = np.arange(10_000)
    for draws in (
        uniforms(np.full(10_000, 3, np.uint64), positions),
        uniforms(np.arange(10_000, dtype=np.uint64), np.full(10_000, 9)),
    ):
        observed = np.histogram(draws, bins=20, range=(0, 1))[0]
        assert ((observed - 500) ** 2 / 500).sum() < 60
        assert draws.max() < 1.0
        assert abs(np.corrcoef(draws[:-1], draws[1:])[0, 1]) < 0.05
