"""The doctor: what it finds of engines and the versions that they load, from states made by hand."""

from harness.states import AT_ENGINE, FLEET, NOW_S, MadeState, work
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, FLEET_SCALED, ActorStarted, ActorStopped, FleetScaled, Waiting
from topics.engines import EngineGone, EngineReady, EngineUpdating
from topics.weights import WEIGHTS_PUBLISHED, WeightsPublished


def test_a_server_that_does_not_answer_is_a_dead_engine():
    told = MadeState().vitals("engine-1", answered_at_s=NOW_S - 8, moved_at_s=NOW_S - 8)
    told.vitals("rollout-1", work("p000007-0", waiting=AT_ENGINE))

    assert told.found() == [("engine dead", "engine-1")]
    assert told.evidence() == "the server at http://e has not answered for 7 s"


def test_an_engine_that_left_is_dead():
    told = MadeState().engine(EngineGone("engine-1", "its server has not answered for 10 s"), at_s=NOW_S - 20)

    assert told.found() == [("engine dead", "engine-1")]


def test_an_engine_whose_actor_dies_is_dead():
    told = MadeState().engine(EngineGone("engine-1", "stopped", asked=True), at_s=NOW_S - 3)
    told.publish(ACTOR_STOPPED, ActorStopped("engine", "engine-1", "exit code 1: no memory"), at_s=NOW_S - 3)

    assert told.found() == [("engine dead", "engine-1")]


def test_trajectories_that_no_engine_takes_are_waiting_for_a_dead_one():
    told = MadeState().vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=4)))
    told.publish(ACTOR_STARTED, ActorStarted("engine", "engine-1", "elsewhere", 2), at_s=NOW_S - 8)
    told.vitals("engine-1")
    assert told.found() == [("engine dead", "engine")]

    told.state.opened_ns = int((NOW_S - 100) * 1e9)
    told.state.steps = []
    assert told.found() == []  # the first start takes its time


def test_servers_that_start_during_the_warm_up_are_not_dead():
    told = MadeState(last_step_s=NOW_S - 65).vitals(
        "rollout-1", work("p000007-0", waiting=Waiting("version", version=0))
    )
    told.publish(ACTOR_STARTED, ActorStarted("engine", "engine-1", "elsewhere", 2), at_s=NOW_S - 70)
    told.vitals("engine-1")
    told.state.opened_ns = int((NOW_S - 71) * 1e9)
    told.state.engines["engine-1"].ready_ns = 0
    assert told.state.steps[-1].time_ns > told.state.opened_ns
    assert told.found() == []

    told.state.opened_ns -= int(told.state.config.engine.start_deadline_s * 1e9)
    assert told.found() == [("engine dead", "engine")]


def test_a_server_that_answers_and_samples_nothing_is_paused():
    told = MadeState().vitals("engine-1", answered_at_s=NOW_S - 1, moved_at_s=NOW_S - 50, requests=12)
    told.vitals("rollout-1", work("p000007-0", waiting=AT_ENGINE))

    assert told.found() == [("engine paused", "engine-1")]
    assert "holds 12 requests and has sampled no token for 49 s; p000007-0 has waited for 60 s" in told.evidence()


def test_what_waits_for_a_paused_engine_does_not_hang_by_itself():
    told = MadeState().vitals("engine-1", answered_at_s=NOW_S - 1, moved_at_s=NOW_S - 50)
    told.vitals("rollout-1", work("p000007-0", waiting=AT_ENGINE), work("p000008-0"))
    assert told.found() == [("engine paused", "engine-1"), ("rollout hanging", "rollout-1")]

    soon = MadeState(last_step_s=NOW_S - 9).vitals("rollout-1", work("p000007-0", quiet_s=5, waiting=AT_ENGINE))
    assert soon.found() == []  # the engine's own signs may come a little later


def test_a_version_that_no_engine_loads_is_found():
    told = MadeState().publish(WEIGHTS_PUBLISHED, WeightsPublished(0, 6, "d", "files", "there"), at_s=NOW_S - 50)

    assert told.found() == [("version not loaded", "engine-1")]
    assert told.evidence() == "it should have had version 6 50 s ago; it has version 5 (ready)"


def test_an_engine_of_evaluations_may_hold_an_older_version():
    told, late = MadeState(), ("version not loaded", "engine-exams-1")
    told.state.config.eval.engines = "exams"
    told.publish(FLEET_SCALED, FleetScaled(FLEET | {"engine-exams": 1}), at_s=NOW_S - 95)
    told.publish(ACTOR_STARTED, ActorStarted("engine", "engine-exams-1", "elsewhere", 2), at_s=NOW_S - 90)
    told.engine(EngineReady("engine-exams-1", "http://f", 0, 3, "d", 8, update_s=0.1), at_s=NOW_S - 80)
    told.vitals("engine-exams-1", answered_at_s=NOW_S - 1, moved_at_s=NOW_S - 1)
    assert late not in told.found()

    told.state.config.eval.engines = ""
    assert late in told.found()


def test_an_engine_that_dies_of_a_version_is_found_with_its_last_error():
    told = MadeState().engine(EngineUpdating("engine-1", 0, 6), at_s=NOW_S - 6)
    told.engine(EngineGone("engine-1", "stopped", asked=True), at_s=NOW_S - 5)
    told.publish(ACTOR_STOPPED, ActorStopped("engine", "engine-1", "no such folder"), at_s=NOW_S - 5)

    assert told.found() == [("version not loaded", "engine-1")]
    assert told.evidence().startswith("it does not take version 6, it had version 5 before; started 0 times")


def test_no_engine_is_blamed_while_the_warm_up_stands_still():
    told = MadeState().vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=0)))
    told.publish(ACTOR_STARTED, ActorStarted("engine", "engine-1", "elsewhere", 2), at_s=NOW_S - 50)
    told.vitals("engine-1")
    told.state.version = None

    assert "engine dead" not in [cause for cause, _ in told.found()]


def test_work_for_a_version_that_was_never_published_is_found():
    told = MadeState().vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=9)))

    assert told.found() == [("version not loaded", "version 9")]
    assert "engines have 5 at most, the newest published is 5" in told.evidence()


def test_versions_that_an_engine_reads_from_the_store_though_they_should_come_directly_are_found():
    told = MadeState(last_step_s=NOW_S - 1)
    told.state.config.weights.direct = "nccl"

    def ready(version: int, fallback: str) -> None:
        message = EngineReady("engine-1", "http://e", 0, version, "d", 8, update_s=0.25, fallback=fallback)
        told.publish(WEIGHTS_PUBLISHED, WeightsPublished(0, version, "d", "files", "there"), at_s=NOW_S - 2)
        told.engine(message, at_s=NOW_S - 1)

    ready(5, "the learner has 0:6:d in memory")
    assert told.found() == []  # it went on
    ready(6, "the sender ended: NCCL error")
    assert told.found() == [("weights not direct", "engine-1")]
    assert told.evidence() == (
        '2 versions one after another, the last 6, did not come by weights.direct = "nccl": the sender ended: '
        'NCCL error; it reads them from the store ("files") instead, the last in 0.25 s'
    )
    ready(7, "")
    assert told.found() == []
