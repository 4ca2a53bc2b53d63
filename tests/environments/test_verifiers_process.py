"""The processes of tasksets, with a program in place of a Python that has verifiers."""

import asyncio
from pathlib import Path

from asyncrl.environments.verifiers.process import VerifiersOptions, close_processes, process_of

PROGRAM = """#!/bin/sh
echo started >> starts
read -r taskset
sleep 0.2
echo '{"number": 0, "value": {"count": 3}}'
cat > /dev/null
"""


async def test_trajectories_that_begin_at_the_same_time_share_one_process(tmp_path: Path):
    program = tmp_path / "python"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    options = VerifiersOptions(python=str(program), folder=str(tmp_path))
    try:
        opened = await asyncio.gather(*(asyncio.to_thread(process_of, "sums", options) for _ in range(8)))
    finally:
        close_processes()

    assert {process.count for process in opened} == {3}
    assert (tmp_path / "starts").read_text() == "started\n"
