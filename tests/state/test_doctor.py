"""The doctor: every cause it can find, from states made by hand."""

import io
import re
from typing import get_args

from rich.console import Console

from asyncrl.config.settings import Config
from asyncrl.state.diagnose import diagnose
from asyncrl.state.findings import ADVICE
from asyncrl.state.headline import headline
from asyncrl.state.records import Disk, Letter
from asyncrl.state.run_state import RunState
from asyncrl.state.screen import render
from asyncrl.state.status import run_status
from harness.folds import Feed
from harness.states import AT_ENGINE, NOW_S, ROOT, MadeState, work
from topics import actors, weights
from topics.actors import (
    Activity,
    ActorStarted,
    ActorStopped,
    FleetScaled,
    RunOpened,
    Waiting,
)
from topics.batches import Anomaly, BatchTrained, Carrier
from topics.groups import GroupDropped
from topics.stalls import Cause, StallEnded, StallFound
from topics.weights import WeightsPublished


def test_a_run_that_trains_has_no_finding():
    case = MadeState(last_step_s=NOW_S - 0.4)

    assert case.found() == []
    assert headline(case.state) == "healthy: step 5 of 100, 0.4 s ago"
    case.state.warmup_steps = 62
    case.trained(-40, at_s=NOW_S - 0.4, stage="warmup")
    assert headline(case.state) == "healthy: step 22 of 62 of warm-up, 0.4 s ago"
    case.state.opened_ns = int((NOW_S - 0.2) * 1e9)  # it goes on
    assert headline(case.state) == "starting: opened 0 s ago, no step since"


def test_a_run_whose_rewards_are_all_equal_learns_nothing():
    case = MadeState()
    for step in range(6, 14):
        case.trained(step, at_s=NOW_S - 14 + step, spread=0.0)
        case.packed(step)

    assert headline(case.state).endswith(
        "ago; all rewards of a batch were equal in its last 8 steps: nothing is learned"
    )
    assert case.found() == []  # no stall


def test_what_is_short_beside_the_pace_of_the_run_is_no_stall():
    case = MadeState(last_step_s=NOW_S - 40).vitals("reward-1", work("p000007-0", held_s=30, quiet_s=30))
    assert case.found() == [("reward hanging", "reward-1")]  # its steps took a second each

    slow = MadeState(last_step_s=400.0).vitals("reward-1", work("p000007-0", held_s=30, quiet_s=30))
    for step in range(6, 14):
        slow.trained(step, at_s=NOW_S - 40 - 50 * (13 - step)).packed(step)
    assert slow.found() == []  # its steps take fifty


def test_a_server_that_cannot_be_asked_is_the_only_finding():
    state = RunState("demo")
    state.unreachable = "NATS at nats://here did not answer within 3 s"

    [finding] = diagnose(state)

    assert (finding.cause, finding.object, finding.evidence) == ("server unreachable", "demo", state.unreachable)


def test_what_the_doctor_may_not_see_is_named():
    state = RunState("demo")
    state.denied = "not yours"
    assert [finding.cause for finding in diagnose(state)] == ["permission missing"]


def test_a_full_disk_explains_whatever_waits():
    case = MadeState().vitals("reward-1", work("p000007-0"))
    case.state.disks = [Disk("/runs/demo", 40_000_000, 100_000_000_000)]

    assert case.found() == [("disk full", "/runs/demo")]
    assert case.evidence() == "40 of 100,000 MB are free"


def test_a_full_stream_explains_whatever_waits_and_one_that_fills_is_a_finding():
    case = MadeState().vitals("reward-1", work("p000007-0"))
    case.state.streams["TRAJECTORIES"].bytes = 995
    assert case.found() == [("stream full", "TRAJECTORIES")]

    case.state.streams["TRAJECTORIES"].bytes = 920
    assert case.found() == [("stream full", "TRAJECTORIES"), ("reward hanging", "reward-1")]


def test_a_clock_that_is_off_is_found_while_training_goes_on():
    case = MadeState(last_step_s=NOW_S - 1).vitals("rollout-1", clock_s=NOW_S + 41.0)

    assert case.found() == [("clock off", "rollout-1")]
    assert case.evidence() == "the clock of elsewhere is 42.0 s ahead of the server's"


def test_dead_letters_of_the_last_minute_are_reported():
    case = MadeState(last_step_s=NOW_S - 1)
    case.state.letters = [Letter("prompt.issued", "poison: 5 deliveries without progress", int((NOW_S - 90) * 1e9))]
    assert case.found() == []

    case.state.letters.append(Letter("trajectory.graded", "not a TrajectoryGraded", int((NOW_S - 9) * 1e9)))
    assert case.found() == [("dead letters", "DEAD")]


