"""What is published under a topic can be read back from its subject and headers, by the bodies and by the headers."""

from typing import Any

import msgspec
import pytest

from asyncrl.bus.log import Record
from asyncrl.bus.publish import WRITER, pack, unpack
from harness.examples import unsealed
from topics.table import TOPICS
from topics.topic import Topic
from topics.wire import encode, headers_of


def published(topic: Topic[Any]) -> tuple[Record, Any]:
    message = unsealed(topic.message)
    if topic.key == "trajectory_id" and hasattr(message, "member"):
        message.prompt_id, message.member = "p000042", 3
    body = pack(message, topic)
    subject = topic.subject("run", topic.key_of(message))
    return Record(topic.stream, 1, subject, headers_of(message) | {WRITER: "keeper-1"}, body, 0), message


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_every_message_is_read_where_it_was_published(topic: Topic[Any]):
    record, message = published(topic)

    found, read = unpack(record, record.data)

    assert found is topic
    assert encode(read) == encode(message)


@pytest.mark.parametrize("topic", [one for one in TOPICS if one.message.HEADERS], ids=lambda topic: topic.name)
def test_headers_alone_say_what_the_message_says(topic: Topic[Any]):
    record, message = published(topic)

    _, read = unpack(record, None)

    for field in msgspec.structs.fields(read):
        assert getattr(read, field.name) == getattr(message, field.name), field.name
