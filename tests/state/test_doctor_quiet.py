"""No findings: stops that were asked for, new processes, servers that compile, groups that are done."""

import msgspec

from asyncrl.state.diagnose import diagnose
from asyncrl.state.status import run_status
from harness.states import AT_ENGINE, FLEET, NOW_S, MadeState, work
from topics.actors import (
    ActorStarted,
    ActorStopped,
    FleetScaled,
    RunOpened,
    StopRequested,
    Waiting,
)
from topics.alerts import AlertRaised, UnpauseRequested
from topics.engines import EngineGone, EngineReady
from topics.weights import TrainingFinished


def test_an_engine_that_was_asked_to_leave_is_not_dead():
    case = MadeState(last_step_s=NOW_S - 1)

    assert case.publish(EngineGone("engine-1", "stopped", asked=True), at_s=NOW_S - 0.5).found() == []
    assert case.publish(EngineGone("engine-1", "it crashed"), at_s=NOW_S - 0.4).found() == [("engine dead", "engine-1")]


def test_while_a_run_ends_nobody_is_missed():
    for message in (StopRequested("asyncrl down"), TrainingFinished(100, "steps")):
        case = MadeState(last_step_s=NOW_S - 1).publish(EngineGone("engine-1", "it crashed"), at_s=NOW_S - 0.5)
        case.vitals("rollout-1", at_s=NOW_S - 60)
        assert case.found()
        assert case.publish(message).found() == []


def test_a_process_that_was_just_asked_for_may_take_its_time():
    case = MadeState(last_step_s=NOW_S - 1)
    case.publish(FleetScaled({"rollout": 2}), at_s=NOW_S - 11)
    assert case.found() == []

    case = MadeState(last_step_s=NOW_S - 1)
    case.publish(FleetScaled({"rollout": 2}), at_s=NOW_S - 100)
    assert case.found() == [("actor silent", "rollout")]
    assert case.evidence() == "1 of 2 have not started, and no process has begun for 100 s"

    case.publish(ActorStarted("reward", "reward-1", "elsewhere", 1), at_s=NOW_S - 20)  # few begin at a time
    assert ("actor silent", "rollout") not in case.found()


def test_an_actor_that_ended_once_is_dying_only_if_it_is_not_started_again():
    for ago_s, found in ((1, []), (20, [("actor dying", "learner-1")])):
        case = MadeState(last_step_s=NOW_S - 1)
        words = "ranks [0] did not connect within learner.start_s = 120 s"
        case.publish(ActorStopped("learner", "learner-1", words), at_s=NOW_S - ago_s)

        assert case.found() == found
    assert case.evidence() == f"it ended 20 s ago and was not started again; last error: {words}"


def test_who_stops_a_run_and_goes_on_with_it_lets_nobody_die():
    case = MadeState(last_step_s=NOW_S - 1)
    for at_s in (NOW_S - 50, NOW_S - 40, NOW_S - 2):
        case.publish(ActorStarted("buffer", "buffer-1", "elsewhere", 1), at_s=at_s)
    assert case.vitals("buffer-1").found() == [("actor dying", "buffer-1")]

    settings = case.state.config
    opened = RunOpened(100, 0, {"buffer": {"batch_groups": settings.buffer.batch_groups}})
    assert case.publish(opened, at_s=NOW_S - 3).found() == []


def test_processes_that_the_stop_of_a_run_killed_did_not_die_when_it_is_resumed_and_are_not_missed():
    case = (
        MadeState(last_step_s=280).packed(6, at_s=281).publish(ActorStopped("rollout", "rollout-1", "torn"), at_s=282)
    )
    for actor in case.state.actors:
        case.vitals(actor, at_s=282)
    config = msgspec.to_builtins(case.state.config)
    assert ("learner behind", "learner-1") in case.found()

    case.publish(RunOpened(100, 0, config), at_s=NOW_S - 12).vitals("learner-1", at_s=282)  # read after the other log
    assert [found for found in case.found() if found[1] in ("learner-1", "rollout-1")] == []
    for role in ("supervisor", "learner", "rollout"):
        case.publish(ActorStarted(role, f"{role}-1", "elsewhere", 1), at_s=NOW_S - 11).vitals(f"{role}-1")
    assert [event.text for event in case.state.take_events()] == ["resumed"]
    assert case.state.restarts == 0
    case.publish(EngineReady("engine-1", "http://e", 0, 5, "d", 8), at_s=NOW_S - 11)
    [late] = [one.evidence for one in diagnose(case.state) if one.cause == "learner behind"]
    assert "for 12 s the learner has not reported" in late  # since it was opened, and not since the batch was packed


def test_a_group_whose_every_member_is_done_has_no_straggler():
    case = MadeState().vitals("rollout-1", work("p000007-0", quiet_s=0.5, waiting=AT_ENGINE))
    case.state.ended = {f"p000007-{member}" for member in range(1, 8)}
    assert ("straggler", "p000007-0") in case.found()

    case.state.ended.add("p000007-0")
    assert ("straggler", "p000007-0") not in case.found()


