"""Cores that serving and training share."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.runtime.cpu_priority import leave_cores, set_nice
from harness.stage import Stage

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a policy of Linux")


def test_threads_that_compute_leave_their_cores_and_the_others_of_their_process_do_not():
    with ThreadPoolExecutor(1, initializer=leave_cores) as pool:
        assert pool.submit(os.sched_getscheduler, 0).result() == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.mark.parametrize(
    ("idle", "actor", "leaves"),
    [
        ("all", "judge-1", True),
        ("all", "learner-1", True),
        ("all", "gateway-1", False),
        ("all", "engine-1", False),
        ("ranks", "learner-1", False),  # its ranks do, all but their heartbeats
        ("none", "judge-1", False),
    ],
)
def test_processes_that_nobody_waits_for_leave_their_cores_where_the_config_says_so(
    stage: Callable[..., Stage], idle: str, actor: str, leaves: bool
):
    config = stage(gateway={"count": 1, "nice": 0, "idle": idle}).config
    with ThreadPoolExecutor(1) as pool:  # policies are of threads, and those of a process begin with its first one's
        pool.submit(set_nice, config, actor).result()
        assert pool.submit(os.sched_getscheduler, 0).result() == (os.SCHED_IDLE if leaves else os.SCHED_OTHER)
