"""Processes of a run with a harness are killed: worker, program, sandbox, engine and NATS server."""

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import pytest

from asyncrl.bus.blobs import CHUNKS
from asyncrl.bus.log import read_last
from asyncrl.cli.chaos import Plan, inject_until_end
from asyncrl.run.directory import RunFiles
from asyncrl.run.fault_injection import Target
from asyncrl.sandboxes.control_groups import group_parents
from harness.audited import audited_clean, messages_on, topics_left_by
from harness.runs import Run, two_steps_more, up
from harness.sandboxes import settings_of
from harness.stage import until
from topics.topic import BLOBS, TRAJECTORIES
from topics.trajectories import TRAJECTORY_GENERATED

AGENT = """
import json, os, sys, time, urllib.request
resumes = "--resume" in sys.argv
messages = json.load(open("session")) if resumes else [{"role": "user", "content": sys.stdin.read()}]
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
while (turn := sum(one["role"] == "assistant" for one in messages)) < 3:
    json.dump(messages, open("session", "w"))
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    messages.append(json.load(urllib.request.urlopen(request))["choices"][0]["message"])
    messages.append({"role": "user", "content": str(turn)})
    print(turn, file=open("turns", "a"))
    time.sleep(float(os.environ.get("PAUSE_S", 0.2)))
"""
CONFIG = """
run = "short"
[nats]
keep = "run"
stream_max_mb = 512
[model]
create.context = 256
create.template = "{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
create.alphabet = "0123456789abcdefghijklmnopqrstuvwxyz^=?|>- "
[task]
source = "rows.jsonl"
rollout = "harness:agent"
[reward]
function = ""
[harnesses.agent]
kind = "command"
command = ["python3", "agent.py"]
[rollout]
workers = 2
slots = 6
group_size = 4
max_new_tokens = 8
seeded = true
[buffer]
batch_groups = 2
[workers]
lease_s = 1.0
[supervision]
silence_s = 3.0
[recorder]
plot = false
[learner]
trainer = "scripted"
checkpoint_every = 10
"""
TESTED = {"tests": {"three turns": ["sh", "-c", "test $(wc -l < turns) = 3"]}}
LONG = "learner.steps=1000"
ROLES = ("rollout", "program", "sandbox", "engine", "engine-server", "nats")
PROMISED_S = 5.0  # after which nothing of a run is left


@pytest.fixture
def marker() -> Iterator[Path]:
    """A folder that the sandboxes of a run mount, so that their processes are known by it."""
    settings_of("bubblewrap")  # which skips the test where it does not start
    with tempfile.TemporaryDirectory(prefix="asyncrl-marker-") as folder:
        Path(folder).chmod(0o755)  # bubblewrap starts as a user without rights
        yield Path(folder)


