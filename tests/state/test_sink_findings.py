"""The doctor reports a sink that fails; the run continues."""

from harness.states import NOW_S, MadeState
from topics.actors import ActorStarted


def test_a_sink_that_fails_is_reported_and_explains_no_stall():
    case = MadeState(last_step_s=NOW_S - 1)
    case.publish(ActorStarted("recorder", "recorder-1", "elsewhere", 1), at_s=1.0)
    case.state.wanted["recorder"] = 1
    case.vitals("recorder-1", failing_sink_wandb=3)
    assert case.found() == [("metrics unwritten", "recorder-1")]
    assert case.evidence() == "sink wandb failed 3 times in a row; the run continues without it"
