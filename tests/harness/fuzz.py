"""Messages and requests as nobody should write them: seeded mutations of valid ones."""

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgpack
import msgspec

from asyncrl.bus.blobs import BLOB
from asyncrl.bus.publish import WRITER, pack
from harness.examples import unsealed
from topics.actors import REISSUE_REQUESTED, STOP_REQUESTED
from topics.prompts import PROMPT_ISSUED
from topics.table import TOPICS
from topics.topic import PROMPTS, Topic

NAMELESS = ["x" * 200, "ä", "p1_0", "$x", "a/b", "p000001-", "-1", "p000001-x", "{}", "'", '"', "%s"]
VALUES: list[Any] = [None, True, "x", "", -1, 2**63, -(2**63), math.nan, math.inf, -math.inf, [], {}, b"\xff", [[]]]
VALUES += ["y" * 3000, [0] * 300, {"a": {"b": {"c": 1}}}, msgpack.ExtType(5, b"x"), 0.5, "p000001-0", 10**9]
HEADERS = ["", "x", "-1", "1.5", "9" * 400, "nan", "0x1", "٣", "p000001-0"]
BLOBS = [
    "",
    ":::",
    "x",
    "a:1:00:1",
    "a:-1:00:-1",
    "a:9:00:1000000000",
    "a:9:00:0",
    "*:9:00:1",
    ">:9:00:1",
    "a b:9:00:1",
]
BLOBS += ["../x:9:00:1", "a:9" + "9" * 40 + ":00:1", "a:9:zz:1", "a.b.c:9:00:1", "a:1_0:00:1", "a:9:00:1:1"]


class Wrong(NamedTuple):
    """A message that is not as it should be."""

    kind: str
    topic: Topic[Any]
    subject: str
    headers: dict[str, str]
    body: bytes


def valid(topic: Topic[Any], number: int) -> Any:
    """A message of a topic about something that never was: trajectory `p900017-1`, actor `nobody-17`."""
    message = unsealed(topic.message)
    prompt_id = f"p{900000 + number:06d}"
    names = {"trajectory_id": f"{prompt_id}-1", "prompt_id": prompt_id, "group_id": prompt_id}
    names |= {"engine_id": f"nobody-{number}", "actor_id": f"nobody-{number}", "address": "http://127.0.0.1:1"}
    for field, value in (names | {"member": 1, "group_size": 2}).items():
        if field in message.__struct_fields__:
            setattr(message, field, value)
    return message


def wrong_messages(run: str, count: int, seed: int) -> Iterator[Wrong]:
    """As many, over all topics. None that can be read names a writer on a keeper's log, as only its keeper would."""
    dice = random.Random(seed)
    for number in range(count):
        topic = TOPICS[number % len(TOPICS)]
        kinds = SURELY if topic in (STOP_REQUESTED, REISSUE_REQUESTED) else EVERY
        kind = dice.choice(list(kinds))
        message = valid(topic, number)
        describe = getattr(message, "headers", None)
        headers = describe() if callable(describe) else {}
        key = str(getattr(message, topic.key, f"nobody-{number}")) if topic.key else ""
        wrong = Wrong(kind, topic, topic.subject(run, key), headers, pack(message, topic))
        wrong = kinds[kind](dice, wrong)
        read = topic.stream is not PROMPTS or topic is PROMPT_ISSUED  # of the prompter's log, headers alone
        if topic.stream.keeper and kind in SURELY and read and dice.random() < 0.5:
            wrong.headers[WRITER] = "stranger"
        yield wrong


def _cut(dice: random.Random, wrong: Wrong) -> Wrong:
    return wrong._replace(body=wrong.body[: dice.randrange(len(wrong.body))])


def _random(dice: random.Random, wrong: Wrong) -> Wrong:
    return wrong._replace(body=dice.randbytes(dice.randrange(400)))


def _trailing(dice: random.Random, wrong: Wrong) -> Wrong:
    return wrong._replace(body=wrong.body + dice.randbytes(1 + dice.randrange(20)))


def _deep(dice: random.Random, wrong: Wrong) -> Wrong:
    return wrong._replace(body=b"\x81\xa1x" * 3000 + b"\xc0")


