"""The README and the pages are true: commands parse, links lead somewhere, names exist, and code blocks run."""

import asyncio
import os
import re
import shlex
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import LogReader
from asyncrl.bus.publish import publish
from asyncrl.cli.main import COMMANDS, parser_for
from asyncrl.config.load import load_config
from asyncrl.config.reference import documented_tables, known_settings
from asyncrl.rewards.graders import GradeRequest, open_grader
from asyncrl.run.preflight import check_surroundings
from harness.pages import FENCE, PAGES, ROOT, blocks, text_of, written
from harness.stage import Stage, until
from topics.engines import EngineReady
from topics.prompts import PromptIssued, PromptRow
from topics.roles import OWN
from topics.table import BY_NAME
from topics.topic import STREAMS, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED, TrajectoryGenerated
from topics.wire import decode

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
EVERY_PAGE = pytest.mark.parametrize("page", PAGES)
LINK = re.compile(r"\]\(([^)\s]+)\)")
DOTTED = re.compile(r"[a-z_]+(\.[a-z_]+)+")
FILE = re.compile(r"(actors|asyncrl|benchmarks|docs|scripts|tests|topics)(/[\w.-]+)+/?")


def code_spans(page: str) -> list[str]:
    """Return the text in backticks outside fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page)))


def commands(page: str) -> list[list[str]]:
    """Every `asyncrl ...` command line, as words."""
    lines = [line for block in blocks(page) if block.language in ("bash", "sh") for line in block.text.splitlines()]
    lines += code_spans(page)
    starts = ("asyncrl ", ".venv/bin/asyncrl ")
    return [shlex.split(line, comments=True)[1:] for line in map(str.strip, lines) if line.startswith(starts)]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@EVERY_PAGE
def test_every_command_line_parses(page: str) -> None:
    for words in commands(page):
        assert words[0] in COMMANDS, words
        if len(words) == 1 or words[-1] == "--help":
            continue  # a command is named, not called
        arguments = parser_for(words).parse_args(words)  # exits with a message where it does not
        for setting in getattr(arguments, "set", []):
            key = setting.partition("=")[0]
            assert key in known_settings() or key.startswith("task.options."), words


@pytest.mark.parametrize("page", [*PAGES.values(), *REFERENCE], ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page} links to {link}"
        assert not anchor or anchor in anchors(target), f"{page} links to {link}"


@EVERY_PAGE
def test_every_file_named_is_there(page: str) -> None:
    new = {block.file for block in blocks(page) if block.language == "python"}
    for span in code_spans(page):
        if FILE.fullmatch(span) and span not in new:
            assert (ROOT / span).exists(), f"{page} names {span}"


DICTIONARIES = "".join(file.read_text() for file in sorted((ROOT / "asyncrl" / "algorithms").glob("*.py")))


@EVERY_PAGE
def test_every_topic_setting_and_stream_named_exists(page: str) -> None:
    own = re.findall(r'Topic\(\s*"([a-z.]+)"', text_of(page))
    tables = [table.key for table in documented_tables() if table.key]
    nouns = {name.split(".")[0] for name in (*BY_NAME, *tables)}
    known = {*BY_NAME, *known_settings(), *tables, *own}
    tables_in_code = re.findall(r"^([A-Z]+): dict|^([A-Z]+) = (?:\{|Table\()", DICTIONARIES, flags=re.MULTILINE)
    streams = {stream.name for stream in STREAMS} | {name for names in tables_in_code for name in names}
    for span in code_spans(page):
        name = span.partition(" = ")[0]
        if (
            DOTTED.fullmatch(name)
            and name.split(".")[0] in nouns
            and not name.endswith((".py", ".md", ".png", ".json", ".jsonl"))
        ):
            assert name in known, f"{page} names {name}"
        if re.fullmatch(r"[A-Z]{4,}", span) and span not in ("TOML", "JSON", "ROLE", "TOPICS"):
            assert span in streams, f"{page} names {span}"


@EVERY_PAGE
def test_every_test_named_exists(page: str) -> None:
    tests = {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert {span for span in code_spans(page) if re.fullmatch(r"test_\w+", span)} <= tests


@EVERY_PAGE
def test_every_config_shown_is_one(page: str, tmp_path: Path) -> None:
    written(page, tmp_path)
    for block in blocks(page):
        if block.language == "toml":
            config = tmp_path / "config.toml"
            config.write_text(block.text)
            load_config(str(config))


@EVERY_PAGE
def test_blocks_that_run_by_themselves_run(page: str) -> None:
    for block in blocks(page):
        if block.language == "python" and not block.file:
            exec(compile(block.text, page, "exec"), {})


def test_a_prompt_enters_as_few_files_as_the_page_says() -> None:
    page = text_of("architecture.md")
    way = page[page.index("1. **Issue.") : page.index("10. **Weights.")]
    named = re.search(r"Steps 1 to 9, from the prompt to the gradient, name (\d+) files", page)

    assert named is not None
    assert len(set(re.findall(r"[a-z/_]+\.py", way))) == int(named[1]) <= 25


def test_the_picture_shows_actors_and_topics_as_the_table_has_them() -> None:
    picture = ElementTree.parse(ROOT / "docs" / "actors.svg").getroot()
    shown = {element.attrib["data-actor"] for element in picture.iter() if "data-actor" in element.attrib}
    arrows = [element.attrib for element in picture.iter() if "data-topics" in element.attrib]

    assert shown == {*OWN, "operator"}
    assert arrows
    for arrow in arrows:
        for topic in map(BY_NAME.__getitem__, arrow["data-topics"].split()):
            assert set(arrow["data-from"].split()) <= set(topic.publishers), topic.name
            assert set(arrow["data-to"].split()) <= set(topic.subscribers), topic.name
    written = {text for element in picture.iter() for text in (element.text or "").split() if DOTTED.fullmatch(text)}
    files = {"metrics.jsonl", "summary.json", "reward.png"}
    assert written - files == {name for arrow in arrows for name in arrow["data-topics"].split()}


async def test_the_actors_of_the_page_work_in_a_folder_of_their_own(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "harness", tmp_path / "harness")
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, tmp_path)
    written("write-an-actor.md", tmp_path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_actors.py"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 300)

    assert process.returncode == 0, output.decode()


def test_the_configs_of_the_pages_find_their_files(tmp_path: Path) -> None:
    for page in ("write-a-task.md", "write-a-reward.md"):
        written(page, tmp_path)
    configs = sorted(path.name for path in tmp_path.glob("*.toml"))

    assert len(configs) >= 2
    for config in configs:
        load_config(str(tmp_path / config), further=check_surroundings)


async def test_the_rollout_function_of_the_page_makes_trajectories(
    bus: Bus, stage: Callable[..., Stage], tmp_path: Path
) -> None:
    written("write-a-task.md", tmp_path)
    scene = stage(task={"rollout": f"{tmp_path / 'two_tries.py'}:rollout"}, engine={"kind": "scripted"})
    scene.make_model()
    results: list[TrajectoryGenerated] = []
    subject = TRAJECTORY_GENERATED.pattern(bus.run)
    reader = LogReader(
        bus, TRAJECTORIES, lambda record: results.append(decode(TrajectoryGenerated, record.data)), subjects=[subject]
    )
    await reader.start()
    await scene.start("rollout")
    await publish(bus, EngineReady("engine-1", "scripted:engine-1", 0, 0, "made", 16))
    issued = PromptIssued(prompt_id="p000001", member=0, group_size=1, rows=[PromptRow("^abc=", "cba")])
    await publish(bus, issued)
    await until(lambda: bool(results), "the trajectory")
    await reader.close()

    assert len(results[0].segments) == 1
    assert results[0].segments[0].mask.sum() == 2 * 16  # two answers of the scripted engine


async def test_the_rewards_of_the_page_grade(tmp_path: Path) -> None:
    written("write-a-reward.md", tmp_path)
    for function in ("length_reward.py:reward", "judge_reward.py:reward"):
        grader = await open_grader(function, base=tmp_path)
        try:
            good = await grader.grade(GradeRequest("cba", "^abc=", "cba"))
            bad = await grader.grade(GradeRequest("xyz and more and more", "^abc=", "cba"))
        finally:
            await grader.close()
        assert good.reward > bad.reward