def test_an_actor_without_a_sign_of_life_is_found_and_not_what_it_holds():
    case = MadeState().vitals("rollout-1", work("p000007-0", waiting=AT_ENGINE), at_s=NOW_S - 9)

    assert case.found() == [("actor silent", "rollout-1")]
    assert case.evidence().startswith("no vital sign for 9 s; process 1 on elsewhere is silent")


def test_a_stopped_process_of_this_machine_is_found_at_once():
    case = MadeState(last_step_s=NOW_S - 1)
    case.state.actors["buffer-1"].process = "stopped"

    assert case.found() == [("actor silent", "buffer-1")]


def test_an_actor_that_dies_again_and_again_is_found_with_its_last_error():
    case = MadeState().publish(ActorStopped("buffer", "buffer-1", "no room"), at_s=NOW_S - 3)
    for before_s in (9, 6, 2):
        case.publish(ActorStarted("buffer", "buffer-1", "elsewhere", 2), at_s=NOW_S - before_s)

    assert case.found() == [("actor dying", "buffer-1")]
    assert case.evidence() == "started 3 times in the last minute; last error: no room"


def test_a_refusal_by_the_server_is_a_missing_permission():
    denied = "NATS at nats://here does not allow user 'demo-reward' to publish to asyncrl.demo.weights.published"
    assert MadeState().vitals("reward-1", denied=denied).found() == [("permission missing", "reward-1")]

    stopped = ActorStopped("buffer", "buffer-1", "the login has expired", denied=True)
    case = MadeState().publish(stopped, at_s=NOW_S - 1)
    assert case.found() == [("permission missing", "buffer-1")]


def test_a_log_that_no_keeper_writes_is_found():
    case = MadeState()
    case.state.streams["BATCHES"].last_ns = int((NOW_S - 30) * 1e9)

    assert case.found() == [("no writer", "buffer")]


def test_work_that_nobody_asks_for_is_found():
    case = MadeState().publish(FleetScaled({"rollout": 0})).queue("rollout", waiting=7, pulls=0)

    assert case.found() == [("no worker", "rollout")]
    assert case.evidence() == "7 wait in its queue; rollout was scaled to 0, none asks for work"


def test_work_that_was_left_by_workers_that_are_gone_is_found_before_its_groups_are_dropped():
    """A lease that ended counts as under way until somebody asks for the message again."""
    case = MadeState().publish(FleetScaled({"rollout": 0})).queue("rollout", under_way=9, pulls=0)
    case.publish(ActorStopped("rollout", "rollout-1"))
    for number in range(4):
        case.publish(GroupDropped(f"p00000{number}", "deadline", 8))

    assert case.found() == [("no worker", "rollout")]
    assert "and 9 are left of workers that are gone; rollout was scaled to 0" in case.evidence()


def test_weights_that_a_step_did_not_change_are_reported_until_one_does():
    case = MadeState().publish(weights.WeightsUnchanged(0, 6, "0:5:d"))
    case.publish(WeightsPublished(0, 6, "d", "files", "there"))
    assert case.found() == [("weights unchanged", "learner")]
    assert case.evidence() == "all tensors of version 6 are those of 0:5:d"

    case.publish(WeightsPublished(0, 7, "e", "files", "there"))
    assert case.found() == [("unexplained", "demo")]


def test_a_step_beyond_an_asserted_bound_is_a_finding_until_one_is_within():
    case = MadeState()
    case.state.config.learner.assertions.k3 = 0.1
    for step, gap in ((6, 0.5), (7, 0.05)):
        message = BatchTrained(step, 0, "rl", {"mismatch_k3": gap}, {}, 0, [0.0, 0.3], 1, 1)
        case.publish(message, at_s=NOW_S - 0.5).packed(step)
        if step == 6:
            assert case.found() == [("assertion broken", "learner")]
            assert case.evidence() == "mismatch_k3 of step 6 is 0.5 nats, learner.assertions.k3 = 0.1"

    assert "assertion broken" not in [cause for cause, _ in case.found()]


def test_a_step_that_is_an_anomaly_is_a_finding_that_names_trajectories():
    case, anomaly = MadeState(), Anomaly("loss 9, usual is 0 to 1", [Carrier("p000004-1", 8.5, 50.25)])
    message = BatchTrained(6, 0, "rl", {}, {}, 0, [0.0, 0.3], 1, 1, anomaly=anomaly)
    case.publish(message, at_s=NOW_S - 0.5).packed(6)

    assert case.found() == [("step anomalous", "learner")]
    expected = "step 6: loss 9, usual is 0 to 1; carried by p000004-1 (gradient norm 50.25, loss 8.5)"
    assert case.evidence() == expected


