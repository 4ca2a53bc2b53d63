"""The doctor: what it finds of engines and the versions that they load, from states made by hand."""

from harness.states import AT_ENGINE, FLEET, NOW_S, MadeState, work
from topics.actors import ActorStarted, ActorStopped, FleetScaled, Waiting
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.weights import WeightsPublished


def test_a_server_that_does_not_answer_is_a_dead_engine():
    case = MadeState().vitals("engine-1", answered_at_s=NOW_S - 12, moved_at_s=NOW_S - 12)
    case.vitals("rollout-1", work("p000007-0", waiting=AT_ENGINE))

    assert case.found() == [("engine dead", "engine-1")]
    assert case.evidence() == "the server at http://e has not answered for 11 s"


def test_a_busy_server_is_not_dead_before_its_actor_gives_it_up():
    case = MadeState(last_step_s=NOW_S - 2).vitals("engine-1", answered_at_s=NOW_S - 9, moved_at_s=NOW_S - 2)

    assert case.found() == []


def test_an_engine_that_left_is_dead():
    case = MadeState().publish(EngineGone("engine-1", "its server has not answered for 10 s"), at_s=NOW_S - 20)

    assert case.found() == [("engine dead", "engine-1")]


def test_an_engine_whose_actor_dies_is_dead():
    for ago_s, found in ((3, []), (12, [("engine dead", "engine-1")])):  # it is started again within seconds
        case = MadeState(last_step_s=NOW_S - 2)
        case.publish(EngineGone("engine-1", "stopped", asked=True), at_s=NOW_S - ago_s)
        case.publish(ActorStopped("engine", "engine-1", "exit code 1: no memory"), at_s=NOW_S - ago_s)

        assert case.found() == found


def test_an_engine_that_ends_for_logits_that_are_not_finite_names_the_weights():
    case = MadeState().publish(EngineGone("engine-1", "stopped", asked=True), at_s=NOW_S - 3)
    words = "the server ended: exit code 1: engine: weights 7: logits are not finite, from layer 1 on"
    case.publish(ActorStopped("engine", "engine-1", words), at_s=NOW_S - 3)

    assert case.found() == [("weights not finite", "engine-1")]


def test_trajectories_that_no_engine_takes_are_waiting_for_a_dead_one():
    case = MadeState().vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=4)))
    case.publish(ActorStarted("engine", "engine-1", "elsewhere", 2), at_s=NOW_S - 8)
    case.vitals("engine-1")
    assert case.found() == [("engine dead", "engine")]

    case.state.opened_ns = int((NOW_S - 100) * 1e9)
    case.state.steps = []
    assert case.found() == []  # the first start takes its time


def test_servers_that_start_during_the_warm_up_are_not_dead():
    case = MadeState(last_step_s=NOW_S - 65).vitals(
        "rollout-1", work("p000007-0", waiting=Waiting("version", version=0))
    )
    case.publish(ActorStarted("engine", "engine-1", "elsewhere", 2), at_s=NOW_S - 70)
    case.vitals("engine-1")
    case.state.opened_ns = int((NOW_S - 71) * 1e9)
    case.state.engines["engine-1"].ready_ns = 0
    assert case.state.steps[-1].time_ns > case.state.opened_ns
    assert case.found() == []

    case.state.opened_ns -= int(case.state.config.engine.start_deadline_s * 1e9)
    assert case.found() == [("engine dead", "engine")]


def test_a_server_that_answers_and_samples_nothing_is_paused():
    case = MadeState().vitals("engine-1", answered_at_s=NOW_S - 1, moved_at_s=NOW_S - 50, requests=12)
    case.vitals("rollout-1", work("p000007-0", waiting=AT_ENGINE))

    assert case.found() == [("engine paused", "engine-1")]
    assert "holds 12 requests and has sampled no token for 49 s; p000007-0 has waited for 60 s" in case.evidence()


def test_what_waits_for_a_paused_engine_does_not_hang_by_itself():
    case = MadeState().vitals("engine-1", answered_at_s=NOW_S - 1, moved_at_s=NOW_S - 50)
    case.vitals("rollout-1", work("p000007-0", waiting=AT_ENGINE), work("p000008-0"))
    assert case.found() == [("engine paused", "engine-1"), ("rollout hanging", "rollout-1")]

    soon = MadeState(last_step_s=NOW_S - 9).vitals("rollout-1", work("p000007-0", quiet_s=5, waiting=AT_ENGINE))
    assert soon.found() == []  # the engine's own signs may come a little later


def test_a_version_that_no_engine_loads_is_found():
    case = MadeState().publish(WeightsPublished(0, 6, "d", "files", "there"), at_s=NOW_S - 50)

    assert case.found() == [("version not loaded", "engine-1")]
    assert case.evidence() == "it should have had version 6 50 s ago; it has version 5 (ready)"


