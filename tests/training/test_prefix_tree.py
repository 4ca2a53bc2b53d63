"""Tokens that rows have in common are computed once, and count for each row."""

import dataclasses

import numpy as np
import pytest
import torch

from asyncrl.training.attention import document_attention
from asyncrl.training.init_model import create_model
from asyncrl.training.packing import packed
from asyncrl.training.passes import Passes
from asyncrl.training.torch_trainer import TorchSettings, TorchTrainer
from harness.roles import ALPHABET, SHAPE
from harness.training import FIRST, policy, policy_rows

CPU = torch.device("cpu")


def odd_rows():
    """Equal rows, rows that begin others, branches within answers, one-token answers, and rows that share nothing."""
    rng = np.random.default_rng(3)
    prompt, answer, other = (rng.integers(FIRST, FIRST + 26, size) for size in (30, 25, 40))
    texts = [
        [*prompt, *answer],
        [*prompt, *answer],
        [*prompt, *answer[:20], *answer[:9]],
        [*prompt, *answer[:20]],
        [*prompt, *answer[::-1]],
        [*prompt[:18], *other],
        [*prompt, FIRST],
        [*other[:5], *prompt],
        [*other],
        [*other, FIRST, FIRST],
        [*prompt[:10], FIRST],
    ]
    rows = policy_rows(rng, len(texts))
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        size, first = len(text), len(text) - 1 if number in (6, 10) else min(30, len(text) - 5)
        mask = (np.arange(size) >= first).astype(np.uint8)
        rows[number] = dataclasses.replace(
            row,
            tokens=np.array(text, np.int32),
            mask=mask,
            logprobs=np.where(mask, -3.0, 0.0).astype(np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
            advantages=np.full(size, row.advantages[0], np.float32),
            weights=np.full(size, 0.01, np.float32),
        )
    return rows


def test_each_scored_token_follows_the_tokens_of_its_row():
    rows = odd_rows()

    inputs = packed(rows, CPU, shared=True)

    documents, places = inputs.documents, inputs.positions.tolist()
    assert inputs.tokens.shape[1] < 0.6 * sum(len(row.tokens) for row in rows)
    starts = np.cumsum([0, *(count * length for count, length in documents.groups)])
    for row in rows:
        for end in np.flatnonzero(row.mask):
            place = places.pop(0)
            group = int(np.searchsorted(starts, place, "right")) - 1
            length = documents.groups[group][1]
            first = starts[group] + (place - starts[group]) // length * length
            seen = [range(starts[one], starts[one + 1]) for one in documents.seen[group]]
            fed = [int(inputs.tokens[0, at]) for part in (*seen, range(first, place + 1)) for at in part]
            assert fed == row.tokens[:end].tolist()
            assert documents.positions[0, place] == end - 1
    assert not places


@pytest.mark.parametrize("window", [None, 7])
def test_a_token_attends_to_its_row_as_if_rows_were_apart(window):
    rows = odd_rows()
    tree, apart = packed(rows, CPU, shared=True), packed(rows, CPU)
    torch.manual_seed(0)
    table = torch.randn(100, 60, 8 * 8, dtype=torch.float64, requires_grad=True)  # of a token at a place

    def attended(inputs):
        heads = table[inputs.documents.positions[0], inputs.tokens[0]].unflatten(1, (8, 8)).transpose(0, 1)[None]
        query, key, value = heads[:, :4], heads[:, 4:6], heads[:, 6:]
        found, _ = document_attention(None, query, key, value, None, documents=inputs.documents, sliding_window=window)
        found = found[0, inputs.positions]
        return found, torch.autograd.grad(found.square().sum(), table)[0]

    for one, other in zip(attended(tree), attended(apart), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_step_with_shared_prefixes_is_that_of_separate_rows(tmp_path):
    create_model(tmp_path / "model", alphabet=ALPHABET, seed=0, shape=dataclasses.replace(SHAPE, context=64))
    rows = odd_rows()
    trainers = [TorchTrainer(tmp_path / "model", TorchSettings(share_prefixes=one)) for one in (False, True)]

    for _ in range(3):
        apart, shared = (trainer.step(rows, policy()) for trainer in trainers)
        assert shared["loss"] == pytest.approx(apart["loss"], abs=1e-6)
        assert shared["grad_norm"] == pytest.approx(apart["grad_norm"], rel=1e-5)


def test_rows_of_a_prompt_stay_in_one_pass_as_far_as_it_holds_them():
    rows = odd_rows()
    for budget in (60, 100, 1000):
        cut = Passes(CPU, micro_batch_tokens=budget, shared=True).cut(rows)

        assert sorted(id(row) for batch in cut for row in batch) == sorted(map(id, rows))
        sizes = [packed(batch, CPU, shared=True).tokens.shape[1] for batch in cut]
        assert all(size <= budget or len(batch) == 1 for size, batch in zip(sizes, cut, strict=True))
    assert len(cut) == 1
