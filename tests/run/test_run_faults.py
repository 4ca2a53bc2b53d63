"""Faults of a run: how they are named, drawn and held back, and in which processes they are caused."""

import subprocess
from pathlib import Path

import msgspec
import pytest

from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.process_settings import PlacementSettings
from asyncrl.config.settings import Config
from asyncrl.crash import POINTS
from asyncrl.process import python
from asyncrl.run import fault_injection
from asyncrl.run.fault_injection import (
    IN_A_ROW,
    SERVER,
    Rests,
    Target,
    TargetError,
    drawn,
    node_targets,
    parse_targets,
    parts,
)
from benchmarks.chaos.targets import all_targets


def test_targets_are_named_by_role_by_kind_and_by_point():
    assert parse_targets("nats:kill, learner@learner.stepped", all_targets()) == [
        Target("nats", "kill"),
        Target("learner", "learner.stepped"),
    ]
    assert {target.role for target in parse_targets("@work.published", all_targets())} == {"rollout", "reward"}
    every = {"reward": {"scope": "group"}, "gateway": {"count": 1}, "live": {"judge": {"kind": "rule"}}}
    wider = all_targets(msgspec.convert(every, Config))
    assert {target.role for target in parse_targets("@work.published", wider)} == {*POINTS["work.published"]}
    assert {target.family for target in parse_targets("learner@", all_targets())} == {"crash"}
    assert {target.kind for target in parse_targets(SERVER, all_targets())} == {"kill", "freeze", "wake"}
    assert parse_targets("", all_targets()) == all_targets()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learner,writer", "--targets writer: no role is called 'writer'; expected one of prompter, rollout"),
        ("nats:melt", "--targets nats:melt: expected one of nats:kill, nats:freeze, nats:wake"),
        ("up:freeze", "--targets up:freeze: expected one of up:kill, up:wake"),
        ("engine@work.published", "expected one of engine:kill, .*engine@engine.swapped"),
        ("@nowhere", "--targets @nowhere: expected one of publish.before"),
    ],
)
def test_a_target_that_is_none_is_refused_with_what_is_allowed(text: str, message: str):
    with pytest.raises(TargetError, match=message):
        parse_targets(text, all_targets())


def test_nodes_are_targets_where_ray_places_actors():
    assert node_targets(PlacementSettings(kind="ray")) == [Target("node", "kill")]
    assert node_targets(PlacementSettings()) == []


def test_a_seed_draws_the_same_targets_and_every_family_as_often():
    first, second = (drawn(all_targets(), 7) for _ in range(2))
    found = [next(first) for _ in range(4000)]

    assert found == [next(second) for _ in found]
    families = [target.family for target in found]
    assert all(900 < families.count(family) < 1100 for family in ("kill", "freeze", "wake", "crash"))
    assert set(found) == set(all_targets())


def test_a_role_that_had_too_many_faults_in_a_row_is_left_alone_until_the_run_trains_and_an_engine_with_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    rests = Rests(tmp_path)
    for _ in range(IN_A_ROW):
        assert not rests.has("engine")
        rests.note(SERVER)
    assert rests.has("engine") and rests.has(SERVER) and not rests.has("rollout")

    monkeypatch.setattr(fault_injection, "_REST_S", 0.0)  # the rest is over, but the run must also make progress
    assert rests.has("engine")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert not rests.has("engine")

    rests.note("engine")
    assert not rests.has("engine")  # a row of its own


ENGINE = """
import subprocess
from asyncrl.guard import guarded_python

server = "-c", "import time; print(flush=True); time.sleep(100)", "{module}"
subprocess.run(guarded_python(*server))
"""


@pytest.mark.parametrize("module", ["sglang.launch_server", "vllm.entrypoints.cli.main"])
def test_the_processes_of_a_run_are_found_by_its_directory_and_no_others(
    server: EmbeddedServer, tmp_path: Path, module: str
):
    sleeps = python("-c", "import time; print(flush=True); time.sleep(100)")
    mine = ["--credentials", str(server.directory / "credentials" / "any.json")]
    other = ["--credentials", str(tmp_path / "credentials" / "any.json")]
    lines = [
        ["actors.main", "rollout", "rollout-2", *mine],
        ["actors.learner.rank_process", "learner-1", "1", "2", "folder", *mine],
        ["actors.main", "rollout", "rollout-1", *other],
        ["elsewhere", *mine],
        ["asyncrl.engine.embedded", *mine],  # no engine of the run is its parent
    ]
    commands = [[*sleeps, *line] for line in lines]
    commands.append(python("-c", ENGINE.format(module=module), "actors.main", "engine", "engine-1", *mine))
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        living = parts(server.directory)
        found = [(part.role, part.name) for part in living]
        assert "asyncrl.guard" not in living[1].process.cmdline()
    finally:
        for process in started:
            process.kill()
            process.communicate()

    assert found[:2] == [("engine", "engine-1"), ("engine-server", "engine-1-server")]
    assert found[2:] == [("learner-rank", "learner-1-rank1"), ("nats", "nats"), ("rollout", "rollout-2")]