def test_an_engine_of_evaluations_may_hold_an_older_version():
    case, late = MadeState(), ("version not loaded", "engine-exams-1")
    case.state.config.eval.engines = "exams"
    case.publish(FleetScaled(FLEET | {"engine-exams": 1}), at_s=NOW_S - 95)
    case.publish(ActorStarted("engine", "engine-exams-1", "elsewhere", 2), at_s=NOW_S - 90)
    case.publish(EngineReady("engine-exams-1", "http://f", 0, 3, "d", 8, update_s=0.1), at_s=NOW_S - 80)
    case.vitals("engine-exams-1", answered_at_s=NOW_S - 1, moved_at_s=NOW_S - 1)
    assert late not in case.found()

    case.state.config.eval.engines = ""
    assert late in case.found()


def test_an_engine_that_dies_of_a_version_is_found_with_its_last_error():
    case = MadeState().publish(EngineUpdating("engine-1", 0, 6), at_s=NOW_S - 6)
    case.publish(EngineGone("engine-1", "stopped", asked=True), at_s=NOW_S - 5)
    case.publish(ActorStopped("engine", "engine-1", "no such folder"), at_s=NOW_S - 5)

    assert case.found() == [("version not loaded", "engine-1")]
    assert case.evidence().startswith("it does not take version 6, it had version 5 before; it ended 5 s ago; last")


def test_no_engine_is_blamed_while_the_warm_up_stands_still():
    case = MadeState().vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=0)))
    case.publish(ActorStarted("engine", "engine-1", "elsewhere", 2), at_s=NOW_S - 50)
    case.vitals("engine-1")
    case.state.version = None

    assert "engine dead" not in [cause for cause, _ in case.found()]


def test_work_for_a_version_that_was_never_published_is_found():
    case = MadeState().vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=9)))

    assert case.found() == [("version not loaded", "version 9")]
    assert "engines have 5 at most, the newest published is 5" in case.evidence()


def test_an_engine_that_leaves_and_comes_as_it_is_asked_is_well():
    case = MadeState(last_step_s=NOW_S - 1)
    for ago_s in (50, 40, 30, 20):
        case.publish(ActorStopped("engine", "engine-1"), at_s=NOW_S - ago_s)
        case.publish(ActorStarted("engine", "engine-1", "elsewhere", 2), at_s=NOW_S - ago_s + 5)
    case.publish(EngineReady("engine-1", "http://e", 0, 5, "d", 8), at_s=NOW_S - 10)
    case.vitals("engine-1", answered_at_s=NOW_S - 1, moved_at_s=NOW_S - 1)
    assert case.found() == []

    case.publish(ActorStarted("engine", "engine-1", "elsewhere", 3), at_s=NOW_S - 9)
    case.publish(ActorStarted("engine", "engine-1", "elsewhere", 4), at_s=NOW_S - 8)
    assert case.found() == [("engine dead", "engine-1")]  # it died three times, and nobody asked


def test_work_of_a_run_whose_engines_are_elsewhere_is_found():
    case = MadeState().vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=5)))
    case.publish(FleetScaled({"engine": 0}))

    assert case.found() == [("no worker", "engine")]
    assert case.evidence() == "p000007-0 has waited 60 s for version 5 or newer; engine was scaled to 0"


def test_a_run_that_goes_on_without_engines_does_not_wait_for_their_start():
    case = MadeState().vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=5)))
    case.publish(FleetScaled({"engine": 0}))
    case.state.opened_ns = int((NOW_S - 40) * 1e9)  # resumed
    case.state.engines.clear()
    assert case.state.steps[-1].time_ns < case.state.opened_ns

    assert case.found() == [("no worker", "engine")]


def test_versions_that_an_engine_reads_from_the_store_though_they_should_come_directly_are_found():
    case = MadeState(last_step_s=NOW_S - 1)
    case.state.config.weights.transport = "nccl"

    def ready(version: int, fallback: str) -> None:
        message = EngineReady("engine-1", "http://e", 0, version, "d", 8, update_s=0.25, fallback=fallback)
        case.publish(WeightsPublished(0, version, "d", "files", "there"), at_s=NOW_S - 2)
        case.publish(message, at_s=NOW_S - 1)

    ready(5, "the learner has 0:6:d in memory")
    assert case.found() == []  # it went on
    ready(6, "the sender ended: NCCL error")
    assert case.found() == [("weights not direct", "engine-1")]
    assert case.evidence() == (
        '2 versions one after another, the last 6, did not come by weights.transport = "nccl": the sender ended: '
        'NCCL error; it reads them from the store ("files") instead, the last in 0.25 s'
    )
    ready(7, "")
    assert case.found() == []
