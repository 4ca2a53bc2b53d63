"""Rewards that find the answer in a completion and compare it with the label.

Each follows the reward of the same name in slime; mathematics is compared by the math-verify package.
"""

from __future__ import annotations

import re
import secrets
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from asyncrl.rewards.scorers import make_math

_LAST_CHARS = 300  # of a completion, where `dapo` looks for the answer
_DAPO_ANSWER = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathbf|mathrm|mbox)\s*\{([^{}]*)\}")
_UNITS = re.compile(
    r"\\(?:left|right|!|,|;|:|quad|ldots|dots|%|\$)|\^\s*(?:\\circ|\{\s*\\circ\s*\})|\{,\}|[$%,\"\s]|(?<=\d)th\b"
    r"|\b(?:square|ways|integers|dollars|mph|inches|ft|hours|km|units|points|feet|minutes|digits|cents|degrees|cm|gm"
    r"|pounds|meters|meals|edges|students|children\s*tickets|multiples)\b(?:\s*\^\s*\{?[23]\}?)?",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?", re.ASCII)
_EQUALS = re.compile(r"(?<![<>!:])=")
_LETTERS = "ABCDEFGHIJ"
# A small letter is a choice only where nothing follows it in the line.
_BEFORE = r"\s*(?i:is)?\s*:?\s*(?:\\boxed|\\text|[*($\\{])*([A-Z](?![A-Za-z])|[a-z](?=\W*(?:\n|\Z)))"
_GPQA_ANSWERS = (
    r"(?i:final\s+(?:answer|option|choice))" + _BEFORE,
    r"(?i:answer|option|choice)" + _BEFORE,
    r"(?<![A-Za-z])([A-Z])[*)]*\s+(?i:is\s+(?:the\s+)?(?:correct|right))",
)
_WHOLE = {"yes", "no", "noanswer"}  # answers that `f1` takes only as a whole


def last_number(completion: str, label: Any) -> float:
    """Return 1.0 where the last whole number of a completion is the label, else 0.0. Commas within it are ignored."""
    found = re.findall(r"-?\d+", completion.replace(",", ""))
    return float(bool(found) and found[-1] == str(label))


def last_boxed(text: str) -> str | None:
    """The content of the last `\\boxed{...}` or `\\fbox{...}` of a text, None if it is missing or never ends."""
    starts = [match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)]
    if not starts:
        return None
    depth = 1
    for at in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[starts[-1] : at].strip()
    return None


def make_deepscaler() -> Callable[..., float]:
    """Make the reward that is 1.0 where the boxed answer after the thinking equals the label as mathematics, else 0.0.

    The thinking ends with `</think>` or `###Response`; without either, or without a boxed answer, the reward is 0.
    """
    math = make_math()

    def deepscaler(completion: str, label: Any) -> float:
        _, found, answer = completion.rpartition("</think>")
        if not found:
            _, found, answer = completion.partition("###Response")
        boxed = last_boxed(answer) if found else None
        expected = last_boxed(label) or label if isinstance(label, str) else label
        return math("" if boxed is None else f"\\boxed{{{boxed}}}", expected)

    return deepscaler


def make_boxed(reward: str) -> Callable[..., float | dict[str, float]]:
    """Make a reward of the content of the last `\\boxed{...}` of a completion; of an empty text without one.

    Args:
        reward: `math`, `f1` or `gpqa`.
    """
    math = make_math() if reward == "math" else None

    def boxed(completion: str, label: Any, metadata: Any = None) -> float | dict[str, float]:
        answer = last_boxed(completion) or ""
        if math is not None:
            return math(f"\\boxed{{{answer}}}" if answer else "", label)
        return f1(answer, label) if reward == "f1" else gpqa(answer, label, metadata)

    return boxed


def dapo(completion: str, label: Any) -> dict[str, float]:
    """1 where the last `Answer:` in the last 300 characters equals the label, else -1; the metric `acc` is 1 or 0.

    Of an equation the right side is compared: integers exactly, other answers as texts without commas, dollars, quotes,
    spaces, the commands of text around words, and the units that Minerva leaves out.
    Source: DAPO (arXiv 2503.14476, section 2.4, and its prompt template in appendix A); Minerva (arXiv 2206.14858,
    appendix D.1).
    """
    found = _DAPO_ANSWER.findall(completion[-_LAST_CHARS:])
    right = bool(found) and _plain(found[-1]) == _plain(str(label))
    return {"reward": 1.0 if right else -1.0, "acc": float(right)}