def _promises(dice: random.Random, wrong: Wrong) -> Wrong:
    """Containers that claim thousands of millions of elements."""
    return wrong._replace(
        body=dice.choice([b"\xdf\xff\xff\xff\xff", b"\x81\xa1v\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
    )


def _version(dice: random.Random, wrong: Wrong) -> Wrong:
    return _changed(wrong, {"v": dice.choice([-1, 99, "1", None, 2**40, 1.5])})


def _no_blob(dice: random.Random, wrong: Wrong) -> Wrong:
    return wrong._replace(headers={**wrong.headers, BLOB: dice.choice(BLOBS)}, body=b"")


def _flipped(dice: random.Random, wrong: Wrong) -> Wrong:
    body = bytearray(wrong.body)
    for _ in range(1 + dice.randrange(8)):
        body[dice.randrange(len(body))] ^= 1 << dice.randrange(8)
    return wrong._replace(body=bytes(body))


def _typed(dice: random.Random, wrong: Wrong) -> Wrong:
    return _changed(wrong, {dice.choice(wrong.topic.message.__struct_fields__): dice.choice(VALUES)})


def _nested(dice: random.Random, wrong: Wrong) -> Wrong:
    """A wrong value somewhere inside."""
    found: Any = msgpack.unpackb(msgspec.msgpack.encode(_plain(wrong)), strict_map_key=False)
    at = found
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = dice.choice(keys)
        if isinstance(at[key], dict | list) and at[key]:
            at = at[key]
        else:
            at[key] = dice.choice(VALUES)
            return wrong._replace(body=_packed(wrong.topic, found))


def _misplaced(dice: random.Random, wrong: Wrong) -> Wrong:
    """Under a subject of something else, or of what has no name."""
    if not wrong.topic.key:
        return _typed(dice, wrong)
    return wrong._replace(
        subject=f"{wrong.subject.rsplit('.', 1)[0]}.{dice.choice([*NAMELESS, 'p000001-0', 'nobody'])}"
    )


def _headed(dice: random.Random, wrong: Wrong) -> Wrong:
    """A header is missing or says something else."""
    headers = dict(wrong.headers) or {"attempt": "x"}
    name = dice.choice(list(headers))
    if dice.random() < 0.3:
        del headers[name]
    else:
        headers[name] = dice.choice(HEADERS)
    return wrong._replace(headers=headers)


def _forged(dice: random.Random, wrong: Wrong) -> Wrong:
    """As it should be, about something that never was, said by nobody."""
    return wrong


Mutation = Callable[[random.Random, Wrong], Wrong]
SURELY: dict[str, Mutation] = {  # unreadable whatever the dice say
    "cut": _cut,
    "trailing": _trailing,
    "deep": _deep,
    "promises": _promises,
    "version": _version,
    "no blob": _no_blob,
}
EVERY: dict[str, Mutation] = SURELY | {
    "random": _random,
    "flipped": _flipped,
    "typed": _typed,
    "nested": _nested,
    "misplaced": _misplaced,
    "headed": _headed,
    "forged": _forged,
}


def _plain(wrong: Wrong) -> dict[str, Any]:
    plain: dict[str, Any] = (
        msgspec.json.decode(wrong.body) if wrong.topic.json else msgpack.unpackb(wrong.body, strict_map_key=False)
    )
    return plain


def _changed(wrong: Wrong, fields: dict[str, Any]) -> Wrong:
    return wrong._replace(body=_packed(wrong.topic, _plain(wrong) | fields))


def _packed(topic: Topic[Any], plain: dict[str, Any]) -> bytes:
    if topic.json:
        return msgspec.json.encode(plain, enc_hook=repr)
    packed: bytes = msgpack.packb(plain)
    return packed


BODIES: list[bytes] = [
    b"",
    b"{",
    b"nul",
    b"[]",
    b"7",
    b"\xff\xfe",
    b'{"input_ids": [1], "rid": "\xff"}',
    b'{"input_ids": [1], "rid": "\\ud800"}',
    b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}',
    b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}',
    b'{"input_ids": [1], "sampling_params": {"sampling_seed": ' + b"9" * 5000 + b"}}",
    b'{"a": ' * 3000 + b"1",
    b"[" * 100_000,
    b'{"input_ids": [' + b"1," * 5000 + b"1]}",
]
NUMBERS: list[Any] = [
    None,
    -1,
    -(2**63),
    2**31,
    2**63,
    2**64,
    10**30,
    0.5,
    1e-9,
    1e-320,
    1e300,
    "1",
    "",
    [],
    [1],
    {},
    True,
]
PARAMS: tuple[str, ...] = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "min_new_tokens")
PARAMS += ("stop", "stop_token_ids")
PARAMS += ("ignore_eos", "sampling_seed", "stream_interval", "n", "repetition_penalty", "regex", "never_heard_of")
FIELDS = ("input_ids", "sampling_params", "rid", "extra_key", "stream", "return_logprob", "top_logprobs_num", "text")
PATHS: tuple[str, ...] = ("/generate", "/abort_request", "/pause_generation", "/update_weights_from_disk")
PATHS += ("/v1/loads?wait_idle=%s",)
PATHS += ("/flush_cache?timeout=%s", "/nowhere", "/generate/", "//generate", "/%00", "/" + "x" * 3000, "/metrics?%ff")
QUERIES = ("nan", "inf", "-1", "1e400", "x", "", "9" * 400, "%00")
RAW: list[bytes] = [
    b"garbage\r\n\r\n",
    b"\x00\xff\x00\xff" * 20,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET /health HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET /health HTTP/1.1\r\nbad header\r\n\r\n",
    b"GET /health HTTP/1.1\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nExpect: 200-maybe\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n{GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\nGET",
    b"GET /nowhere HTTP/1.1\r\nHost: a\r\n\r\n" * 20,
]


class WrongRequest(NamedTuple):
    """A request that must be refused: as a method, path and body, or as the bytes on the wire."""

    method: str
    path: str
    body: bytes
    raw: bytes = b""


def wrong_requests(count: int, seed: int) -> Iterator[WrongRequest]:
    """As many requests; most are of JSON that is nearly right."""
    dice = random.Random(seed)
    for number in range(count):
        if number % 10 == 0:
            raw = dice.choice(RAW)
            yield WrongRequest("", "", b"", raw if dice.random() < 0.7 else raw[: 1 + dice.randrange(len(raw))])
        elif number % 10 < 3:
            path = dice.choice(PATHS)
            body = dice.choice(BODIES) if dice.random() < 0.7 else dice.randbytes(50)
            method = dice.choice(["POST", "GET", "PUT", "DELETE", "BREW"])
            yield WrongRequest(method, path.replace("%s", dice.choice(QUERIES)), body)
        else:
            params: dict[str, Any] = {"max_new_tokens": 2, dice.choice(PARAMS): dice.choice(NUMBERS)}
            asked: dict[str, Any] = {"input_ids": [1, 2], "sampling_params": params}
            if dice.random() < 0.5:
                asked[dice.choice(FIELDS)] = dice.choice([*NUMBERS, [[1], 2], [-1], [10**6], [[]], ["a"], "x" * 3000])
            yield WrongRequest("POST", "/generate", json.dumps(asked).encode())
