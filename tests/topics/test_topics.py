"""Messages on the wire, and the table they stand in."""

import struct
from itertools import combinations
from typing import Any, Union, get_args, get_origin, get_type_hints

import msgpack
import msgspec
import numpy as np
import pytest

from asyncrl.bus.layout import DEFAULT
from asyncrl.bus.publish import pack
from harness.examples import example
from topics.prompts import PROMPT_ISSUED, PromptRow
from topics.table import BUILT_IN, BY_NAME, TOPICS
from topics.topic import STREAMS, Topic
from topics.trajectories import Segment, TrajectoryGenerated, VersionCount
from topics.wire import Headers, Message, WireError, decode, encode

EVERY_TOPIC = pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
WITH_HEADERS = [topic.message for topic in TOPICS if topic.message.HEADERS is not Headers]


def generated() -> TrajectoryGenerated:
    segment = Segment(
        tokens=np.array([1, 40, 2**31 - 1, 2], np.int32),
        mask=np.array([0, 1, 1, 1], np.uint8),
        logprobs=np.array([0.0, -0.5, -1.25, -9.0], np.float32),
        versions=np.array([-1, 4, 4, 5], np.int32),
    )
    return TrajectoryGenerated(
        trajectory_id="p000042-3",
        prompt_id="p000042",
        member=3,
        group_size=8,
        stage="rl",
        rows=[PromptRow("^abc=", "cba")],
        segments=[segment],
        completion="cba",
        versions=[VersionCount(4, 2), VersionCount(5, 1)],
    )


def as_map(message: Message) -> dict[str, Any]:
    unpacked: dict[str, Any] = msgpack.unpackb(encode(message), strict_map_key=False)
    return unpacked


def same(one: Any, other: Any) -> bool:
    """Equality that looks into arrays."""
    return encode(one) == encode(other)


@EVERY_TOPIC
def test_every_message_survives_the_wire(topic: Topic[Any]):
    message = example(topic.message)

    body = pack(message, topic)

    read = msgspec.json.decode(body, type=topic.message) if topic.json else decode(topic.message, body)
    assert same(read, message)
    assert read.v == topic.message.V


@EVERY_TOPIC
def test_garbage_of_every_kind_is_refused_as_a_message(topic: Topic[Any]):
    body = encode(example(topic.message))
    field = next(field.name for field in msgspec.structs.fields(topic.message) if field.name != "v")

    for bad in (
        b"",
        b"\xc1",
        b"garbage",
        body[:-1],
        body + b"\x00",
        msgpack.packb([1, 2]),
        msgpack.packb({field: msgpack.ExtType(5, b"x")}),
    ):
        with pytest.raises(WireError, match=f"not a {topic.message.__name__}"):
            decode(topic.message, bad)


@EVERY_TOPIC
def test_every_message_can_be_read_by_plain_msgpack(topic: Topic[Any]):
    names = {field.name for field in msgspec.structs.fields(topic.message)}

    assert set(as_map(example(topic.message))) == names


def test_token_arrays_are_raw_little_endian_bytes_for_any_msgpack_reader():
    message = generated()

    [segment] = as_map(message)["segments"]

    assert struct.unpack("<4i", segment["tokens"]) == (1, 40, 2**31 - 1, 2)
    assert struct.unpack("<4f", segment["logprobs"]) == (0.0, -0.5, -1.25, -9.0)
    assert np.frombuffer(segment["mask"], "u1").tolist() == [0, 1, 1, 1]
    assert np.frombuffer(segment["versions"], "<i4").tolist() == [-1, 4, 4, 5]


def test_a_message_written_by_plain_msgpack_is_read():
    written = as_map(generated())

    assert same(decode(TrajectoryGenerated, msgpack.packb(written)), generated())


def test_arrays_that_are_slices_or_of_the_other_byte_order_travel_by_value():
    message = generated()
    message.segments[0].tokens = np.arange(8, dtype=np.int32)[::2]

    assert decode(TrajectoryGenerated, encode(message)).segments[0].tokens.tolist() == [0, 2, 4, 6]


def test_readers_ignore_fields_they_do_not_know():
    written = as_map(generated())

    read = decode(TrajectoryGenerated, msgpack.packb({**written, "colour": "red", "nested": {"a": [1]}}))

    assert same(read, generated())


@pytest.mark.parametrize("behind", [0, 1])
def test_readers_accept_their_own_version_and_the_one_before(behind: int):
    written = as_map(generated()) | {"v": TrajectoryGenerated.V - behind}

    assert decode(TrajectoryGenerated, msgpack.packb(written)).member == 3


@pytest.mark.parametrize("behind", [-1, 2])
def test_readers_refuse_a_newer_version_and_one_too_old(behind: int):
    version = TrajectoryGenerated.V - behind
    written = as_map(generated()) | {"v": version}

    with pytest.raises(WireError, match=f"TrajectoryGenerated v{version}; this program reads"):
        decode(TrajectoryGenerated, msgpack.packb(written))


@pytest.mark.parametrize(
    ("field", "value", "output"),
    [
        ("tokens", [1, 2, 3, 4], "expected raw bytes"),
        ("tokens", b"\x00" * 15, "no whole number"),
        ("tokens", b"\x00" * 12, "segment arrays differ in length: 3 tokens, 4 mask"),
        ("mask", b"\x00" * 5, "4 tokens, 5 mask"),
        ("logprobs", b"\x00" * 32, "8 logprobs"),
        ("versions", b"", "0 versions"),
    ],
)
def test_arrays_of_a_wrong_type_or_length_are_refused(field: str, value: object, output: str):
    written = as_map(generated())
    written["segments"][0][field] = value

    with pytest.raises(WireError, match=output):
        decode(TrajectoryGenerated, msgpack.packb(written))


