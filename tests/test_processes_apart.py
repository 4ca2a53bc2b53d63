"""A process that is started apart: Ctrl-C in the terminal is not for it, and cores are not divided against it."""

import subprocess
import sys

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
