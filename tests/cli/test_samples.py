"""Samples that people read: from the logs, and once tokens were trimmed from a file of bounded size."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from actors.recorder.actor import main
from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import publish
from asyncrl.bus.server import EmbeddedServer
from asyncrl.cli.samples import sample_text
from asyncrl.config.settings import Config
from asyncrl.data.tokenizer import TaskTokenizer
from asyncrl.process import python
from asyncrl.state.samples import Sample, SampleReader, SampleRow, SamplesFile, Turn
from asyncrl.state.token_text import ColourBy, coloured, legend
from harness.runs import command
from harness.stage import DEADLINE_S, Stage, until
from harness.tokenizers import make_model
from topics.actors import RunOpened
from topics.batches import BatchGroup, BatchMember, BatchPacked, BatchTrained
from topics.evals import EvalScored
from topics.ids import stage_of
from topics.prompts import LIVE_TASK, PromptIssued, PromptRow
from topics.topic import TRAJECTORIES
from topics.trajectories import (
    Answer,
    ProgressEntry,
    ProgressStored,
    Reference,
    Segment,
    TrajectoryGenerated,
    TrajectoryProgressed,
    VersionCount,
)

BY_KEEPER = {"writer": "test"}


class Scene:
    """A run whose batches the test publishes, two groups of two members each, and its recorder."""

    def __init__(self, folder: Path, server: EmbeddedServer, bus: Bus, **recorder: int) -> None:
        self.bus = bus
        self.tokenizer = TaskTokenizer.load(make_model(folder))
        config = Config(run=bus.run)
        config.model.path, config.recorder.plot = str(folder), False
        for name, value in recorder.items():
            setattr(config.recorder, name, value)
        self.stage = Stage(folder / bus.run, server, config)
        self.path = self.stage.files.root / "samples.jsonl"

    async def batch(self, step: int, *parts: str, text: str = "") -> None:
        """A batch whose every trajectory sampled the first, third ... part; the others were observed."""
        groups = []
        for prompt_id in (f"p{step:04d}00", f"p{step:04d}01"):
            members = [await self.generated(prompt_id, member, ["question", *parts], text) for member in range(2)]
            groups.append(BatchGroup(prompt_id, members))
        await publish(self.bus, BatchPacked(step, "rl", groups, 0), headers=BY_KEEPER)
        trained = BatchTrained(step, 0, "rl", {}, {0: 4}, 0, [0.5, 0.0], 4, step)
        await publish(self.bus, trained, headers=BY_KEEPER)

    async def generated(
        self, prompt_id: str, member: int, parts: list[str], text: str = "", **fields: Any
    ) -> BatchMember:
        """The result of one trajectory, as a batch or an evaluation refers to it."""
        name, segment = f"{prompt_id}-{member}", self._segment(parts)
        message = TrajectoryGenerated(
            trajectory_id=name,
            prompt_id=prompt_id,
            member=member,
            group_size=8,
            stage=stage_of(name),
            rows=fields.pop("rows", [PromptRow("question", "label")]),
            segments=[segment],
            completion=text or parts[-1],
            versions=[VersionCount(0, int(segment.mask.sum()))],
            **fields,
        )
        sequence = await publish(self.bus, message)
        return BatchMember(name, 0, Reference(sequence, "00", 1), 0.5, 1)

    def _segment(self, parts: list[str]) -> Segment:
        """Parts of tokens, observed and sampled in turn."""
        tokens = [self.tokenizer.encode(part) for part in parts]
        mask = np.concatenate([np.full(len(part), at % 2, np.uint8) for at, part in enumerate(tokens)])
        joined = np.concatenate(tokens)
        return Segment(joined, mask, np.zeros(len(joined), np.float32), np.where(mask, 0, -1).astype(np.int32))

    async def scored(self, version: int) -> None:
        members = [await self.generated(f"e{version:06d}", number, ["question", "x"]) for number in range(5)]
        scored = EvalScored(f"e{version:06d}", version, {}, 0.5, 5, 0, 1.0, members)
        await publish(self.bus, scored, headers=BY_KEEPER)

    async def record(self) -> None:
        """One life of a recorder that is asked to stop at once."""
        context = self.stage.context("recorder", self.bus)
        context.stop.set()
        await main(context)

    async def trim(self) -> None:
        await self.bus.api(f"STREAM.PURGE.{TRAJECTORIES.full_name(self.bus.run)}", {})

    def rows(self) -> list[SampleRow]:
        return list(SamplesFile(self.path.parent).rows())

    async def shown(self, *words: str) -> tuple[int, str]:
        return await command(self.path.parent, words[0], str(self.path.parent), *words[1:])


@pytest.fixture
async def scene(bus: Bus, server: EmbeddedServer, tmp_path: Path) -> Callable[..., Scene]:
    await publish(bus, RunOpened(12, 0, {}))
    return lambda **recorder: Scene(tmp_path, server, bus, **recorder)


def test_labels_of_the_warm_up_are_not_called_sampled():
    sample = Sample("w000001-0", 0.0, "^ab=", "ba", None, turns=[Turn(False, "^cd="), Turn(True, "dc")])

    assert sample_text(sample).plain.endswith("^ab=\nobserved: ^cd=\nlabel:    dc")
    assert "sampled:  dc" in sample_text(msgspec.structs.replace(sample, name="p000001-0")).plain


async def test_samples_are_shown_from_the_logs_and_after_a_trim_from_the_file(scene: Callable[..., Scene]):
    run = scene(samples=3)
    await run.batch(1, "answer")
    await run.batch(2, "first try", "2 right<|im_end|>", "second try")
    await run.scored(2)
    await run.record()

    code, output = await run.shown("samples", "--step", "2")
    assert (code, "4 of 4 trajectories, from the logs" in output) == (0, True), output
    assert "question\nsampled:  first try\nobserved: 2 right<|im_end|>\nsampled:  second try\n" in output
    await run.trim()
    await run.batch(3, "answer")

    code, output = await run.shown("samples", "--step", "1")
    assert (code, "3 of 4 trajectories, from samples.jsonl" in output) == (0, True), output
    code, output = await run.shown("samples", "--step", "2", "--json", "--count", "2")
    assert [json.loads(line)["name"] for line in output.splitlines()] == ["p000200-0", "p000201-0"]
    assert json.loads(output.splitlines()[0])["turns"][1] == {"sampled": False, "text": "2 right<|im_end|>"}
    await publish(run.bus, PromptIssued("p000200", 1, 2), headers=BY_KEEPER)
    code, output = await run.shown("explain", "p000200-1")
    assert (code, "sampled:  first try" in output) == (0, True), output
    [scored] = [row for row in run.rows() if row.event == "eval"]
    assert (scored.step, [sample.name for sample in scored.samples]) == (2, [f"e000002-{k}" for k in range(3)])
    code, output = await run.shown("samples", "--eval", "2")
    assert (code, "0.500 on 5 prompts: 3 of 5 trajectories, from samples.jsonl" in output) == (0, True), output

    run.path.write_bytes(b"".join(run.path.read_bytes().splitlines(keepends=True)[1:]))
    code, output = await run.shown("samples", "--step", "1")
    assert (code, "samples.jsonl does not have it; the nearest there: 2" in output) == (1, True), output
    code, output = await run.shown("dump", "--step", "1")
    assert (code, output.endswith("are gone; batches with all tokens: 3 (nats.keep = run keeps those of all)\n")) == (
        1,
        True,
    )
    code, output = await run.shown("samples", "--step", "40")
    assert (code, output) == (1, f"run {run.bus.run} has packed no batch 40; there are: 1 to 3\n")


async def test_the_prompt_of_a_live_turn_is_what_its_tokens_hold(scene: Callable[..., Scene]):
    run = scene(samples=3)
    parts = ["<|im_start|>user\nhow so?<|im_end|>", "so"]
    member = await run.generated("l000100", 0, parts, rows=[PromptRow("", metadata={"turn": "t"})], task=LIVE_TASK)
    await publish(run.bus, BatchPacked(1, "rl", [BatchGroup("l000100", [member])], 0), headers=BY_KEEPER)

    code, output = await run.shown("samples", "--step", "1")
    assert (code, "\n<|im_start|>user\nhow so?<|im_end|>\nso\n" in output) == (0, True), output
    elsewhere = await SampleReader(run.bus, None).read("l000100-0", member.payload.sequence)
    assert elsewhere is not None and "is shown where the run's directory is" in elsewhere.prompt


async def test_no_sample_is_lost_or_doubled_wherever_the_recorder_is_killed(scene: Callable[..., Scene]):
    run = scene(samples=1)
    for life in range(3):
        process = await run.stage.start("recorder")
        for step in (2 * life + 1, 2 * life + 2):
            await run.batch(step, "answer")
            await run.scored(step)
        await until(lambda before=2 * life: any(row.step > before for row in run.rows()), "it writes samples")
        process.kill()
        await process.wait()
        with run.path.open("ab") as file:
            file.write(b'{"event":"step","st')  # as a kill inside a write leaves it

    await run.record()
    await run.record()

    assert sorted((row.event, row.step) for row in run.rows()) == [
        *(("eval", step) for step in range(1, 7)),
        *(("step", step) for step in range(1, 7)),
    ]


async def test_the_file_of_a_run_of_long_answers_stays_below_its_size(scene: Callable[..., Scene]):
    run = scene(samples=1, samples_mb=1)
    for step in range(1, 41):
        await run.batch(step, "answer", text="x" * 50_000)
    await run.record()

    steps = [row.step for row in run.rows()]
    assert 400_000 < run.path.stat().st_size <= 1_000_000
    assert steps[0] < 20 and steps[-1] == 40 and len(steps) <= 20


def test_a_full_file_keeps_the_newest_rows_and_some_of_all_times(tmp_path):
    file, most = SamplesFile(tmp_path, 20_000), 0
    for step in range(1, 1001):
        file.append(SampleRow("step", step, step, [Sample("p000001-0", 1.0, "p", "c" * 50, None)]))
        most = max(most, file.path.stat().st_size)

    steps = [row.step for row in file.rows()]
    assert 10_000 < most <= 20_000
    assert steps[-1] == 1000 and steps == sorted(steps)
    assert all(any(low < step <= low + 250 for step in steps) for low in (0, 250, 500, 750))

    file.append(
        SampleRow("step", 1001, 1001, [Sample("s", 1.0, "p", "short", None), Sample("l", 1.0, "p", "l" * 30_000, None)])
    )
    assert [sample.name for sample in list(file.rows())[-1].samples] == ["s"]

    with file.path.open("ab") as lines:
        lines.write(b'{"event":"other"}\n')  # as another version writes it
    assert list(file.rows())[-1].step == 1001

    narrow = SamplesFile(tmp_path, 100)  # as after `--resume` with a smaller size
    narrow.append(SampleRow("step", 1002, 1002, []))
    assert [row.step for row in narrow.rows()] == [1002]


async def test_show_prints_the_conversation_and_each_token_once_also_while_it_is_sampled(scene: Callable[..., Scene]):
    run = scene()
    await run.batch(2, "first try", "2 right<|im_end|>", "second try")
    code, output = await run.shown("show", "p000200-1", "--by", "mask")
    assert (code, "question\nsampled:  first try\nobserved: 2 right" in output) == (0, True), output
    assert output.endswith("sampled  observed\nquestionfirst try2 right<|im_end|>second try\n")
    code, output = await run.shown("show", "p000300-0")
    assert code == 1 and "it has no result yet" in output

    await publish(run.bus, TrajectoryProgressed(trajectory_id="p000300-0", log="log-1"))
    tokens = run.tokenizer.encode("first try")

    def answer(start: int, end: int) -> Answer:
        part = tokens[start:end]
        return Answer(
            "generate",
            "00",
            False,
            tokens=part,
            logprobs=np.full(len(part), -2.0, np.float32),
            versions=np.array([3], np.int32),
            start=start,
        )

    for entries in ([answer(0, 1)], [answer(0, 1)], [answer(1, len(tokens))]):
        stored = [ProgressEntry(trajectory_id="p000300-0", offset=0, journal={"0": entry}) for entry in entries]
        await publish(run.bus, ProgressStored("log-1", stored))
    words = ("show", str(run.path.parent), "p000300-0", "--follow", "--by", "logprob")
    pipe = asyncio.subprocess.PIPE
    following = await asyncio.create_subprocess_exec(*python("-m", "asyncrl.cli.main", *words), stdout=pipe)
    assert following.stdout is not None
    try:
        grown = await asyncio.wait_for(following.stdout.readuntil(b"first try"), DEADLINE_S)
        await run.generated("p000300", 0, ["question", "first try"])
        rest = await asyncio.wait_for(following.stdout.read(), DEADLINE_S)
        assert await following.wait() == 0
    finally:
        if following.returncode is None:
            following.kill()
            await following.wait()
    assert grown.decode().endswith("generate: first try")
    assert rest.decode().count("first try") == 2  # as text, and in colours


def test_tokens_are_coloured_by_version_logprob_and_mask():
    segment = Segment(
        np.arange(4, dtype=np.int32),
        np.array([0, 1, 1, 1], np.uint8),
        np.array([0.0, -0.01, -2.0, -9.0], np.float32),
        np.array([-1, 5, 5, 6], np.int32),
    )

    def spans(by: ColourBy) -> list[tuple[str, str]]:
        text = coloured(segment, ["a", "b", "\x1b", "d"], by)
        return [(text.plain[span.start : span.end], str(span.style)) for span in text.spans]

    assert [part for part, _ in spans("version")] == ["a", "b\\x1b", "d"]
    assert [style for _, style in spans("logprob")] == ["dim", "green", "yellow", "bold red"]
    assert [part for part, _ in spans("mask")] == ["a", "b\\x1bd"]
    assert legend([segment], "version").plain == "version 5  version 6  observed"
