"""What the learner does for alerts: it pauses until an operator answers, or goes back to a checkpoint."""

from asyncrl.bus.connection import Bus
from asyncrl.bus.publish import WRITER, publish
from harness.learning import Open, log_of, opened, pack, saved, train, trained
from harness.stage import until
from topics.alerts import AlertRaised, UnpauseRequested
from topics.batches import BATCH_TRAINED
from topics.weights import CHECKPOINT_RESTORED, CHECKPOINT_SAVED, WEIGHTS_PUBLISHED

__all__ = ["opened"]  # a fixture


async def alert(bus: Bus, do: str, step: int, checkpoint: int | None = None) -> int:
    message = AlertRaised("low", "reward/mean < 0.5", step, 0.1, do, checkpoint)
    return await publish(bus, message, headers={WRITER: "supervisor"})


async def restored_up_to(bus: Bus, step: int) -> bool:
    return any((one.lineage, one.version) == (1, step) for one in (await log_of(bus))[WEIGHTS_PUBLISHED])


async def test_an_alert_pauses_training_until_it_is_answered_also_over_a_restart(opened: Open, bus: Bus):
    first = await opened()
    await train(bus, 1, 2)
    await alert(bus, "notify", 1)
    sequence = await alert(bus, "pause", 2)
    await until(lambda: first.learner.fold.paused, "the learner reads the alert")
    await pack(bus, 3)
    await first.kill()
    second = await opened()
    await until(lambda: second.context.take_vitals().doing.kind == "awaiting batch", "the learner waits")
    await until(lambda: second.learner.fold.sequence(3) is not None, "batch 3 is read")
    assert not await trained(bus, 3)

    await publish(bus, UnpauseRequested(sequence - 1))  # it answers an alert before that
    await publish(bus, UnpauseRequested(sequence))
    await until(lambda: trained(bus, 3), "step 3")
    await train(bus, 4, 4)


async def test_a_rollback_continues_from_the_checkpoint_and_skips_the_batches_since_then(opened: Open, bus: Bus):
    first = await opened(learner={"checkpoint_every": 2, "lr": 1e-3})
    await train(bus, 1, 5)
    await until(lambda: saved(bus, 4), "checkpoint 4")
    await alert(bus, "rollback", 5, 2)
    await alert(bus, "rollback", 4, 4)  # of another rule: one rollback answers both
    await until(lambda: restored_up_to(bus, 5), "step 5 is skipped")
    await train(bus, 6, 6)
    await first.kill()
    await opened()
    await train(bus, 7, 7)

    log = await log_of(bus)
    assert [(one.lineage, one.step, one.until) for one in log[CHECKPOINT_RESTORED]] == [(1, 2, 5)]
    steps = [(one.lineage, one.step, one.skipped) for one in log[BATCH_TRAINED]]
    assert steps[:5] == [(0, step, False) for step in range(1, 6)]
    assert steps[5:] == [(1, 3, True), (1, 4, True), (1, 5, True), (1, 6, False), (1, 7, False)]
    digests = {(one.lineage, one.version): one.digest for one in log[WEIGHTS_PUBLISHED]}
    assert {digests[1, version] for version in range(2, 6)} == {digests[0, 2]}
    assert digests[1, 6] != digests[1, 5]
    assert all(one.lineage == 1 for one in log[CHECKPOINT_SAVED] if one.step > 4)
