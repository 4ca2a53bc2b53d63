"""Experts of tokens lie in a blob of their own, of which each rank fetches what it has."""

import itertools
import math

import msgspec
import numpy as np
import pytest

from asyncrl.bus import routing as module
from asyncrl.bus.blobs import CHUNKS, BlobMissing, blob_named
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import check_beside, publish
from asyncrl.bus.routing import Cut, Whole, read_routing, store_routing
from asyncrl.state.audit.reading import audit_run
from asyncrl.training.megatron.parallel_config import Layout
from harness.stories import result
from harness.trimming import announce
from topics.prompts import PromptIssued, PromptRow
from topics.topic import BLOBS
from topics.trajectories import TRAJECTORY_GENERATED
from topics.wire import WireError, encode

LAYERS, WIDTH = 12, 8  # a token takes 96 bytes
ONE = Layout()
LENGTHS = (40_000, 300)  # of the segments


async def stored(bus, *, layout=ONE, lengths=LENGTHS, secret=""):
    """A result whose experts are stored, and these; of each third token they are not known."""
    message = msgspec.structs.replace(result("p000000-0", (0,) * lengths[0]), secret=secret)
    message.segments += [result("p000000-0", (0,) * length).segments[0] for length in lengths[1:]]
    dice = np.random.default_rng(0)
    rows = [dice.integers(1, 256, (length, LAYERS * WIDTH), np.uint8) for length in lengths]
    for one in rows:
        one[::3] = one[-1] = 0
    message.routing = await store_routing(bus, message, rows, Cut(layout.bounds(LAYERS), layout.context))
    return message, rows


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (Layout(), 1.0),
        (Layout(tensor=2, pipeline=4), 1 / 4),
        (Layout(pipeline=2, virtual=3), 1 / 2),
        (Layout(pipeline=5), 3 / 12),  # of 12 layers two stages have three
        (Layout(context=2), 1 / 2),
        (Layout(context=2, pipeline=3), 1 / 6),
    ],
)
async def test_a_rank_reads_its_layers_and_positions_and_no_others(bus, monkeypatch, layout, share):
    """Counted in what comes from the server: at most a share of all bytes, and a chunk where its own tokens end."""
    message, rows = await stored(bus, layout=layout)
    read, fetch = [], module.fetch_chunk

    async def counted(*arguments):
        read.append(await fetch(*arguments))
        return read[-1]

    monkeypatch.setattr(module, "fetch_chunk", counted)
    ranks, whole = 2 * layout.model, sum(one.size for one in rows)
    had = [np.zeros(one.shape, bool).reshape(-1, LAYERS, WIDTH) for one in rows]
    for rank in range(ranks):
        place = layout.place(rank, ranks)
        read.clear()
        found = await read_routing(bus, message, place)
        ends = (3 if layout.context > 1 else 0) * max(map(len, read))
        assert 0 < sum(map(len, read)) <= share * whole + ends < max(share, 0.7) * whole + 1
        for one, known, seen in zip(found, rows, had, strict=True):
            assert one.known.tolist() == known.any(1).tolist()
            cut = one.rows.reshape(seen.shape), known.reshape(seen.shape)
            for tokens, layers in itertools.product(place.tokens(len(known)), place.layers(LAYERS)):
                area = np.s_[tokens.start : tokens.stop, layers.start : layers.stop]
                assert np.array_equal(cut[0][area], cut[1][area])
                seen[area] = True
    assert all(seen[:-1].all() for seen in had)  # by one rank or another; the last token was not fed


async def test_any_layout_reads_what_was_cut_for_another(bus):
    message, rows = await stored(bus, layout=Layout(pipeline=3), lengths=(500,))
    [found] = await read_routing(bus, message, Layout(pipeline=2).place(1, 2))
    assert np.array_equal(found.rows.reshape(-1, LAYERS, WIDTH)[:, 6:], rows[0].reshape(-1, LAYERS, WIDTH)[:, 6:])
    [whole] = await read_routing(bus, message, Whole())
    assert np.array_equal(whole.rows, rows[0])