def test_an_array_of_two_dimensions_cannot_be_written():
    message = generated()
    message.segments[0].tokens = np.zeros((2, 2), np.int32)

    with pytest.raises(WireError, match=r"one dimension, got shape \(2, 2\)"):
        encode(message)


def test_every_topic_has_one_name_and_every_subject_leads_back_to_its_topic():
    assert len(BY_NAME) == len(TOPICS)
    for topic in TOPICS:
        assert BUILT_IN.topic_of(topic.subject("a-run", "some-key" if topic.key else "")) is topic
    assert BUILT_IN.topic_of("asyncrl.a-run.never.said") is None
    assert BUILT_IN.topic_of("asyncrl.a-run") is None


def test_a_topic_refuses_a_missing_key_and_one_too_many():
    with pytest.raises(ValueError, match=r"trajectory\.graded takes a key \(trajectory_id\)"):
        BY_NAME["trajectory.graded"].subject("a-run")
    with pytest.raises(ValueError, match=r"batch\.packed takes no key"):
        BY_NAME["batch.packed"].subject("a-run", "1")


def test_the_patterns_of_two_streams_never_meet():
    patterns = [(topic.pattern("a-run").split("."), topic.stream) for topic in TOPICS]

    for (one, stream), (other, another) in combinations(patterns, 2):
        meet = len(one) == len(other) and all(
            "*" in pair or len(set(pair)) == 1 for pair in zip(one, other, strict=True)
        )
        assert not meet, f"{'.'.join(one)} of {stream} and {'.'.join(other)} of {another}"


def test_every_stream_has_topics_and_every_topic_a_stream_of_the_table():
    assert {topic.stream for topic in TOPICS} == set(STREAMS)
    for stream in STREAMS:
        assert DEFAULT.config("a-run", stream, 1)["subjects"]


@EVERY_TOPIC
def test_a_keepers_stream_is_written_by_that_keeper_alone(topic: Topic[Any]):
    if topic.stream.keeper:
        assert topic.publishers == (topic.stream.keeper,)
    assert topic.publishers
    assert topic.subscribers


@pytest.mark.parametrize("kind", WITH_HEADERS, ids=lambda kind: kind.__name__)
def test_headers_take_what_their_message_takes_and_are_left_out_where_it_has_its_default(kind: type[Message]):
    types, fields = get_type_hints(kind, include_extras=True), {one.name: one for one in msgspec.structs.fields(kind)}
    repeated = get_type_hints(kind.HEADERS, include_extras=True)
    for header in msgspec.structs.fields(kind.HEADERS):
        if header.name not in fields:  # a property, which may be narrower than its type
            assert isinstance(getattr(kind, header.name), property), header.name
            continue
        wanted, found = types[header.name], repeated[header.name]
        assert found == wanted or (get_origin(found) is Union and wanted in get_args(found)), header.name
        default = fields[header.name].default
        assert msgspec.NODEFAULT in (default, header.default) or header.default == default, header.name


def test_evaluations_have_a_subject_that_only_their_queue_matches():
    training, held_out = PROMPT_ISSUED.subject("demo", "p000003-1"), PROMPT_ISSUED.subject("demo", "e000003-1")

    assert (training, held_out) == ("asyncrl.demo.prompt.issued.p000003-1", "asyncrl.demo.prompt.issued.eval.e000003-1")
    assert BUILT_IN.topic_of(training) is BUILT_IN.topic_of(held_out) is PROMPT_ISSUED
    assert [queue.pattern("demo") for queue in BUILT_IN.queues_of("rollout")] == [
        "asyncrl.demo.prompt.issued.*",
        "asyncrl.demo.prompt.issued.eval.*",
    ]
    assert [queue.pattern("demo") for queue in BUILT_IN.queues_of("reward")] == ["asyncrl.demo.trajectory.generated.*"]


def segment(**fields: Any) -> Segment:
    given: dict[str, Any] = {"tokens": [1, 40], "mask": [0, 1], "logprobs": [0.0, -0.5], "versions": [-1, 4]} | fields
    kinds = {"tokens": np.int32, "mask": np.uint8, "logprobs": np.float32, "versions": np.int32}
    return Segment(**{name: np.array(given[name], kind) for name, kind in kinds.items()})


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"logprobs": [0.0, 0.7]}, "token 1 has log-prob 0.7"),
        ({"logprobs": [0.0, float("nan")]}, "token 1 has log-prob nan"),
        ({"logprobs": [-1e30, 0.0]}, "token 0 has log-prob -1e\\+30"),
        ({"mask": [0, 2]}, "mask 1 is 2; expected at most 1"),
        ({"tokens": [-1, 3]}, "token 0 is -1; expected at least 0"),
        ({"versions": [-1, -2]}, "version 1 is -2; expected at least -1"),
    ],
)
def test_a_trajectory_with_values_that_no_engine_samples_is_not_read(fields: dict[str, Any], words: str):
    sent = generated()
    sent.segments = [segment()]
    [row] = sent.segments
    for name, values in fields.items():
        setattr(row, name, np.array(values, getattr(row, name).dtype))

    with pytest.raises(WireError, match=words):
        decode(TrajectoryGenerated, encode(sent))


def test_a_log_prob_above_zero_by_rounding_is_zero():
    assert segment(logprobs=[5e-5, -0.5]).logprobs.tolist() == [0.0, -0.5]
