"""One run of `asyncrl bench oracle`: `python -m benchmarks.oracle_run BASE DIRECTORY KEY=VALUE ...`.

The run begins with the weights of the run in the folder BASE after its step 0, and takes nothing else from BASE. No
other run uses DIRECTORY, and several runs can begin from BASE at once.
"""

from __future__ import annotations

import sys
from pathlib import Path

import uvloop

from asyncrl.cli.fork import forked_config
from asyncrl.cli.up import bring_up
from asyncrl.config.load import LoadedConfig
from asyncrl.config.settings import Config, StartSettings
from asyncrl.run.directory import RunFiles
from asyncrl.run.launch import Launch

# After sampling, a rollout waits until its batch is next and everything issued has been sampled.
_MODULE = """
import asyncio
import re
import time
from pathlib import Path

METRICS, SLOTS, STEPS, GROUPS, MEMBERS = Path({metrics!r}), {slots}, {steps}, {groups}, {members}
STEP = re.compile(rb'"step":(\\d+),"stage":"rl"')
places, gates, sampled, watcher = {{}}, {{}}, 0, None
spare = GROUPS // 4

def newest():
    if not METRICS.exists():
        return 0
    with METRICS.open("rb") as file:
        file.seek(max(file.seek(0, 2) - 65536, 0))
        return max(map(int, STEP.findall(file.read())), default=0)

async def watch():
    global spare
    changed, before = time.monotonic(), -1
    while gates:
        version = newest()
        if version > before:
            changed, before = time.monotonic(), version
        late = time.monotonic() > changed + 5
        if late:  # others were issued for groups that were dropped: each batch begins and ends that many places later
            changed, spare = time.monotonic(), spare + GROUPS // 4
        due = [one for one in gates if one - spare < (version + 1) * GROUPS]
        # Everything that may be issued before the next step is sampled.
        if late or sampled >= min(version * GROUPS * MEMBERS + SLOTS, STEPS * GROUPS * MEMBERS):
            for place in due:
                gates.pop(place).set()
        await asyncio.sleep(0.05)

async def rollout(row, context):
    global sampled, watcher
    await context.generate(context.tokenizer.encode_prompt(row, max_tokens=None))
    sampled += 1
    gate = gates.setdefault(places.setdefault(row.prompt, len(places)), asyncio.Event())
    if watcher is None or watcher.done():
        watcher = asyncio.create_task(watch())
    await context.tool("wait", gate.wait)
"""


def checkpoint_of(base: Path) -> Path:
    """Return the checkpoint of a base after its step 0."""
    (found,) = RunFiles(base).checkpoints.glob("step000000-*")
    return found


def write_rollout(path: Path, config: Config, slots: int, metrics: Path) -> None:
    """Write the module with the function `rollout` of a run whose rollouts wait for their batch."""
    groups, members, steps = config.buffer.batch_groups, config.rollout.group_size, config.learner.steps
    path.write_text(_MODULE.format(metrics=str(metrics), slots=slots, steps=steps, groups=groups, members=members))


def run_from(base: Path, directory: Path, settings: list[str]) -> int:
    """Start, watch and end a run as `asyncrl up` does; returns its exit code."""
    files = RunFiles(base)
    start = StartSettings(checkpoint="start", step=0, prompt=0)
    config = forked_config(files.read_config(), start, settings, directory, files.base)
    launch = Launch(LoadedConfig(config, files.base, files.config))
    launch.prepare()
    launch.begin_with(checkpoint_of(base))
    return int(uvloop.run(bring_up(launch)))


if __name__ == "__main__":
    sys.exit(run_from(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
