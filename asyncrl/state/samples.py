"""Samples of a batch or an evaluation of a run: from the logs, or from the file that outlives their tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import Record
from asyncrl.bus.merged import Part, read_merged
from asyncrl.errors import AsyncRLError
from asyncrl.run.find import FoundRun
from asyncrl.state.evaluation_text import evaluation_text
from asyncrl.telemetry.samples import Event, Sample, SampleReader, SamplesFile
from topics.batches import BATCH_PACKED, BatchMember
from topics.evals import EVAL_SCORED
from topics.topic import BATCHES, Topic


class Chosen(NamedTuple):
    """A batch or an evaluation whose samples are wanted."""

    event: Event
    step: int
    members: list[BatchMember]
    title: str


def sample_reader(bus: Bus, found: FoundRun) -> SampleReader:
    """A reader of the run's results, with its tokenizer where the run's directory is on this machine."""
    local = found.root is not None
    return SampleReader(bus, found.files.model_path(found.files.read_config().model) if local else None)


async def packed_batch(bus: Bus, step: int | None) -> Chosen:
    """The batch of a step, or the newest one.

    Raises:
        AsyncRLError: there is none.
    """
    packed = await _newest(bus, BATCH_PACKED, lambda message: step in (None, message.step))
    if packed is None:
        raise AsyncRLError(f"run {bus.run} has packed no batch{'' if step is None else f' {step}'}")
    members = [member for group in packed.groups for member in group.members]
    return Chosen("step", packed.step, members, f"batch {packed.step} ({packed.stage})")


async def scored_evaluation(bus: Bus, version: int) -> Chosen:
    """The evaluation of a version.

    Raises:
        AsyncRLError: there is none.
    """
    versions: list[int] = []

    def wanted(message: Any) -> bool:
        versions.append(message.version)
        return bool(message.version == version)

    scored = await _newest(bus, EVAL_SCORED, wanted)
    if scored is None:
        known = ", ".join(map(str, dict.fromkeys(versions))) or "none"
        raise AsyncRLError(f"run {bus.run} has no evaluation of version {version}; there are: {known}")
    return Chosen("eval", version, scored.members, evaluation_text(scored))


async def samples_of(bus: Bus, chosen: Chosen, found: FoundRun, count: int) -> tuple[str, list[Sample]]:
    """Samples from the logs if they hold as many as are wanted, else from there or the file, whichever has more.

    Args:
        count: how many are wanted; 0 for all.

    Returns:
        A title for them, and the samples.

    Raises:
        AsyncRLError: neither has any.
    """
    members = chosen.members
    wanted = min(count or len(members), len(members))
    reader, samples, source = sample_reader(bus, found), [], "from the logs"
    for member in members:
        sample = await reader.read(member.trajectory_id, member.payload.sequence)
        if sample is not None:
            sample.reward = member.reward
            samples.append(sample)
        if len(samples) == wanted:
            break
    kept: dict[int, list[Sample]] = {}  # by step
    if len(samples) < wanted and found.root is not None:
        kept = {row.step: row.samples for row in SamplesFile(found.root).rows() if row.event == chosen.event}
        if len(kept.get(chosen.step, [])) > len(samples):
            samples, source = kept[chosen.step][:wanted], "from samples.jsonl, since tokens were trimmed"
    if members and not samples:
        nearest = sorted(sorted(kept, key=lambda step: abs(step - chosen.step))[:2])
        has = f"does not have it; the nearest there: {', '.join(map(str, nearest))}" if nearest else "does not have it"
        raise AsyncRLError(
            f"run {bus.run}: the tokens of {chosen.title} were trimmed, and samples.jsonl {has} "
            "(nats.keep = run keeps all tokens)"
        )
    return f"run {bus.run}, {chosen.title}: {len(samples)} of {len(members)} trajectories, {source}", samples


async def _newest(bus: Bus, topic: Topic[Any], wanted: Callable[[Any], bool]) -> Any:
    """Return the newest message of a topic that is wanted, or None; those that cannot be read are passed over."""
    newest: Any = None

    def apply(_topic: Topic[Any], message: Any, _record: Record) -> None:
        nonlocal newest
        if wanted(message):
            newest = message

    part = Part(BATCHES, subjects=[topic.pattern(bus.run)])
    await read_merged(bus, [part], apply, lambda _record, _error: None)
    return newest
