"""Traces of trajectories: made from the logs, sampled, and complete after the collector was away."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last
from asyncrl.bus.publish import publish
from asyncrl.ports import free_port
from asyncrl.tracing import GRADE, SAMPLE, is_sampled, span_id, trace_id
from harness.collector import collecting
from harness.results import generated
from harness.stage import Stage, until
from topics.actors import VITALS_TAKEN, RunOpened, Vitals
from topics.batches import BatchGroup, BatchMember, BatchPacked, Objective
from topics.groups import GroupDropped
from topics.prompts import PromptIssued
from topics.trajectories import Reference, TrajectoryGraded

KEEPER = {"writer": "test"}
WORKER = {"queue", "generate", "tool"}
PARTS = {"trajectory", SAMPLE, GRADE, "wait for batch", *WORKER}


@pytest.fixture(autouse=True)
def needs_the_schema() -> None:
    pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2")


async def batch(bus: Bus, step: int, size: int = 4) -> list[str]:
    """Publish all messages of the trajectories of a batch; returns their names."""
    members = []
    for number in range(step * size, (step + 1) * size):
        result = msgspec.structs.replace(generated(number), spans="generate:0.00001,tool:0.00001")
        name, prompt = result.trajectory_id, result.prompt_id
        await publish(bus, PromptIssued(prompt, 0, 1), headers=KEEPER)
        sequence = await publish(bus, result)
        payload = Reference(sequence, "0" * 16, 1)
        grade = {"task": result.task, "payload": payload, "reward": 1.0, "versions": [], "metrics": {}}
        of = {"trajectory_id": name, "prompt_id": prompt, "member": 0, "group_size": 1, "stage": "rl"}
        await publish(bus, TrajectoryGraded(**of, **grade, truncated=False, discarded=0))
        members.append(BatchMember(name, 0, payload, 1.0, 2))
    groups = [BatchGroup(member.trajectory_id[:-2], [member]) for member in members]
    await publish(bus, BatchPacked(step, "rl", groups, 0, Objective(), {}), headers=KEEPER)
    return [member.trajectory_id for member in members]


async def vitals(bus: Bus) -> dict[str, float]:
    record = await read_last(bus, VITALS_TAKEN, "recorder-1")
    return msgspec.json.decode(record.data, type=Vitals).values if record is not None else {}


def by_name(spans: list[Any]) -> dict[str, Any]:
    return {span.name: span for span in spans}


async def test_each_trajectory_has_one_trace_although_the_collector_was_down(bus: Bus, stage: Callable[..., Stage]):
    port = free_port()
    sink = {"kind": "otlp", "endpoint": f"http://127.0.0.1:{port}", "share": 1.0}
    made = stage(metrics=[sink], recorder={"plot": False, "samples": 0})
    await publish(bus, RunOpened(3, 0, {}))
    names = await batch(bus, 1)
    await publish(bus, PromptIssued("p000100", 0, 1), headers=KEEPER)
    await publish(bus, GroupDropped("p000100", "deadline"), headers=KEEPER)
    process = await made.start("recorder")

    async def failed_twice() -> bool:
        return (await vitals(bus)).get("failing_sink_otlp", 0) >= 2

    await until(failed_twice, "the failures are counted")
    async with collecting(port) as collector:
        await until(lambda: len(collector.spans) >= len(PARTS) * len(names) + 1, "the first spans are there")
        names += await batch(bus, 2)
        await until(lambda: len(collector.spans) >= len(PARTS) * len(names) + 1, "all spans are there")

        async def recovered() -> bool:
            values = await vitals(bus)
            return "failing_sink_otlp" not in values and values.get("otlp_spans") == len(PARTS) * len(names) + 1

        await until(recovered, "it is no longer reported")
    assert process.returncode is None
    assert collector.services == {"asyncrl"}
    assert len({span.span_id for span in collector.spans}) == len(collector.spans) == len(PARTS) * len(names) + 1
    for name in names:
        trace = trace_id(bus.run, name)
        spans = by_name([span for span in collector.spans if span.trace_id == trace])
        root = spans["trajectory"]
        assert spans.keys() == PARTS
        assert not root.parent_span_id
        assert {spans[part].parent_span_id for part in PARTS - {"trajectory", *WORKER}} == {root.span_id}
        assert {spans[part].parent_span_id for part in WORKER} == {spans[SAMPLE].span_id}
        assert spans["queue"].end_time_unix_nano == spans["generate"].start_time_unix_nano
        assert spans["tool"].end_time_unix_nano == spans[SAMPLE].end_time_unix_nano
        assert spans[SAMPLE].span_id == span_id(trace, SAMPLE)
        ends = [spans[part].end_time_unix_nano for part in (SAMPLE, GRADE, "wait for batch")]
        assert root.start_time_unix_nano < ends[0] < ends[1] < ends[2] == root.end_time_unix_nano
    [dropped] = [span for span in collector.spans if span.trace_id == trace_id(bus.run, "p000100-0")]
    assert (dropped.name, dropped.status.message) == ("trajectory", "deadline")


async def test_a_share_of_trajectories_is_traced(bus: Bus, stage: Callable[..., Stage]):
    port = free_port()
    sink = {"kind": "otlp", "endpoint": f"http://127.0.0.1:{port}", "share": 0.25}
    made = stage(metrics=[sink], recorder={"plot": False, "samples": 0})
    await publish(bus, RunOpened(1, 0, {}))
    names = await batch(bus, 1, 40)
    wanted = {trace_id(bus.run, name) for name in names if is_sampled(trace_id(bus.run, name), 0.25)}
    async with collecting(port) as collector:
        await made.start("recorder")
        await until(lambda: len(collector.spans) >= len(PARTS) * len(wanted), "the spans are there")

    assert {span.trace_id for span in collector.spans} == wanted
    assert 1 <= len(wanted) < len(names)
