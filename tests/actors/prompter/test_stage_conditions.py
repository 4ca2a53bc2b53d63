"""A stage whose condition holds begins by itself, once, and the audit repeats that."""

from msgspec.structs import replace

from asyncrl.bus.log import Record
from asyncrl.state.audit.ledger import Ledger
from asyncrl.training.objective import objective_of
from harness.folds import NO_PAYLOAD
from harness.prompter_feed import config, feed, issue
from topics.batches import BATCH_PACKED, BatchGroup, BatchMember, BatchPacked, CriticStep, Objective
from topics.stages import STAGE_BEGAN, STAGE_REQUESTED, StageBegan, StageRequested
from topics.weights import TrainingFinished
from topics.wire import headers_of

STAGES = {
    "second": {"at_step": 2, "loss": "ppo"},
    "asked": {},
    "third": {"at_accuracy": 0.75, "accuracy_groups": 2, "advantage": "rloo"},
}
RATES = {"advantage": "gae", "lr": 2e-5, "reference": {"kl_coef": 0.1}, "critic": {"lr": 1e-4}}


def packed(step, *prompt_ids, reward=1.0, objective=None):
    groups = [BatchGroup(name, [BatchMember(f"{name}-0", 0, NO_PAYLOAD, reward, 3)]) for name in prompt_ids]
    return BatchPacked(step, "rl", groups, step - 2, objective or Objective())


def began(fed):
    return [(one.name, one.prompt, one.request, one.after) for one in fed.read_back(fed.fold.stage_begins())]


def test_stages_begin_by_step_and_then_by_the_reward_of_the_running_one():
    fed = feed(stages=STAGES)
    issue(fed)
    fed.publish(packed(1, "p000000", "p000001"))
    assert began(fed) == []
    fed.trained(1)
    issue(fed)
    fed.publish(packed(2, "p000002", "p000003"))

    assert began(fed) == [("second", 6, 0, 2)]
    assert began(fed) == [], "rewards of 1 were those of the stage before"
    fed.trained(2)
    assert issue(fed)[0] == "p000006-0"
    fed.publish(packed(3, "p000006", "p000005"))
    assert began(fed) == []
    fed.publish(packed(4, "p000007", "p000004", reward=0.5))
    assert began(fed) == [("third", 8, 0, 4)]
    assert fed.fold.sources["p"].group(fed.fold.state, 8).estimator == "rloo"


def test_a_request_is_answered_first_and_a_finished_run_begins_no_stage():
    fed = feed(stages=STAGES)
    fed.publish(packed(2, "p000000", "p000001"))
    fed.publish(StageRequested(name="asked"))
    request = fed.sequence

    assert began(fed) == [("asked", 0, request, None)]
    fed.publish(TrainingFinished(step=5, reason="steps"))
    assert began(fed) == []


def audited(*, name="second", after=2, stage="second", **changed):
    """Two batches, a stage that began by itself after the second, and a third batch with a prompt of it."""
    ledger = Ledger()
    ledger.opening.config = config(stages=STAGES | {"second": STAGES["second"] | RATES})
    ledger.stages.apply(
        STAGE_REQUESTED, StageRequested(name="asked"), Record(STAGE_REQUESTED.stream, 1, "", {}, b"", 0)
    )
    of_stage = replace(objective_of(ledger.opening.config, 3, stage), **changed)
    messages = [
        packed(1, "p000000", "p000001", objective=objective_of(ledger.opening.config, 1)),
        packed(2, "p000002", "p000003", objective=objective_of(ledger.opening.config, 2)),
        StageBegan(name=name, prompt=0, request=0, after=after),  # no issue was read, so 0 is the first prompt
        packed(3, "p000004", "p000005", objective=of_stage),
    ]
    for number, message in enumerate(messages, 1):
        topic = STAGE_BEGAN if isinstance(message, StageBegan) else BATCH_PACKED
        ledger.stages.apply(topic, message, Record(topic.stream, number, "", headers_of(message), b"", 0))
    return [(found.kind, found.id) for found in ledger.violations]


def test_the_audit_repeats_conditions_and_the_objectives_of_batches():
    assert audited() == []
    assert ("unasked stage", "stage third") in audited(name="third", stage="third")
    assert audited(stage="") == [("wrong stage", "batch 3")]
    for changed in ({"loss": "gspo"}, {"learning_rate": 1e-6}, {"penalties": []}, {"critic": CriticStep()}):
        assert audited(**changed) == [("wrong objective", "batch 3")], changed
