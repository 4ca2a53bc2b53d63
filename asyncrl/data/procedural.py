"""Prompts made by a rule: `reverse` and `sum`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from string import ascii_lowercase
from typing import Annotated, Any, TypeVar

import msgspec

from asyncrl.environments.protocol import DataError, DataSource, check_options, draw
from topics.prompts import PromptRow

_SUM_DIGITS = 128  # of all terms: a draw has 448 bits
O = TypeVar("O", bound=msgspec.Struct)  # noqa: E741 - options


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
        number = draw("reverse", self._seed, index, 26**self._letters)
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
        number = draw("sum", self._seed, index, self._choices**options.terms)
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
