"""The channel `live` of a whole run: what moves it survives every kill, and what it names stays in the store."""

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from harness.audited import audited_clean
from harness.runs import UNTRAINED, Run, command, kill, resume, up
from harness.stage import until


async def weights(folder: Path, *words: str) -> str:
    code, output = await command(folder, "weights", *words)
    assert code == 0, output
    return output


async def versions(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(await weights(folder, "list", "--json"))
    return rows


async def live(folder: Path) -> list[int]:
    return [row["version"] for row in await versions(folder) if row["live"]]


async def is_live(folder: Path, version: int) -> bool:
    return await live(folder) == [version]


async def promote_newest(folder: Path) -> int:
    """Promote a version that is neither live nor pruned before the command has begun; returns it."""
    while True:
        version = (await versions(folder))[-1]["version"]
        code, output = await command(folder, "weights", "promote", str(version))
        if code == 0:
            assert f"live: version {version} (0:{version}:" in output
            return int(version)
        assert f"version {version} is not in the store" in output or f"version {version} is live already" in output


async def steps_more(run: Run, count: int) -> None:
    at = len(run.steps())
    await run.reaches(lambda: len(run.steps()) >= at + count, f"{count} steps more")


@pytest.mark.slow
async def test_what_is_live_outlives_the_supervisor_and_the_run_and_goes_back_in_one_command(tmp_path: Path):
    gate = ["weights.gate_metric=accuracy", "weights.gate_threshold=0.0", "eval.prompts=4"]
    patient = ["supervision.silence_s=300", "learner.scripted_step_s=0.4", "learner.steps=5000"]
    async with up(tmp_path, *UNTRAINED, *patient, "learner.keep_versions=12", *gate) as run:
        await run.reaches(lambda: run.rows("eval"), "the evaluation of version 0")
        await until(lambda: is_live(tmp_path, 0), "it passes the gate")
        first = await promote_newest(tmp_path)
        await steps_more(run, 2)
        supervisor = run.actor("supervisor-1")
        assert supervisor is not None
        os.kill(supervisor, signal.SIGSTOP)  # it prunes nothing, and never reads the requests; its successor does
        second = (await versions(tmp_path))[-1]["version"]
        code, output = await command(tmp_path, "weights", "promote", str(second), "--wait", "0.1")
        assert (code, "0.1 s passed before the supervisor answered" in output) == (1, True), output
        asking = asyncio.create_task(weights(tmp_path, "promote", str(first), "--wait", "120"))
        kill(supervisor)
        assert f"live: version {first}" in await asking
        await steps_more(run, 12)

        async def pruned() -> bool:
            """Return whether versions right after those that were promoted are gone."""
            return not {row["version"] for row in await versions(tmp_path)} & {second + 1, second + 2}

        await until(pruned, "versions that were never live are pruned")
        rows = {row["version"]: row["live"] for row in await versions(tmp_path)}
        assert (rows[first], rows[second]) == (True, False)
        assert sum(rows.values()) == 1

    # Everything of the run has been killed by here.
    code, output = await command(tmp_path, "weights", "rollback")
    assert (code, "no live run" in output) == (1, True), output
    async with resume(tmp_path, "short") as again:
        await steps_more(again, 10)
        assert await live(tmp_path) == [first]
        assert f"live: version {second}" in await weights(tmp_path, "rollback")
        rows = {row["version"]: Path(row["location"]) for row in await versions(tmp_path)}
        assert (rows[second] / "model.safetensors").exists()
        shutil.rmtree(rows[first])  # which others may name, too: a scripted step changes no weights
        code, output = await command(tmp_path, "weights", "rollback")
        assert (code, f"version {first} is not in the store (there: " in output) == (1, True), output
        assert await live(tmp_path) == [second]
        again.interrupt()
        await again.ended()
    [row] = [row for row in await versions(tmp_path) if row["live"]]
    assert (row["version"], row["promoted"]) == (second, "rollback")
    code, output = await command(tmp_path, "weights", "short", "promote", "1")
    assert (code, "run short is over" in output) == (1, True), output
    await audited_clean(tmp_path)
