"""The English of code, docs, errors and commits: few words of an old dialect, few long sentences, short subjects."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DIALECT = re.compile(
    r"\b(behind|beside|besides|anew|whoever|whomever|meanwhile|nobody|somebody|everybody|of (?:its|their|one's) own|"
    r"so many|goes on|go on|went on|gone on|comes? to|came to|stands?|stood|lies|by turns|for good|merely|whatever|"
    r"of whom|none of|alike|at hand|under way|as it is|as they are|what (?:is|was|are|were|has|had|it|they|no|nobody)|"
    r"where (?:it|they|there|that|none|one|no|nothing|not))\b",
    re.IGNORECASE,
)
PER_1000_WORDS, LONG_SENTENCE, LONG_PERCENT, SUBJECT = 2.0, 35, 8.0, 72
FOLDERS = ("topics", "actors", "asyncrl", "benchmarks")
FIRST_CHECKED = "f803171f"  # subjects of later commits are checked


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@cache
def strings(path: Path) -> list[tuple[bool, str]]:
    """Each text of a module, and whether it is a docstring."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    texts = [node for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [(id(node) in docstrings, str(node.value)) for node in texts]


def code_texts(folder: str) -> Iterator[tuple[str, str]]:
    for path in python_files(folder):
        yield from ((str(path), text) for is_docstring, text in strings(path) if is_docstring)
        for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
            if token.type == tokenize.COMMENT:
                yield str(path), token.string


def message_texts(folder: str) -> Iterator[tuple[str, str]]:
    """Texts of errors, findings, log events and help: strings of four words or more."""
    for path in python_files(folder):
        for is_docstring, text in strings(path):
            if not is_docstring and len(text.split()) >= 4:
                yield str(path), text


def page_texts() -> Iterator[tuple[str, str]]:
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        if path.parent.name != "reference":  # generated
            yield str(path), re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)


def check_dialect(texts: Iterable[tuple[str, str]]) -> None:
    words, found = 0, []
    for path, text in texts:
        words += len(text.split())
        found += [
            f"{path}: {match[0]!r} in {text[max(0, match.start() - 40) : match.end() + 20]!r}"
            for match in DIALECT.finditer(text)
        ]
    rate = 1000 * len(found) / words

    assert rate <= PER_1000_WORDS, f"{rate:.1f} per 1,000 words:\n" + "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_avoid_the_dialect(folder: str):
    check_dialect(code_texts(folder))


@pytest.mark.parametrize("folder", FOLDERS)
def test_errors_and_log_events_avoid_the_dialect(folder: str):
    check_dialect(message_texts(folder))


def test_pages_avoid_the_dialect():
    check_dialect(page_texts())


def sentences(text: str) -> list[str]:
    text = re.sub(r"^[|#].*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\n(?=\S)", " ", text)
    parts = re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])|\n\n+|\n\s*[-*] |\n\s*\d+\. ", text)
    return [part for part in parts if len(part.split()) > 3]


def test_few_sentences_of_pages_are_long():
    found = [sentence for _, text in page_texts() for sentence in sentences(text)]
    long = [sentence for sentence in found if len(sentence.split()) > LONG_SENTENCE]

    assert 100 * len(long) / len(found) <= LONG_PERCENT, "\n\n".join(long)


def test_commit_subjects_are_short():
    log = subprocess.run(
        ["git", "log", "--format=%h %s", f"{FIRST_CHECKED}..HEAD"],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if log.returncode != 0:
        pytest.skip(f"git knows no commit {FIRST_CHECKED} here: {log.stderr.strip()}")
    long = [line for line in log.stdout.splitlines() if len(line.partition(" ")[2]) > SUBJECT]

    assert not long, "\n".join(long)