async def test_experts_are_sealed_with_their_trajectory(bus):
    bus.vault.put("s_20260101_1", bytes(32), until_s=math.inf)
    message, rows = await stored(bus, lengths=(50,), secret="s_20260101_1")
    [found] = await read_routing(bus, message, Whole())
    assert np.array_equal(found.rows, rows[0])
    chunk = await read_last(bus, CHUNKS[BLOBS])
    assert rows[0][1].tobytes() not in chunk.data
    bus.vault.erase(["s_20260101_1"])

    with pytest.raises(SecretGone):
        await read_routing(bus, message, Whole())


async def test_a_chunk_that_is_gone_or_altered_is_found_by_ranks_and_by_the_audit(bus):
    message, _ = await stored(bus, lengths=(50,), layout=Layout(pipeline=2))
    await publish(bus, message)
    record = await read_last(bus, TRAJECTORY_GENERATED)
    await check_beside(bus, record)
    subject = CHUNKS[BLOBS].subject(bus.run, f"{blob_named(message.routing.blob).name}-1")
    first, second = (Layout(pipeline=2).place(rank, 2) for rank in range(2))
    await bus.store(subject, bytes(50 * LAYERS // 2 * WIDTH), {})

    with pytest.raises(BlobMissing, match=r"chunk 1 has digest \w+, \w+ was stored"):
        await read_routing(bus, message, second)
    with pytest.raises(BlobMissing, match="their digest differs"):
        await check_beside(bus, record)
    await bus.api(f"STREAM.PURGE.{BLOBS.full_name(bus.run)}", {"filter": subject})
    with pytest.raises(BlobMissing, match="chunk 1 of 2 is gone"):
        await read_routing(bus, message, second)
    await read_routing(bus, message, first)
    await announce(bus, PromptIssued("p000000", 0, 2, [PromptRow("x")]))
    found = (await audit_run(bus, deep=True)).findings.violations
    gone = f"blob {blob_named(message.routing.blob).name}: chunk 1 of 2 is gone"
    assert ("damaged payload", gone) in [(one.kind, one.found) for one in found]


@pytest.mark.parametrize(
    "wrong",
    [
        *({"tokens": [0, 60]}, {"tokens": []}, {"layers": [0, LAYERS + 1]}, {"layers": [0, 6, 6, 12]}),
        *({"digests": []}, {"known": b""}, {"width": 10**12}, {"blob": "a:1:00:1"}),
    ],
)
async def test_a_message_that_contradicts_itself_is_refused_before_anything_is_fetched(bus, wrong):
    message, _ = await stored(bus, lengths=(50,))
    message.routing = msgspec.structs.replace(message.routing, **wrong)
    with pytest.raises(WireError, match="do not belong together"):
        await read_routing(bus, message, Whole())


async def test_where_no_engine_told_experts_nothing_is_stored(bus):
    message = result("p000000-0", (0,) * 50)
    assert await store_routing(bus, message, [np.zeros((50, 96), np.uint8)], Cut([0, LAYERS], 1)) is None
    assert await read_routing(bus, message, Whole()) == []


async def test_a_result_is_smaller_by_its_experts(bus, monkeypatch):
    """Prints the bytes of docs/internals/routing-replay.md: before, all of them were in the message."""
    tokens, (layers, chosen) = 8192, (48, 8)
    message, layout, read = result("p000000-0", (0,) * tokens), Layout(pipeline=4), []
    rows = np.random.default_rng(0).integers(0, 128, (tokens, layers * chosen), np.uint8)
    message.routing = await store_routing(bus, message, [rows], Cut(layout.bounds(layers), layout.context))
    fetch = module.fetch_chunk

    async def counted(*arguments):
        read.append(await fetch(*arguments))
        return read[-1]

    monkeypatch.setattr(module, "fetch_chunk", counted)
    await read_routing(bus, message, layout.place(1, 4))
    blob = blob_named(message.routing.blob)
    sizes = len(encode(message)), blob.size, blob.chunks, sum(map(len, read))
    before = len(encode(msgspec.structs.replace(message, routing=None))) + rows.size
    print("before {:,}; message {:,}, blob {:,} in {} chunks, read by a stage {:,}".format(before, *sizes))
    assert sizes[0] < 15 * tokens and 4 * sizes[3] == sizes[1] == rows.size
