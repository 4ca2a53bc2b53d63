"""Threads of a rank that compute only on cores that nobody else wants."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from actors.learner.rank_process import leave_cores


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="a policy of Linux")
def test_threads_that_compute_leave_their_cores_and_the_others_of_their_process_do_not():
    with ThreadPoolExecutor(1, initializer=leave_cores) as pool:
        assert pool.submit(os.sched_getscheduler, 0).result() == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
