"""The topic table in its three forms, and the command line around it."""

import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from asyncrl.cli.main import main
from asyncrl.cli.main import run as run_command
from asyncrl.cli.topics import topics_table
from asyncrl.config.asyncapi import asyncapi
from asyncrl.config.fields import fields_of
from asyncrl.config.topics_reference import header_names, topics_markdown
from harness.stories import result
from topics.table import TOPICS
from topics.trajectories import Segment, TrajectoryFailed, TrajectoryGenerated
from topics.wire import Message, headers_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def document():
    return asyncapi()


def references(value):
    if isinstance(value, dict):
        if "$ref" in value:
            yield value["$ref"]
        for item in value.values():
            yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


def resolve(document, reference):
    assert reference.startswith("#/")
    for part in reference[2:].split("/"):
        document = document[part]
    return document


def test_the_page_about_topics_is_generated_from_the_source():
    assert (ROOT / "docs" / "reference" / "topics.md").read_text() == topics_markdown(), (
        "docs/reference/topics.md is old; make it anew: asyncrl topics --markdown > docs/reference/topics.md"
    )


def test_every_topic_has_a_row_in_the_table_and_one_is_shown_with_its_fields(capsys):
    assert list(topics_table().columns[0].cells) == [topic.name for topic in TOPICS]

    assert run_command(["topics", "batch.trained"]) == 0
    assert "batch_sequence" in capsys.readouterr().out
    assert run_command(["topics", "batch.train"]) == 2
    assert "no topic is called 'batch.train'; expected batch.trained" in capsys.readouterr().err


def test_fields_carry_their_comments_types_and_defaults():
    fields = {field.name: field for field in fields_of(Segment)}
    failed = {field.name: field for field in fields_of(TrajectoryFailed)}

    assert fields["tokens"].written == "Int32Array"
    assert "<i4" in fields["tokens"].about
    assert failed["attempt"].default == 0  # inherited
    assert failed["detail"].default is msgspec.NODEFAULT  # required
    assert '| `reason` | `"rollout" or "reward"' in topics_markdown()


def test_headers_in_the_docs_are_those_on_the_wire():
    message = result("p000000-0", (0,))

    assert list(header_names(TrajectoryGenerated)) == [*headers_of(message), "secret", "routing", "spans"]


def test_the_asyncapi_document_holds_together():
    document = msgspec.json.decode(msgspec.json.encode(asyncapi()))

    assert document["asyncapi"] == "3.0.0"
    assert {"title", "version"} <= document["info"].keys()
    for reference in references(document):
        resolve(document, reference)
    for channel in document["channels"].values():
        assert set(re.findall(r"{(\w+)}", channel["address"])) == channel["parameters"].keys()
        assert channel["messages"]
    for operation in document["operations"].values():
        assert operation["action"] in ("send", "receive")
        channel = operation["channel"]["$ref"]
        assert all(message["$ref"].startswith(channel + "/messages/") for message in operation["messages"])
    for group in document["components"].values():
        assert all(re.fullmatch(r"[a-zA-Z0-9._-]+", name) for name in group)


@pytest.mark.parametrize("topic", TOPICS, ids=lambda topic: topic.name)
def test_every_topic_is_a_channel_with_its_speakers_and_its_listeners(topic, document):
    channel = document["channels"][topic.name]
    sends = {name for name, operation in document["operations"].items() if operation["action"] == "send"}

    assert channel["address"].split("{run}")[1].startswith(f".{topic.name}")
    assert {f"{role}.send.{topic.name}" for role in topic.publishers} <= sends
    schema = document["components"]["schemas"][topic.message.__name__]
    names = {field.name for field in msgspec.structs.fields(topic.message)}
    assert schema["properties"].keys() == names
    assert issubclass(topic.message, Message)


def test_binary_fields_are_binary_and_name_what_they_hold():
    schemas = asyncapi()["components"]["schemas"]

    tokens = schemas["Segment"]["properties"]["tokens"]
    assert (tokens["type"], tokens["format"], tokens["x-dtype"]) == ("string", "binary", "<i4")
    assert schemas["DeadLetter"]["properties"]["body"]["format"] == "binary"
    assert "contentEncoding" not in str(schemas)


def test_a_reader_that_leaves_early_is_no_error():
    command = f"{sys.executable} -m asyncrl.cli.main topics --asyncapi | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)

    assert (done.stdout, done.stderr, done.returncode) == ("{\n", "", 0)


@pytest.mark.parametrize(
    ("words", "code", "output"),
    [
        ([], 0, "asyncrl COMMAND --help"),
        (["--version"], 0, "asyncrl "),
        (["nonsense"], 2, "invalid choice"),
        (["scale", "learner=2"], 2, "'learner' cannot be scaled; what can: rollout, reward"),
        (["scale", "rollout=many"], 2, "whole number"),
        (["tap", "trajectorys.*"], 2, "no topic is called 'trajectorys.*'"),
        (["tap", "*", "--where", "reward"], 2, "expected KEY=VALUE"),
        (["explain", "everything"], 2, "'everything' is no trajectory"),
        (["samples", "--count", "-1"], 2, "--count -1: expected 0 (all) or more"),
        (["roles", "My Run"], 2, "'My Run' is no id of a run"),
        (["roles", "--config", "/dev/null/users"], 1, "the users cannot be written"),
        (["bench"], 0, "measurements:"),
        (["status"], 1, "no run under"),
        (["down", "nobody"], 1, "no run called nobody"),
        (["logs"], 1, "no run under"),
        (["status", "--url", "nats://127.0.0.1:1"], 1, "give the run's id"),
        (["status", "demo", "--url", "nats://127.0.0.1:1"], 1, "run demo cannot be reached"),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, list) else None,
)
def test_wrong_usage_gets_one_clear_message(words, code, output, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["asyncrl", *words])

    try:
        ended = main()
    except SystemExit as stop:  # of argparse
        ended = stop.code

    shown = capsys.readouterr()
    assert ended == code
    assert output in shown.out + shown.err