def f1(completion: str, label: Any) -> dict[str, float]:
    """F1 of the words of completion and label, in lower case without punctuation and articles.

    `yes`, `no` and `noanswer` count only where both are equal. The metrics `precision` and `recall` come with it.
    Source: the evaluation of SQuAD (arXiv 1606.05250, section 6.1) and of HotpotQA (arXiv 1809.09600).
    """
    answered, wanted = _words(completion), _words(str(label))
    common = sum((Counter(answered) & Counter(wanted)).values())
    if {" ".join(answered), " ".join(wanted)} & _WHOLE and answered != wanted:
        common = 0
    if not common:
        return {"reward": 0.0, "precision": 0.0, "recall": 0.0}
    precision, recall = common / len(answered), common / len(wanted)
    return {"reward": 2 * precision * recall / (precision + recall), "precision": precision, "recall": recall}


def gpqa(completion: str, label: Any, metadata: Any = None) -> float:
    """1.0 where the letter that a completion chooses is that of the label, else 0.0.

    The letter is that of the last "final answer is X", else of "answer: X" (also "option", "choice"), else of "X is
    correct", else the last capital that is a choice and a separate word. A completion without any chooses the right one
    if it has the text of that one and of no other. The label is a letter, the number of a choice from 0, or the text of
    one of `metadata["choices"]`; `metadata["correct_letter"]` comes before it. Letters are `metadata["valid_letters"]`,
    or as many as there are choices, or A to D, for a label beyond them A to J.

    Raises:
        ValueError: the label is no choice.
    """
    metadata = metadata or {}
    choices = [str(choice).strip() for choice in metadata.get("choices") or ()]
    wanted = metadata.get("correct_letter", label)
    few = _stripped(wanted) in (*_LETTERS[:4], *"0123")
    usual = _LETTERS[: len(choices) or (4 if few else len(_LETTERS))]
    letters = [str(letter).upper() for letter in metadata.get("valid_letters") or usual]
    expected = _letter(wanted, letters, choices)
    text = completion.rpartition("</think>")[2]
    for pattern in (*_GPQA_ANSWERS, r"(?<![A-Za-z])([A-Z])(?![A-Za-z])"):
        if found := [letter for letter in map(str.upper, re.findall(pattern, text)) if letter in letters]:
            return float(found[-1] == expected)
    named = {choice for choice in map(_bare, choices) if choice and f" {choice} " in f" {_bare(text)} "}
    return float(named == {_bare(dict(zip(letters, choices, strict=False)).get(expected, ""))})


def by_chance(completion: str) -> float:
    """1.0 or 0.0 at random: a control, because a policy can learn nothing from it.

    Source: the random rewards of Spurious Rewards (arXiv 2506.10947).
    """
    return float(secrets.randbits(1))  # child processes may share the state of a generator


def _bare(text: str) -> str:
    """Words and numbers, with their signs and inner punctuation, in lower case."""
    return " ".join(re.findall(r"[-+]?\w+(?:[^\w\s]+\w+)*", text.lower()))


def _joined(text: str) -> str:
    return "".join(text.lower().split())


def _stripped(label: Any) -> str:
    return str(label).strip().upper().removesuffix(".0").strip("().")  # Parquet files hold numbers as 1.0


def _letter(label: Any, letters: list[str], choices: list[str]) -> str:
    text = str(label).strip()
    if _stripped(text) in letters:
        return _stripped(text)
    if text in choices:
        return letters[choices.index(text)]
    own, known = _joined(text), [_joined(choice) for choice in choices]
    if known.count(own) == 1:
        return letters[known.index(own)]
    number = _stripped(text)
    if number.isdecimal() and int(number) < len(letters):
        return letters[int(number)]
    raise ValueError(f"label {label!r} is no choice: letters are {', '.join(letters)}, choices {choices}")


def _plain(answer: str) -> str:
    boxed = last_boxed(answer)
    right = _EQUALS.split(answer if boxed is None else boxed)[-1]
    while (bare := _WRAPPED.sub(r"\1", right)) != right:  # one may be in another
        right = bare
    text = _UNITS.sub("", right).rstrip(".").lower() or right.strip().lower()  # an answer may be a unit alone
    if not _NUMBER.fullmatch(text):
        return text
    whole, _, places = text.lstrip("+").partition(".")
    return text if places.strip("0") else str(int(whole))


def _words(text: str) -> list[str]:
    bare = "".join(character for character in text.lower() if character not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()
