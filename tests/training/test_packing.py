import numpy as np
import pytest
import torch

from asyncrl.algorithms.packing import first_fit
from asyncrl.training.attention import document_attention
from asyncrl.training.packing import by_row, micro_batch, packed
from benchmarks.learner_process import train_row
from harness.training import policy_rows

CPU = torch.device("cpu")


@pytest.mark.parametrize("window", [None, 3, 100])
def test_documents_attend_to_themselves_alone(window):
    rows = policy_rows(np.random.default_rng(0), 9)
    rows = [rows[index] for index in first_fit([len(row.tokens) for row in rows], 1000)[0]]
    documents = packed(rows, CPU).documents
    total = documents.bounds[-1]
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, total, 6) for heads in (4, 2, 2))

    found, _ = document_attention(None, query, key, value, None, documents=documents, sliding_window=window)

    lengths = [len(row.tokens) - 1 for row in rows]
    assert documents.bounds.tolist() == [0, *np.cumsum(lengths)]
    assert documents.positions.tolist() == [[place for length in lengths for place in range(length)]]
    owner, place = np.repeat(np.arange(len(rows)), lengths), np.concatenate([np.arange(length) for length in lengths])
    seen = (owner[:, None] == owner) & (place[:, None] >= place) & (place[:, None] - place < (window or 1000))
    key, value = (one.repeat_interleave(2, 1) for one in (key, value))
    scores = (query @ key.mT / 6**0.5).masked_fill(~torch.from_numpy(seen), -torch.inf)
    torch.testing.assert_close(found, (scores.softmax(-1) @ value).transpose(1, 2), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 3])
def test_long_documents_of_one_length_are_attended_to_at_once_and_alone(window):
    rows = [train_row(number, 2049, 50) for number in range(2)]
    documents = packed(rows, CPU).documents
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 2 * 2048, 4) for heads in (2, 1, 1))

    found, _ = document_attention(None, query, key, value, None, documents=documents, sliding_window=window)

    assert (documents.alike, documents.groups) == (2, ((2, 2048),))
    for place in (slice(0, 2048), slice(2048, 4096)):
        alone = documents._replace(alike=0, groups=((1, 2048),))
        own = (one[:, :, place] for one in (query, key, value))
        expected, _ = document_attention(None, *own, None, documents=alone, sliding_window=window)
        torch.testing.assert_close(found[:, place], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lengths", [(2060, 2060), (130, 5, 400)])
def test_rows_that_are_filled_up_on_a_gpu_keep_their_tokens_and_places(lengths, monkeypatch):
    monkeypatch.setattr("asyncrl.training.packing.put", lambda array, _device: torch.from_numpy(array))
    rows = [train_row(number, length, 50) for number, length in enumerate(lengths)]

    inputs = packed(rows, torch.device("cuda"))

    tokens, bounds = inputs.tokens[0].tolist(), inputs.documents.bounds.tolist()
    assert bounds[-1] % 128 == 0
    for row, start, stop in zip(rows, bounds, bounds[1:], strict=False):
        assert tokens[start:stop] == [*row.tokens[:-1], *[0] * (stop - start - len(row.tokens) + 1)]
    places = [start + at for row, start in zip(rows, bounds, strict=False) for at in range(len(row.tokens) - 1)]
    assert inputs.positions.tolist() == places


def test_each_scored_token_keeps_its_place_temperature_and_row():
    rows = policy_rows(np.random.default_rng(1), 5)

    batch = micro_batch(rows, CPU)

    trained = [np.flatnonzero(row.mask) for row in rows]
    assert batch.inputs.targets.tolist() == np.concatenate([row.tokens[row.mask == 1] for row in rows]).tolist()
    before = batch.inputs.tokens.flatten()[batch.inputs.positions]
    assert before.tolist() == [row.tokens[at - 1] for row, places in zip(rows, trained, strict=True) for at in places]
    assert batch.tokens.rows.tolist() == np.repeat(range(5), list(map(len, trained))).tolist()
    assert batch.inputs.temperatures.tolist() == pytest.approx([rows[row].temperature for row in batch.tokens.rows])
    for row, column in zip(rows, by_row(batch.tokens.behaviour, rows), strict=True):
        assert np.array_equal(column, row.logprobs)
