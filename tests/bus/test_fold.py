"""Folds: their methods by the types of messages."""

from typing import Any

import pytest

from asyncrl.bus.fold import Fold
from asyncrl.bus.log import Record
from topics.actors import StopRequested
from topics.prompts import PromptIssued, PromptIssuedHeaders
from topics.topic import ACTORS, PROMPTS


class Wide(Fold):
    """A fold of bodies, and of headers where it is given these."""

    def _on_stop(self, request: StopRequested, record: Record) -> None: ...

    def _on_issued(self, message: PromptIssued | PromptIssuedHeaders, record: Record) -> None: ...


def test_a_fold_reads_what_its_methods_take():
    assert {stream: one.headers_only for stream, one in Wide.inputs().items()} == {ACTORS: False, PROMPTS: False}


def test_a_method_that_takes_no_message_is_refused_with_its_name():
    with pytest.raises(TypeError, match="_on_any takes Any"):
        type("Loose", (Fold,), {"_on_any": _on_any})


def _on_any(self, message: Any, record: Record) -> None: ...


@pytest.mark.parametrize("method", [lambda self, message, record: None, lambda self: None])
def test_a_method_without_a_type_is_refused_with_what_to_write(method: Any):
    method.__qualname__ = "Loose._on_any"

    with pytest.raises(TypeError, match=r"Loose._on_any names no type of message; expected \(self, message: TYPE"):
        type("Loose", (Fold,), {"_on_any": method})
