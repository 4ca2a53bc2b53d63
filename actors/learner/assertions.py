"""What a step shows of wrong training: figures beyond the bounds of the run, and unusual ones."""

from __future__ import annotations

from actors.learner.rank import StepResult
from actors.runtime.actor import ActorFault, Context
from asyncrl.training.anomalies import broken_assertions


def assert_step(context: Context, step: int, result: StepResult) -> None:
    """Log the anomalies and broken assertions of a step.

    Raises:
        ActorFault: an assertion is broken, and the run is to stop then.
    """
    if found := result.anomaly:
        carriers = [carrier.trajectory_id for carrier in found.carriers]
        context.log.warning("step anomalous", step=step, found=found.found, carriers=carriers)
    if broken := broken_assertions(context.config, step, result.metrics):
        context.count("assertions_broken", len(broken))
        context.log.error("assertion broken", step=step, found=broken)
        if context.config.learner.assertions.broken == "stop":
            raise ActorFault("; ".join(broken))
