"""Processor time that actors report: their own, and that of the processes which do their work."""

import os
import subprocess

from actors.runtime.actor import cpu_s, server_cpu_s
from asyncrl.process import descendants, living_descendants, living_processes, process_cpu_s, python
from harness.stage import until

ROLES = ("engine", "reward", "prompter")
BURN = """
import time
while time.process_time() < 0.3:
    pass
print(flush=True)
input()
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"


def test_an_actor_counts_its_children_and_theirs():
    before = {role: cpu_s(role) - cpu_s("buffer") for role in ROLES}
    pipe = subprocess.PIPE
    with subprocess.Popen(python("-c", PARENT), stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        after = {role: cpu_s(role) - cpu_s("buffer") for role in ROLES}
        child.communicate(b"\n")

    assert all(after[role] - before[role] > 0.2 for role in ROLES), (before, after)


async def test_the_server_of_a_run_counts(server, bus):
    process = server.process

    async def worked() -> bool:
        await bus.api("INFO")
        return process_cpu_s(process.pid) > 0

    await until(worked, "the server used processor time")

    used = process_cpu_s(process.pid)
    assert server_cpu_s() >= used > 0


def test_the_descendants_of_a_process_are_those_that_a_look_at_all_processes_finds():
    pipe = subprocess.PIPE
    with subprocess.Popen(python("-c", PARENT), stdin=pipe, stdout=pipe) as child:
        child.stdout.readline()
        found, expected = living_descendants(os.getpid()), descendants(os.getpid(), living_processes())
        child.communicate(b"\n")

    assert len(found) >= 2
    assert sorted(found) == sorted(expected)
