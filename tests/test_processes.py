"""Child processes: whose terminal and group they have, and what is left of them when they have ended."""

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.process import ChildProcess, state_of
from harness.stage import until

PARENT = """
import asyncio, os, sys
from asyncrl.process import ChildProcess

CHILD = '''
import os
try:
    terminal = os.open("/dev/tty", os.O_RDWR)
except OSError:
    terminal = None
print("found", os.getpgrp() == os.getpid(), os.getsid(0), terminal)
'''

async def main():
    os.close(os.open("/dev/tty", os.O_RDWR))  # this one has a terminal
    print("session", os.getsid(0), flush=True)
    child = await ChildProcess.start([sys.executable, "-c", CHILD], apart=True)
    assert await child.wait() == 0

asyncio.run(main())
"""


def test_it_leads_a_group_in_the_session_of_its_parent_and_has_no_terminal():
    in_a_terminal = f"import pty, sys; sys.exit(pty.spawn([sys.executable, '-c', {PARENT!r}]))"

    done = subprocess.run(
        [sys.executable, "-c", in_a_terminal],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.split("\n") if line.startswith(("session", "found")))
    assert lines["found"].strip() == f"True {lines['session'].strip()} None"


LEAVING = """
import subprocess, sys, time
from pathlib import Path

nameless = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={})

deeper = "import subprocess, sys, time; " \\
    "own = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True); " \\
    "print(own.pid, flush=True); time.sleep(600)"
started = subprocess.Popen([sys.executable, "-c", deeper], stdout=subprocess.PIPE, text=True, start_new_session=True)
below = started.stdout.readline().strip()
Path(sys.argv[1] + ".new").write_text(f"{started.pid} {below} {nameless.pid}")
Path(sys.argv[1] + ".new").rename(sys.argv[1])
if sys.argv[2] == "killed":
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["killed", "left"])
async def test_what_it_started_ends_with_it_also_in_sessions_of_their_own(tmp_path: Path, how: str):
    child = await ChildProcess.start([sys.executable, "-c", LEAVING, str(tmp_path / "pids"), how], apart=True)
    other = await ChildProcess.start([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        await until((tmp_path / "pids").exists, "it has started others")
        if how == "killed":
            child.kill()
        assert await child.wait() == (-9 if how == "killed" else 0)
        left = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        await until(lambda: all(state_of(pid) == "gone" for pid in left), "they have ended", 60)
        assert other.returncode is None
    finally:
        await other.end()


SHARING = """
import sys
import torch
from multiprocessing import shared_memory
from pathlib import Path

memory = shared_memory.SharedMemory(create=True, size=1 << 16)
tensor = torch.zeros(1 << 16)
_, handle, _ = tensor.untyped_storage()._share_filename_cpu_()
Path(sys.argv[1] + ".new").write_text(f"{memory.name} {handle.decode().lstrip('/')}")
Path(sys.argv[1] + ".new").rename(sys.argv[1])
import time
time.sleep(600)
"""


async def test_what_removes_the_shared_memory_of_a_process_that_was_killed_is_let_do_so(tmp_path: Path):
    child = await ChildProcess.start([sys.executable, "-c", SHARING, str(tmp_path / "names")])
    try:
        await until((tmp_path / "names").exists, "it shares memory", 60)
        shared = [Path("/dev/shm") / name for name in (tmp_path / "names").read_text().split()]
        assert all(file.exists() for file in shared)
    finally:
        child.kill()
        await child.wait()
    await until(lambda: not any(file.exists() for file in shared), "it is removed", 60)
