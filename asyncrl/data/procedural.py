"""Prompts made by a rule: `reverse`, `sum`, and every dataset of the reasoning-gym package."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from string import ascii_lowercase
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from asyncrl.data.protocol import DataError, DataSource, check_options
from topics.prompts import PromptRow

_CHUNK_ROWS = 500
_SUM_DIGITS = 128  # of all terms: a draw has 448 bits
O = TypeVar("O", bound=msgspec.Struct)  # noqa: E741 - options


def _draw(what: str, seed: int, index: int, below: int) -> int:
    """A whole number in [0, below) that depends on nothing but the arguments; below may be up to 2**448."""
    digest = hashlib.blake2b(f"{what}:{seed}:{index}".encode()).digest()
    return int.from_bytes(digest, "little") % below


def _read_options(spec: str, options: dict[str, Any], kind: type[O]) -> O:
    try:
        return msgspec.convert(check_options(spec, options, kind.__struct_fields__), kind)
    except msgspec.ValidationError as error:
        raise DataError(f"data {spec!r}: {error}") from error


class ReverseOptions(msgspec.Struct):
    """Options of `reverse`."""

    letters: Annotated[int, msgspec.Meta(ge=1, le=64)] = 8


class ReverseSource:
    """`^abcdefgh=` asks for `hgfedcba`; letters are drawn evenly, so there are 26**letters prompts."""

    rows_per_epoch: int | None = None

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._letters = _read_options("reverse", options, ReverseOptions).letters
        self._seed = seed

    def row(self, index: int) -> PromptRow:
        """The row at place `index`."""
        number = _draw("reverse", self._seed, index, 26**self._letters)
        text = "".join(ascii_lowercase[number // 26**place % 26] for place in range(self._letters))
        return PromptRow(f"^{text}=", text[::-1])

    def describe(self) -> str:
        """The rule and how many prompts it has."""
        return f"reverse: {self._letters} letters, 26**{self._letters} prompts"


class SumOptions(msgspec.Struct):
    """Options of `sum`."""

    digits: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    terms: Annotated[int, msgspec.Meta(ge=2, le=16)] = 2
    reversed: bool = False  # answer with the lowest digit first, the order in which carries arise
    chat: bool = False  # ask in a chat message, as a pretrained model expects


class SumSource:
    """`^12+34=` asks for `46`; numbers are drawn evenly below 10**digits and padded with zeros.

    With `chat` the prompt is a user's message, and no number begins with a zero.
    """

    rows_per_epoch: int | None = None

    def __init__(self, options: dict[str, Any], seed: int) -> None:
        self._options = found = _read_options("sum", options, SumOptions)
        if found.digits * found.terms > _SUM_DIGITS:
            given = f"{found.terms} terms of {found.digits} digits"
            raise DataError(f"data 'sum': {given}; expected {_SUM_DIGITS} digits in all at most")
        self._least = 10 ** (found.digits - 1) if found.chat else 0
        self._choices = 10**found.digits - self._least  # of each term
        self._seed = seed

    def row(self, index: int) -> PromptRow:
        """The row at place `index`."""
        options, terms = self._options, list[int]()
        number = _draw("sum", self._seed, index, self._choices**options.terms)
        for _ in range(options.terms):
            number, term = divmod(number, self._choices)
            terms.insert(0, term + self._least)
        answer = str(sum(terms))
        label = answer[::-1] if options.reversed else answer
        if options.chat:
            question = f"What is {' + '.join(map(str, terms))}? Answer with a number only."
            return PromptRow([{"role": "user", "content": question}], label)
        return PromptRow(f"^{'+'.join(f'{term:0{options.digits}}' for term in terms)}=", label)

    def describe(self) -> str:
        """The rule and how many prompts it has."""
        options = self._options
        order = ", lowest digit first" if options.reversed else ""
        terms = f" in {options.terms} terms" if options.terms > 2 else ""
        prompts = f"{self._choices}**{options.terms}" if options.chat else f"{10**options.terms}**{options.digits}"
        return f"sum: {options.digits} digits{terms}{order}, {prompts} prompts"


RULES: Mapping[str, Callable[[dict[str, Any], int], DataSource]] = {"reverse": ReverseSource, "sum": SumSource}


class ReasoningGymSource:
    """A dataset of the reasoning-gym package.

    Every 500 rows come from a separate dataset with a hashed seed: some datasets know no index beyond their size, and
    the package itself adds seed and index, so that neighbouring seeds would share nearly all of their rows.
    """

    rows_per_epoch: int | None = None

    def __init__(self, name: str, options: dict[str, Any], seed: int) -> None:
        self._name, self._options, self._seed = name, options, seed
        self._chunk = lru_cache(maxsize=4)(self._make_chunk)
        self._chunk(0)

    def _make_chunk(self, chunk: int) -> Any:
        seed = _draw(f"reasoning-gym:{self._name}", self._seed, chunk, 2**31)
        return make_dataset(self._name, self._options, seed)

    def row(self, index: int) -> PromptRow:
        """The row at place `index`: label is the entry's answer, metadata what its scorer reads."""
        chunk, place = divmod(index, _CHUNK_ROWS)
        entry = self._chunk(chunk)[place]
        metadata = entry["metadata"] | {"source_dataset": self._name}
        if self._options:
            metadata["source_options"] = self._options
        plain = msgspec.msgpack.encode(PromptRow(entry["question"], entry["answer"], metadata), enc_hook=_plain)
        return msgspec.msgpack.decode(plain, type=PromptRow)

    def describe(self) -> str:
        """The dataset and its options."""
        options = "".join(f", {name}={value}" for name, value in self._options.items())
        return f"reasoning-gym {self._name}{options}"


@contextmanager
def no_syntax_warnings() -> Iterator[None]:
    """Import reasoning-gym in the block: a package below it has such lines, of which Python warns as it compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        yield


def make_dataset(name: str, options: dict[str, Any], seed: int) -> Any:
    """Create 500 rows of a dataset of the reasoning-gym package; `options` are fields of its configuration.

    Raises:
        DataError: unknown dataset, unknown option, or a value that the dataset refuses.
    """
    with no_syntax_warnings():
        from reasoning_gym.factory import DATASETS, create_dataset  # takes 0.6 s and 100 MB

    spec = f"reasoning-gym:{name}"
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.4) or sorted(DATASETS)[:5]
        raise DataError(
            f"{spec}: the package has {len(DATASETS)} datasets, but not this one; close: {', '.join(close)}"
        )
    fields = {field.name for field in dataclasses.fields(DATASETS[name][1])}
    check_options(spec, options, fields - {"seed", "size"})
    try:
        return create_dataset(name, **options, seed=seed, size=_CHUNK_ROWS)
    except Exception as error:  # each dataset checks its configuration in its own way, mostly by assert
        raise DataError(f"{spec} refuses its options: {type(error).__name__}: {error}") from error


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):  # before str: a numpy text is a str, too
        return value.item()
    if isinstance(value, str | set | frozenset):
        return str(value) if isinstance(value, str) else sorted(value)
    raise TypeError(f"a {type(value).__name__} in the entry cannot travel")
