"""A whole run on the nodes of a real Ray cluster, which are simulated on this machine; one is killed, another joins."""

import json
from pathlib import Path

import pytest

from harness.audited import audited_clean
from harness.ray_nodes import ray_nodes
from harness.runs import UNTRAINED, Run, command, two_steps_more, up

pytestmark = pytest.mark.slow


def supervisor_events(run: Run, event: str) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in run.log("supervisor-1").splitlines() if line.startswith("{")]
    return [row for row in rows if row["event"] == event]


async def test_actors_of_a_killed_node_wait_by_name_and_start_on_one_that_joins(tmp_path: Path):
    with ray_nodes(2, 2) as nodes:
        ray = ['placement.kind="ray"', f'placement.address="{nodes.address}"', f'placement.folder="{tmp_path}/hosts"']
        async with up(tmp_path, *ray, *UNTRAINED, 'weights.store="stream"', "learner.steps=20000") as run:
            await two_steps_more(run, "it trains")
            assert not nodes.found(f"--credentials {run.root}")  # what runs there has only what it was sent
            sent = {path.name for path in tmp_path.glob("hosts/runs/*/*/*/credentials/*")}
            assert sent == {"engine.json", "rollout.json", "reward.json"}

            words = ("--targets", "node", "--kills", "1", "--every", "1")
            code, said = await command(tmp_path, "chaos", "--run", "short", *words)
            assert code == 0, said
            assert "1 injections: node:kill 1" in said
            assert len(nodes.swept()) == 1
            await run.reaches(lambda: supervisor_events(run, "actor waits for room"), "one waits, as two CPUs are left")
            (died, *_) = supervisor_events(run, "actor died")
            assert str(died["reason"]).startswith("its host is lost: ")
            (waits, *_) = supervisor_events(run, "actor waits for room")
            assert "room for its bundle {CPU: 1}" in str(waits["reason"])
            _, found = await command(tmp_path, "doctor", "short")
            assert "waits for a node of the Ray cluster with room for its bundle {CPU: 1}" in found

            nodes.add(2)
            await run.reaches(lambda: nodes.found(f"actors.main {str(waits['actor']).split('-')[0]}"), "it is started")
            await two_steps_more(run, "it trains again")
            code, said = await command(tmp_path, "down", "short")
            assert code == 0, said
            assert await run.ended() == 0, run.story
        assert not nodes.found("actors.main")
        await audited_clean(tmp_path)