def test_a_server_on_a_gpu_may_compile_before_its_first_answers():
    def starting(kind):
        case = MadeState()
        case.state.config.engine.kind = kind
        case.state.steps, case.state.packed, case.state.ended = [], None, {"p000007-1"}
        case.state.engines["engine-1"].first_ns = int((NOW_S - 65) * 1e9)
        case.vitals("engine-1", answered_at_s=NOW_S - 64, moved_at_s=NOW_S - 64, requests=4)
        return case.vitals("prompter-1", open_groups=6).vitals("rollout-1", work("p000007-0", waiting=AT_ENGINE))

    assert starting("sglang").found() == []
    assert starting("embedded").found() == [("engine dead", "engine-1")]


def test_a_server_on_a_gpu_that_joins_or_comes_back_may_compile_while_the_run_goes_on():
    case = MadeState(last_step_s=NOW_S - 30)
    case.state.config.engine.kind = "sglang"
    case.publish(FleetScaled(FLEET | {"engine": 2}), at_s=NOW_S - 95)
    case.state.engines["engine-1"].first_ns = int(2e9)
    case.publish(ActorStarted("engine", "engine-2", "elsewhere", 1), at_s=NOW_S - 60)
    for version, since_s in ((4, 59), (5, 29)):  # the second is no new start
        case.publish(EngineReady("engine-2", "http://f", 0, version, "d", 8), at_s=NOW_S - since_s)
    at_new = work("p000007-0", waiting=Waiting("engine", "engine-2"))
    case.vitals("engine-2", answered_at_s=NOW_S - 28, moved_at_s=NOW_S - 28, requests=4)
    case.state.ended = {"p000007-1"}
    assert case.vitals("rollout-1", at_new).found() == []

    late = work("p000008-0", waiting=AT_ENGINE)
    case.state.ended.add("p000008-1")
    assert case.vitals("rollout-1", at_new, late).found() == [("straggler", "p000008-0")]
    case.state.engines["engine-2"].first_ns -= int(70e9)
    assert ("engine dead", "engine-2") in case.found()


def beginning(last_step_s):
    """A run whose warm-up was quick and whose first two steps of RL were not; its work advances."""
    case = MadeState()
    case.state.steps, case.state.packed = [], None
    for step in range(-5, 1):
        case.trained(step, at_s=last_step_s - 10 + step / 10, stage="warmup")
    for step in (1, 2):
        case.trained(step, at_s=last_step_s - 8 + 4 * step)
    return case.vitals("prompter-1", open_groups=6).vitals("buffer-1", ready_groups=1)


def test_work_that_advances_is_not_too_slow_before_the_run_has_a_pace():
    many = [work(f"p00000{number}-0", quiet_s=1, waiting=AT_ENGINE) for number in range(6)]
    for late, cause, after_s in ((many, ("no credit", "prompter"), 700), (many[:1], ("straggler", "p000000-0"), 70)):
        for quiet_s, found in ((20, []), (after_s, [cause])):
            case = beginning(NOW_S - quiet_s).vitals("rollout-1", *late)
            case.state.ended = {"p000000-1"} if late == many[:1] else set()
            assert case.found() == found
    hanging = beginning(NOW_S - 20).vitals("rollout-1", work("p000007-0"))
    assert hanging.found() == [("rollout hanging", "rollout-1")]


def test_the_last_batches_wait_for_their_own_groups():
    case = MadeState(last_step_s=NOW_S - 70).vitals("prompter-1", open_groups=6)
    assert case.vitals("rollout-1", work("p000007-0", quiet_s=1, waiting=AT_ENGINE)).found() == [
        ("no credit", "prompter")
    ]

    case = MadeState(last_step_s=NOW_S - 20).vitals("prompter-1", open_groups=6)
    case.vitals("rollout-1", work("p000007-0", quiet_s=1, waiting=AT_ENGINE))
    case.state.total = 8  # three more, as many as may be open
    assert case.found() == []
    case.state.ended = {"p000007-1"}
    assert case.found() == []
    case.vitals("rollout-1", work("p000007-0", quiet_s=5))
    assert case.found() == [("straggler", "p000007-0")]


def test_a_run_that_an_alert_paused_has_no_other_finding_until_it_is_answered():
    case = MadeState(last_step_s=NOW_S - 90)
    case.publish(AlertRaised("low", "reward/mean < 0.5", 5, 0.1, "pause"))
    assert case.found() == [("run paused", "low")]
    status = run_status(case.state, int(NOW_S * 1e9))
    assert (status.state, "trained_tokens" in status.per_s) == ("paused", False)

    case.publish(UnpauseRequested(case.state.paused_at))
    assert case.found() == [("unexplained", "demo")]