def write_run(folder: Path, marker: Path) -> str:
    """Write the rows of the run; returns its config."""
    large = {"files": {"large": "0" * 900_000}}  # too large for a message
    rows = [
        {"prompt": f"task {number}", "metadata": TESTED | (large if number % 8 == 0 else {})} for number in range(40)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return CONFIG + f"[harnesses.agent.files]\n'agent.py' = '''{AGENT}'''\n[sandbox]\nreadable = ['{marker}']\n"


def left_of(marker: Path, workers: set[int]) -> list[str]:
    """Return processes that see the marker, and control groups and folders that the workers made."""
    sees = [f"process {file.parent.name}" for file in Path("/proc").glob("[0-9]*/mountinfo") if has(marker, file)]
    made = [*group_parents().values(), Path(tempfile.gettempdir())]
    names = [path.name for parent in made for path in parent.glob("asyncrl-sandbox-*")]
    return sees + [name for name in names if int(name.split("-")[3]) in workers]


def has(marker: Path, mounts: Path) -> bool:
    try:
        return f" {marker} " in mounts.read_text()
    except OSError:  # it has just ended
        return False


async def note_workers(run: Run, found: set[int]) -> None:
    """Collect the numbers of all rollout workers."""
    while True:
        found |= {pid for pid, line in run.processes().items() if "actors.main rollout" in line}
        await asyncio.sleep(0.2)


async def has_blobs(run: Run) -> bool:
    """Return whether the body of a message was too large for it, and is a blob."""
    async with topics_left_by(run) as bus:
        return await read_last(bus, CHUNKS[BLOBS]) is not None


class Result(NamedTuple):
    """The result of a trajectory."""

    reward: float | None
    metrics: dict[str, float]
    tokens: list[list[int]]  # of its segments


Results: TypeAlias = dict[str, Result]  # by trajectory


async def results_of(run: Run) -> Results:
    """Return the results of all trajectories."""
    async with topics_left_by(run) as bus:
        found = (await messages_on(bus, TRAJECTORIES)).on(TRAJECTORY_GENERATED)
    return {
        one.trajectory_id: Result(
            one.outcome.reward, one.outcome.metrics, [part.tokens.tolist() for part in one.segments]
        )
        for one in found
    }


async def run_once(
    folder: Path, marker: Path, *settings: str, kills: int = 0, every_s: float = 0.5, roles: Sequence[str] = ROLES
) -> tuple[Run, list[str]]:
    """Run to the end, or stop after so many kills and two steps more; returns the run, and a line for each kill.

    Raises:
        AssertionError: something of the run is left after `PROMISED_S`, or its audit is not clean.
    """
    lines: list[str] = []
    workers: set[int] = set()
    async with up(folder, *settings, config=write_run(folder, marker)) as run:
        noting = asyncio.create_task(note_workers(run, workers))
        seen = asyncio.create_task(until(lambda: bool(left_of(marker, set())), "a process sees the marker"))
        await run.reaches(run.steps, "the first step")
        plan = Plan([Target(role, "kill") for role in roles], 280.0, every_s, kills, seed=8)
        if kills:
            await inject_until_end(RunFiles(run.root), plan, lines.append)
            await two_steps_more(run, "steps after the kills")
            run.interrupt()
        assert await run.ended() == 0, run.story
        noting.cancel()
        await seen
        await until(lambda: not left_of(marker, workers), "nothing of the run is left", PROMISED_S)
    assert workers
    await audited_clean(folder)
    return run, lines


def failures(results: Results) -> list[str]:
    """Return the trajectories with less than the whole reward."""
    return [name for name, found in results.items() if (found.reward, found.metrics["failed"]) != (1.0, 0.0)]


@pytest.mark.slow
async def test_kills_of_all_processes_of_a_harness_lose_nothing_and_grade_nothing_as_a_failure(
    tmp_path: Path, marker: Path
):
    roles = [role for role in ROLES if role != "engine-server"]
    run, lines = await run_once(tmp_path, marker, "engine.kind=scripted", LONG, kills=6, roles=roles)

    results = await results_of(run)
    assert len(lines) == 6, lines
    assert failures(results) == []
    of_prompts: dict[str, list[list[list[int]]]] = {}
    for name, found in results.items():
        of_prompts.setdefault(re.sub(r"-\d+$", "", name), []).append(found.tokens)
    assert all(one == members[0] for members in of_prompts.values() for one in members)
    assert await has_blobs(run)


@pytest.mark.slow
@pytest.mark.nightly
async def test_programs_that_continue_their_sessions_after_kills_earn_the_whole_reward(tmp_path: Path, marker: Path):
    agent = "harnesses.agent"
    resumes = [f"{agent}.resume=snapshot", f'{agent}.resume_command=["python3", "agent.py", "--resume"]']
    roles = [role for role in ROLES if role != "engine-server"]
    run, lines = await run_once(
        tmp_path, marker, "engine.kind=scripted", LONG, *resumes, kills=20, every_s=1.0, roles=roles
    )

    assert len(lines) == 20, lines
    assert failures(await results_of(run)) == []


@pytest.mark.slow
@pytest.mark.nightly
async def test_after_100_kills_the_segments_of_a_harness_equal_those_of_an_undisturbed_run(
    tmp_path: Path, marker: Path
):
    folders = [tmp_path / "calm", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    calm, _ = await run_once(folders[0], marker, "learner.steps=40", "harnesses.agent.environment={PAUSE_S='0'}")
    killed, lines = await run_once(folders[1], marker, LONG, kills=100, every_s=1.0)

    print(*lines, sep="\n")
    expected, found = await results_of(calm), await results_of(killed)
    both = expected.keys() & found.keys()
    print(f"{len(lines)} kills; {len(found)} trajectories, {len(both)} of them in both runs")
    assert len(lines) == 100
    assert failures(found) == []
    assert [name for name in both if found[name].tokens != expected[name].tokens] == []
    assert len(both) >= 40 * 8
