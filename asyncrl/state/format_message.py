"""A message that was listened in on: read by the topic table, tested, and written for people or programs."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from asyncrl.bus.blobs import BLOB
from asyncrl.bus.log import Record
from asyncrl.bus.publish import decode_body
from asyncrl.telemetry.printable import printable
from topics.actors import BlobStored
from topics.table import BUILT_IN, Tables
from topics.weights import WeightsStored
from topics.wire import SEALED, WireError

_SHOWN = 8  # elements of an array or list
_SHOWN_TEXT = 60  # characters of a string


@dataclass
class FormattedMessage:
    """One message as it came."""

    subject: str
    headers: dict[str, str]
    data: bytes
    time_ns: int  # server's clock
    tables: Tables = BUILT_IN  # of the run

    @classmethod
    def of_record(cls, record: Record, tables: Tables = BUILT_IN) -> FormattedMessage:
        """From a log."""
        return cls(record.subject, record.headers, record.data, record.time_ns, tables)

    @property
    def topic(self) -> str:
        """`trajectory.graded`."""
        return ".".join(self.subject.split(".")[2:4])

    @property
    def key(self) -> str:
        """Return the key after the topic's name."""
        return self.subject.rsplit(".", 1)[1] if self.subject.count(".") > 3 else ""

    @cached_property
    def _read(self) -> tuple[Any, str]:
        topic = self.tables.topic_of(self.subject)
        if topic is None:
            return None, f"{len(self.data)} bytes on a subject that is in no row of the topic table"
        if topic.message in (BlobStored, WeightsStored):
            return None, f"{len(self.data)} bytes of a larger message"
        if BLOB in self.headers:
            _, size, _, chunks, *_ = (self.headers[BLOB] + ":::").split(":")
            return None, f"{size} bytes in {chunks} chunks of the blob stream"
        if secret := self.headers.get(SEALED):
            return None, f"{len(self.data)} bytes sealed under {secret}"
        try:
            return decode_body(topic, self.data), ""
        except WireError as error:
            return None, f"undecodable: {error}"

    @property
    def message(self) -> Any:
        """The decoded message; None if its body is not inline, or cannot be read."""
        return self._read[0]

    @property
    def instead(self) -> str:
        """Return the placeholder for a missing message."""
        return self._read[1]


def as_json(formatted: FormattedMessage) -> str:
    """One JSON object: subject, headers and the whole message; binary fields that are no arrays are base64."""
    value: dict[str, Any] = {
        "time": datetime.fromtimestamp(formatted.time_ns / 1e9).astimezone().isoformat(),
        "topic": formatted.topic,
        "subject": formatted.subject,
        "headers": formatted.headers,
        "message": formatted.message,
    }
    if formatted.instead:
        value["instead"] = formatted.instead
    return msgspec.json.encode(value, enc_hook=_plain).decode()


def _plain(value: object) -> object:
    """Return a JSON form of values that JSON lacks: arrays, and arbitrary values of other clients."""
    return value.tolist() if isinstance(value, np.ndarray) else repr(value)


def as_line(formatted: FormattedMessage, *, colour: bool = False) -> str:
    """Time, topic, key and every field, arrays and long values shortened."""
    clock = datetime.fromtimestamp(formatted.time_ns / 1e9).strftime("%H:%M:%S.%f")[:-3]
    dim, cyan, plain = ("\x1b[2m", "\x1b[36m", "\x1b[0m") if colour else ("", "", "")
    instead, key = printable(formatted.instead), printable(f" {formatted.key}" if formatted.key else "")
    fields = f"({instead})" if instead else _fields(formatted.message, dim, plain)
    return f"{dim}{clock}{plain} {cyan}{printable(formatted.topic)}{plain}{key}  {fields}"


def shorten(value: Any) -> str:
    """Shorten a value: `int32[11] 5 9 3 ...`."""
    if isinstance(value, np.ndarray):
        more = " ..." if len(value) > _SHOWN else ""
        return f"{value.dtype}[{len(value)}] " + " ".join(f"{element:.4g}" for element in value[:_SHOWN]) + more
    if isinstance(value, msgspec.Struct):
        return "{" + _fields(value) + "}"
    if isinstance(value, bytes):
        return f"bytes[{len(value)}]"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        text = value if len(value) <= _SHOWN_TEXT else value[:_SHOWN_TEXT] + "..."
        return text if text.isprintable() and text and " " not in text else repr(text)
    if isinstance(value, dict):
        return "{" + _joined([f"{key}={shorten(item)}" for key, item in list(value.items())[:_SHOWN]], len(value)) + "}"
    if isinstance(value, list | tuple):
        most = 2 if value and isinstance(value[0], msgspec.Struct) else _SHOWN
        return "[" + _joined([shorten(item) for item in value[:most]], len(value)) + "]"
    return str(value)


def _joined(shown: list[str], length: int) -> str:
    return " ".join([*shown, f"... {length - len(shown)} more"] if length > len(shown) else shown)


def _fields(message: msgspec.Struct, dim: str = "", plain: str = "") -> str:
    names = [name for name in message.__struct_fields__ if name != "v"]
    return " ".join(f"{dim}{name}={plain}{shorten(getattr(message, name))}" for name in names)