def test_a_learner_that_is_slower_than_ever_is_behind():
    case = MadeState().packed(6, at_s=NOW_S - 60)
    case.vitals("learner-1", doing=Activity("training", 6), doing_s=60.0)
    assert case.found() == [("learner behind", "learner-1")]
    assert (
        case.evidence()
        == "batch 6 is packed; for 60 s the learner has been training batch 6, its slowest step took 0.5 s"
    )

    case.packed(6, at_s=NOW_S - 3)
    assert case.found() == []  # it has waited for this batch all the time

    case.packed(6, at_s=NOW_S - 60).trained(5, at_s=900, train_s=50.0)
    assert case.found() == []


def test_a_learner_that_waits_for_its_teacher_names_it():
    case = MadeState().packed(6, at_s=NOW_S - 60)
    case.vitals("learner-1", doing=Activity("awaiting teacher", 6), doing_s=60.0)

    assert [cause for cause, _ in case.found()] == ["teacher away"]
    assert case.evidence() == "for 60 s the learner has waited for the teacher's log-probs of batch 6"


def test_an_engine_that_does_not_leave_the_card_is_named():
    case = MadeState().packed(6, at_s=NOW_S - 60)
    held = [work("card", waiting=Waiting("engine", name)) for name in ("engine-1", "engine-2")]
    case.vitals("learner-1", *held, doing=Activity("awaiting card", 9), doing_s=40.0)
    assert case.found() == [("card not left", "engine-1, engine-2")]
    assert case.evidence().startswith("for 40 s the learner has waited for the GPU in turn 9, which engine-1, engine-2")

    case.vitals("learner-1", *held, doing=Activity("awaiting card", 9), doing_s=20.0)
    assert case.found() == []


def test_a_learner_that_does_not_live_is_behind():
    case = MadeState().packed(6, at_s=NOW_S - 60).vitals("learner-1", at_s=NOW_S - 20)

    assert case.found() == [("learner behind", "learner-1")]
    assert case.evidence().startswith("batch 6 is packed and waits for it; no vital sign for 20 s")


def test_a_learner_that_owes_a_version_is_behind_and_not_the_engines_that_wait_for_it():
    case = (
        MadeState()
        .trained(6, at_s=NOW_S - 40)
        .vitals("rollout-1", work("p000007-0", waiting=Waiting("version", version=6)))
    )
    assert case.found() == [("learner behind", "learner-1")]
    assert "p000007-0 waits for version 6, trained 40 s ago and not published" in case.evidence()

    case.vitals("learner-1", at_s=NOW_S - 40)
    assert case.found() == [("learner behind", "learner-1")]
    assert case.evidence().startswith("version 6 is trained and not published; no vital sign for 40 s")


def test_a_hanging_reward_is_found_and_not_the_groups_that_wait_for_it():
    case = (
        MadeState().vitals("reward-1", work("p000007-0", held_s=60), graded=140).queue("reward", under_way=9, waiting=3)
    )
    case.vitals("prompter-1", open_groups=6)

    assert case.found() == [("reward hanging", "reward-1")]
    assert case.evidence() == (
        "grades p000007-0, which it has had for 60 s, 140 done before; "
        "reward workers have 9, 3 more wait; reward.time_limit_s is 30"
    )


def test_a_hanging_rollout_function_is_found():
    case = MadeState().vitals("rollout-1", work("p000007-0"), work("p000008-1"))

    assert case.found() == [("rollout hanging", "rollout-1")]
    assert case.evidence().startswith("p000007-0 has run for 60 s, without progress for 60 s in the rollout")


def test_one_trajectory_that_its_group_waits_for_is_a_straggler():
    case = MadeState().vitals("rollout-1", work("p000007-3", tokens=3200, quiet_s=0.2, waiting=AT_ENGINE))
    case.state.ended = {f"p000007-{member}" for member in range(7) if member != 3}

    assert case.found() == [("straggler", "p000007-3")]
    assert case.evidence() == (
        "6 of the 8 trajectories of its group are done; p000007-3 has run for 60 s, without progress for 0 s at "
        "3,200 tokens on rollout-1, engine-1"
    )


def test_groups_that_are_dropped_one_after_another_are_found():
    case = MadeState().vitals("rollout-1")
    for number in range(4):
        case.publish(GroupDropped(f"p{number:06d}", "zero_variance", 8))

    assert case.found() == [("groups dropped", "buffer")]
    assert case.evidence() == "4 groups were dropped since the last batch: 4 for zero_variance"
    case.vitals("prompter-1", open_groups=1, doing=Activity("making row", 17), doing_s=0.1)
    assert case.found() == [("groups dropped", "buffer")]


