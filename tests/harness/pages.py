"""Files and programs that the docs pages show."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GENERATED = {"settings.md", "topics.md"}  # tested where they are made
PAGES = {
    page.name: page
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
    if page.name not in GENERATED and page.exists()
}
PAGES["benchmarks"] = ROOT / "benchmarks" / "README.md"
PAGES |= {page.parent.name: page for page in sorted((ROOT / "recipes").rglob("README.md"))}
FENCE = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A fenced block: its language, what stands behind it, its text."""

    language: str
    file: str
    text: str


@cache
def text_of(page: str) -> str:
    return PAGES[page].read_text(encoding="utf-8")


def blocks(page: str) -> list[Block]:
    found = []
    for language, info, text in FENCE.findall(text_of(page)):
        name = re.search(r"file=(\S+)", info)
        found.append(Block(language, name[1] if name else "", text))
    return found


def written(page: str, folder: Path) -> None:
    """Put the files of a page into a folder."""
    for block in blocks(page):
        if block.file:
            (folder / block.file).write_text(block.text)
