"""Findings of the doctor about live traffic."""

from asyncrl.state.diagnose import diagnose
from asyncrl.state.status import run_status
from harness.states import NOW_S, MadeState
from topics.actors import ActorStarted
from topics.engines import EngineReady
from topics.groups import GroupDropped


def with_gateway(**safety: float) -> MadeState:
    case = MadeState()
    config = case.state.config
    config.gateway.count, config.gateway.engines, config.live.fraction = 1, "served", 0.5
    for name, bound in safety.items():
        setattr(config.live.safety, name, bound)
    for role, actor in (("sessions", "sessions-1"), ("engine", "engine-served-1")):
        case.publish(ActorStarted(role, actor, "elsewhere", 1), at_s=NOW_S - 90)
    return case


def live_ones(case: MadeState) -> list[tuple[str, str]]:
    return [found for found in case.found() if found[0] in ("channel behind", "live alarm")]


def test_a_channel_that_is_held_too_far_behind_is_found():
    case = with_gateway()
    case.state.config.buffer.max_lag = 2
    case.vitals("sessions-1", turns_skipped_behind=7.0)
    case.publish(EngineReady("engine-served-1", "http://f", 0, 3, "d", 8), at_s=NOW_S - 80)
    assert live_ones(case) == []  # version 5 is the newest

    case.state.config.buffer.max_lag = 1
    assert live_ones(case) == [("channel behind", "engine-served-1")]
    [words] = [one.evidence for one in diagnose(case.state) if one.cause == "channel behind"]
    assert words.startswith("version 3 is live, 2 versions behind training")
    assert words.endswith("(7 so far)")


def test_figures_beyond_their_bounds_are_alarms():
    case = with_gateway(questions=0.25)
    case.vitals("sessions-1", live_questions=0.25, live_invalid_calls=0.05, live_length_drift=2.0)
    assert live_ones(case) == []

    case.vitals("sessions-1", live_questions=0.5, live_disagreement=0.4, live_length_drift=0.2)
    found = {("live alarm", "questions"), ("live alarm", "disagreement"), ("live alarm", "length_drift")}
    assert {*live_ones(case)} == found
    case.state.config.live.safety.kl_bound = 0.5
    case.state.figures["live_reference_kl"] = 0.75
    assert {*live_ones(case)} == found | {("live alarm", "kl_bound")}
    assert run_status(case.state, case.state.now_ns).judge_agreement == 0.6


def test_turns_that_were_not_recorded_are_told():
    case = with_gateway()
    case.publish(ActorStarted("gateway", "gateway-1", "elsewhere", 1), at_s=NOW_S - 90)
    case.vitals("gateway-1", turns_unrecorded=0.0)
    assert ("turns unrecorded", "gateway-1") not in case.found()

    case.vitals("gateway-1", turns_unrecorded=3.0, spool_failed=1.0)
    [words] = [one.evidence for one in diagnose(case.state) if one.cause == "turns unrecorded"]
    assert words == "3 turns were served and not stored: the disk of the spool took no more; 0 facts wait"


def test_data_keys_that_are_kept_because_the_clock_jumped_are_told():
    case = with_gateway()
    case.vitals("supervisor-1", retention_clock_ahead_s=0.0)
    assert ("clock off", "supervisor-1") not in case.found()

    case.vitals("supervisor-1", retention_clock_ahead_s=360_000.0)
    [words] = [one.evidence for one in diagnose(case.state) if one.cause == "clock off"]
    assert words.startswith("live.retention_days erases nothing: the clock is 100.0 h ahead")


def test_a_run_that_learns_from_turns_alone_waits_for_people_and_not_for_data():
    case = with_gateway()
    case.vitals("prompter-1", open_groups=1, no_more_prompts=1)
    assert ("end of data", "prompter") in case.found()

    case.state.config.live.fraction = 1.0
    assert case.found() == []


def test_turns_that_were_dropped_do_not_end_the_data_of_a_run_without_rows():
    case = with_gateway()
    case.state.config.live.fraction = 1.0
    case.vitals("prompter-1", open_groups=1, no_more_prompts=1)
    for number in range(2):
        case.publish(GroupDropped(f"l00000{number}", "purged"))

    assert case.found() == [("groups dropped", "buffer")]
