"""The doctor about the sandboxes of rollout workers: a pool that is empty, throttled or leaking."""

from asyncrl.config.sandbox_settings import SandboxSettings
from harness.states import NOW_S, MadeState
from topics.actors import Vitals

AT_S = NOW_S - 1


def case_of(fault="", **values):
    case = MadeState(last_step_s=AT_S)
    case.state.config.sandbox = SandboxSettings(ready=6)
    message = Vitals("rollout", "rollout-1", 1, AT_S, values, sandbox_fault=fault)
    return case.publish(message, at_s=AT_S)


def test_slots_that_wait_for_sandboxes_are_found_with_what_is_held_and_how_long_a_preparation_takes():
    values = {"slots": 4, "held": 10, "preparing": 7, "prepare_s": 31.25, "sandboxes": 9}
    case = case_of(slots_unprepared=0.42, **values)

    assert case.found() == [("sandbox pool empty", "rollout-1")]
    assert case.evidence() == (
        "42% of its 4 slots wait for sandboxes; 7 are being prepared, the last one took 31.2 s; it holds 10 "
        "trajectories of at most 10, with sandbox.ready = 6"
    )
    assert case_of(slots_unprepared=0.05, **values).found() == []


def test_a_pool_whose_sandboxes_are_refused_is_found_with_the_reason():
    reason = "a sandbox of kind e2b does not start: RateLimitException: 429"
    case = case_of(reason, sandbox_refused_at_s=AT_S - 20, sandboxes=3, slots_unprepared=0.9, slots=4)

    assert case.found() == [("sandbox pool throttled", "rollout-1")]
    assert case.evidence() == f"no sandbox has started for 20 s, 3 exist; the last reason: {reason}"
    assert case_of(reason, sandbox_refused_at_s=AT_S - 1).found() == []


def test_a_pool_with_sandboxes_that_did_not_end_is_found_next_to_other_faults():
    case = case_of(sandboxes_left=2, sandboxes=5)

    assert case.found() == [("sandbox pool leaking", "rollout-1")]
    assert case.evidence() == "2 sandboxes did not end when told to, and 5 more exist"
    both = case_of("refused", sandboxes_left=1, sandbox_refused_at_s=AT_S - 9)
    assert both.found() == [("sandbox pool throttled", "rollout-1"), ("sandbox pool leaking", "rollout-1")]