def test_many_trajectories_that_advance_while_all_credit_is_taken_lack_credit():
    works = [work(f"p00000{number}-0", quiet_s=0.1, waiting=AT_ENGINE, tokens=900) for number in range(6)]
    case = (
        MadeState().vitals("rollout-1", *works).vitals("prompter-1", open_groups=6).vitals("buffer-1", ready_groups=1)
    )

    assert case.found() == [("no credit", "prompter")]
    assert case.evidence().startswith("6 of at most 6 groups are open; 1 are complete, a batch takes 2; 4 trajectories")


def test_credit_without_prompts_is_the_end_of_data():
    assert MadeState().vitals("prompter-1", open_groups=0).found() == [("end of data", "prompter")]


def test_rows_that_are_still_made_while_there_is_credit_are_slow_data():
    case = MadeState().vitals("prompter-1", open_groups=1, doing=Activity("making row", 17), doing_s=42.4)

    assert case.found() == [("slow data", "prompter")]
    assert case.evidence() == (
        "it has been making row 17 of reverse for 42 s; 1 of at most 6 groups are open, and a batch takes 2"
    )


def test_data_that_is_still_being_opened_is_slow_data():
    case = MadeState().vitals("prompter-1", doing=Activity("opening data"), doing_s=42.4)

    assert case.found() == [("slow data", "prompter")]
    assert case.evidence() == "it has been opening reverse for 42 s"


def test_a_stall_that_nothing_explains_is_reported_after_a_minute():
    assert MadeState(last_step_s=NOW_S - 50).found() == []
    assert MadeState(last_step_s=NOW_S - 90).found() == [("unexplained", "demo")]


def test_a_run_that_ends_is_not_stalled():
    case = MadeState().publish(weights.TrainingFinished(Config().learner.steps, "steps"))
    assert case.found() == []
    assert MadeState().publish(actors.StopRequested()).found() == []


def test_what_the_supervisor_finds_is_shown_until_it_ends():
    fed = Feed(RunState("demo")).publish(RunOpened(5, 0, {}), at_s=1)
    fed.publish(StallFound("reward hanging", "reward-1", "grades p000007-0 for 8 s", "look"), at_s=2)
    shown = io.StringIO()
    Console(file=shown, width=120).print(render(run_status(fed.fold, int(3e9))))
    assert "reward hanging: reward-1: grades p000007-0 for 8 s" in shown.getvalue()
    assert [stall.cause for stall in run_status(fed.fold, int(3e9)).stalls] == ["reward hanging"]

    fed.publish(StallEnded("reward hanging", "reward-1"), at_s=9)

    assert fed.fold.stalls == {}
    texts = [event.text for event in fed.fold.take_events()]
    assert texts == ["reward hanging: reward-1: grades p000007-0 for 8 s", "over: reward hanging: reward-1"]


def test_the_page_names_what_to_do_for_each_cause():
    causes = get_args(Cause)
    headings = re.findall(r"^### (.+)$", (ROOT / "docs" / "guides" / "operate.md").read_text(), re.MULTILINE)

    assert [heading for heading in headings if heading in causes] == list(causes)
    assert ADVICE.keys() == set(causes)


def test_cards_that_a_learner_goes_on_without_are_told():
    case = MadeState(last_step_s=NOW_S - 1)
    case.state.config.learner.ranks, case.state.config.learner.elastic_s = 8, 60.0
    case.vitals("learner-1", ranks_missing=2)
    assert case.found() == [("cards missing", "learner-1")]
    assert case.evidence() == "2 of 8 ranks did not start within 60 s; the others train"

    case.vitals("learner-1", ranks_missing=0)
    assert case.found() == []


def test_a_recorder_that_cannot_write_is_told_and_explains_no_stall():
    case = MadeState(last_step_s=NOW_S - 1)
    case.publish(ActorStarted("recorder", "recorder-1", "elsewhere", 1), at_s=1.0)
    case.state.wanted["recorder"] = 1
    case.vitals("recorder-1", unwritten_errno=28)
    assert case.found() == [("metrics unwritten", "recorder-1")]
    assert "No space left on device; the run continues" in case.evidence()


def test_a_cluster_whose_head_is_away_is_told_while_training_goes_on():
    case = MadeState(last_step_s=NOW_S - 1)
    case.state.config.placement.address = "10.0.0.1:6379"
    case.vitals("supervisor-1", hosts_away_s=12.4)
    assert case.found() == [("cluster away", "supervisor-1")]
    assert case.evidence().startswith(
        "the head of the Ray cluster 10.0.0.1:6379 has not answered for 12 s; actors work on"
    )

    case.vitals("supervisor-1", hosts_away_s=0.0)
    assert case.found() == []
