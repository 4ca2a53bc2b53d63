"""Random programs: each trained id was sampled once, and follows the ids of its prompt."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from asyncrl.data.tokenizer import TaskTokenizer
from harness.session_programs import STYLES, Completion, Program, style_tokenizer
from topics.trajectories import Segment

FEW, MANY = 25, 250  # programs of each of four styles


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TaskTokenizer]:
    folders = {name: Path(tmp_path_factory.mktemp(name)) for name in STYLES}
    return {name: style_tokenizer(folder, STYLES[name]) for name, folder in folders.items()}


def trained(segments: list[Segment]) -> Counter[tuple[bytes, bytes]]:
    """Return each run of trained ids with the ids before it."""
    runs: Counter[tuple[bytes, bytes]] = Counter()
    for segment in segments:
        edges = np.flatnonzero(np.diff(segment.mask, prepend=0, append=0))
        for start, end in edges.reshape(-1, 2).tolist():
            runs[segment.tokens[:start].tobytes(), segment.tokens[start:end].tobytes()] += 1
    return runs


def sampled(completions: list[Completion]) -> Counter[tuple[bytes, bytes]]:
    return Counter(tuple(np.array(ids, np.int32).tobytes() for ids in one) for one in completions)


async def played(style: str, tokenizer: TaskTokenizer, seed: int) -> Program:
    program = Program(seed, tokenizer, STYLES[style])
    await program.run()
    return program


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("style", STYLES)
async def test_random_programs_train_each_sampled_id_once_and_encode_no_history_again(style, count, tokenizers):
    compared = 0
    for seed in range(count):
        program = await played(style, tokenizers[style], seed)

        assert program.reencoded == 0, f"seed {seed}"
        assert trained(program.life.context.segments()) == sampled(program.completions), f"seed {seed}"
        found = program.differences()
        assert (found.messages, found.calls) == (0, 0), f"seed {seed}: {found}"
        compared += found.ids + found.reasoning
    assert compared  # a fresh rendering encodes replies in another way, or leaves reasoning out


def encoded_again(segment: Segment, tokenizer: TaskTokenizer) -> bool:
    """Replace the first trained ids of a segment by those of their text; returns whether they differ."""
    start = int(np.flatnonzero(segment.mask)[0])
    end = start + int(np.argmin(np.append(segment.mask[start:], 0)))
    old, mask = segment.tokens, segment.mask
    new = tokenizer.encode(tokenizer.decode_all(old[start:end].tolist()))
    segment.tokens = np.concatenate([old[:start], new, old[end:]])
    segment.mask = np.concatenate([mask[:start], np.ones(len(new), np.uint8), mask[end:]])
    return new.tolist() != old[start:end].tolist()


async def talk_of(style: str, tokenizers) -> Program:
    return await played(style, tokenizers[style], 3)


@pytest.mark.parametrize("style", STYLES)
async def test_a_reply_that_is_encoded_again_is_found(style, tokenizers):
    program, tokenizer = await talk_of(style, tokenizers), tokenizers[style]
    segments = program.life.context.segments()

    assert any(encoded_again(segment, tokenizer) for segment in segments)

    assert trained(segments) != sampled(program.completions)


@pytest.mark.parametrize("style", STYLES)
async def test_a_completion_that_is_trained_twice_is_found(style, tokenizers):
    program = await talk_of(style, tokenizers)
    segments = program.life.context.segments()

    twice = trained([*segments, segments[0]]) - sampled(program.completions)

    assert twice == trained(segments[:1])


@pytest.mark.parametrize("style", STYLES)
async def test_a_message_that_the_recorded_history_lacks_is_found(style, tokenizers):
    program, end = await talk_of(style, tokenizers), tokenizers[style].eos_ids[0]
    body, ids = program.last
    first, second = [place for place, token in enumerate(ids) if token == end][:2]

    found = program.compared(ids[:first] + ids[second:], body)

    assert found.messages == 1
