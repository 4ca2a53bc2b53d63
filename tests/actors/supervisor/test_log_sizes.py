"""Logs have a greatest size, whatever is printed into them."""

from pathlib import Path

import pytest

from actors.supervisor.log_sizes import cut_log
from asyncrl.process import ChildProcess, python
from asyncrl.telemetry.logs import LogFile
from harness.runs import WITHOUT_MODEL, up

LOUD = """
from asyncrl.rollout.context import single_turn

async def rollout(row, context):
    print("words " * 40_000)
    await single_turn(row, context)
"""


async def test_the_newest_lines_of_a_log_that_is_too_large_stay_and_its_process_goes_on_writing(tmp_path: Path):
    log = tmp_path / "loud-1.log"
    log.write_text("of the process before\n" * 100)
    code = "for number in range(2000): print('line', number, flush=True)"
    process = await ChildProcess.start(python("-c", code), log=log)
    await process.wait()
    reader = LogFile(log)
    reader.read()
    cut_log(log, 1 << 20)
    assert len(log.read_text().splitlines()) == 2100  # it is small enough

    cut_log(log, 8000)

    lines = log.read_text().splitlines()
    assert '"event":"log cut: it was too large"' in lines[0]
    assert lines[1:] == [f"line {number}" for number in range(2000 - len(lines) + 1, 2000)]
    assert 1500 < log.stat().st_size < 2500
    assert process.last_lines == "line 1997 | line 1998 | line 1999"
    assert reader.read() == []
    with log.open("a") as more:
        more.write("and further\n")
    assert [line.event for line in reader.read()] == ["and further"]


@pytest.mark.slow
async def test_a_rollout_function_that_prints_without_end_does_not_fill_the_disk(tmp_path: Path):
    (tmp_path / "loud.py").write_text(LOUD)
    settings = (*WITHOUT_MODEL, "task.rollout=loud.py:rollout", "supervision.log_mb=1", "learner.steps=100000")
    async with up(tmp_path, *settings) as run:
        await run.reaches(lambda: run.actor("rollout-1"), "a worker starts")
        await run.reaches(lambda: "log cut: it was too large" in run.log("rollout-1"), "its log is cut")
        run.interrupt()
        assert await run.ended() == 0, run.story
