"""Silent actors: which are killed, and which wait for a CPU."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl.bus.liveness import Liveness
from asyncrl.process import cpu_wait_s, process_cpu_s, state_of
from harness.stage import until

SILENCE_S = 10.0


class Watched:
    """An actor that is silent from `began_s` on; `waits` is the part of the time for which it waits for a CPU."""

    def __init__(self, waits: float) -> None:
        self.killed_s, self.starved_s = 0.0, 0.0
        self.now_s = 0.0
        self.waits = waits
        self.waited_s = 0.0
        bus: object = None
        self.liveness = Liveness(
            bus,  # type: ignore[arg-type]
            SILENCE_S,
            self._on_silent,
            on_starved=self._on_starved,
            waited_s=lambda _: self.waited_s,
        )
        self.began_s = time.monotonic() + 60.0  # that a start may take
        self.liveness.begin("a")

    def _on_silent(self, _: str) -> None:
        assert not self.killed_s
        self.killed_s = self.now_s

    def _on_starved(self, _: str) -> None:
        assert not self.starved_s
        self.starved_s = self.now_s

    def until(self, end_s: float) -> None:
        while self.now_s < end_s:
            self.now_s += 1.0
            self.waited_s += self.waits
            self.liveness.judge(self.began_s + self.now_s)


@pytest.mark.parametrize("waits", [0.0, 0.3])
def test_a_silent_actor_that_had_a_cpu_is_killed_after_the_silence(waits: float):
    watched = Watched(waits)
    watched.until(100.0)

    assert (watched.killed_s, watched.starved_s) == (11.0, 0.0)


def test_one_that_waits_for_a_cpu_has_six_times_as_long():
    watched = Watched(0.7)
    watched.until(100.0)

    assert (watched.killed_s, watched.starved_s) == (61.0, 11.0)


def test_one_that_was_starved_and_then_freezes_is_killed_once_it_has_not_waited_for_half_of_the_silence():
    watched = Watched(1.0)
    watched.until(20.0)
    watched.waits = 0.0
    watched.until(100.0)

    assert 30.0 < watched.killed_s < 40.0


THREADS = """
import hashlib, threading
def work():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)
for _ in range(4):
    threading.Thread(target=work).start()
"""


async def test_a_process_whose_main_thread_sleeps_waits_for_no_cpu_however_many_of_its_threads_do():
    with subprocess.Popen([sys.executable, "-c", THREADS]) as process:
        try:

            def waited_s() -> float:
                stats = (path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"))
                return sum(int(stat.split()[1]) for stat in stats) / 1e9

            await until(lambda: len(os.listdir(f"/proc/{process.pid}/task")) == 5, "its threads are there")
            for thread in os.listdir(f"/proc/{process.pid}/task"):
                os.sched_setaffinity(int(thread), {min(os.sched_getaffinity(0))})
            all_s, main_s = waited_s(), cpu_wait_s(process.pid)
            await until(lambda: waited_s() > all_s + 2.0, "its threads wait for their turns")
            assert cpu_wait_s(process.pid) < main_s + 0.5
        finally:
            process.kill()


async def test_a_process_that_shares_a_cpu_has_waited_for_it_and_a_stopped_one_waits_for_nothing():
    command = [sys.executable, "-c", "while True: pass"]
    with subprocess.Popen(command) as first, subprocess.Popen(command) as second:
        try:
            for process in (first, second):
                os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
            await until(lambda: cpu_wait_s(first.pid) > 0.1, "it waits for its turn")
            first.send_signal(signal.SIGSTOP)
            await until(lambda: state_of(first.pid) == "stopped", "it is stopped")
            before_s, other_s = cpu_wait_s(first.pid), process_cpu_s(second.pid)
            await until(lambda: process_cpu_s(second.pid) > other_s + 0.1, "the other has the CPU")
            assert cpu_wait_s(first.pid) == before_s
        finally:
            first.kill()
            second.kill()
    assert cpu_wait_s(first.pid) == 0.0
