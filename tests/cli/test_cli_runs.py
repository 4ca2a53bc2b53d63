"""Runs beside each other, runs that are over, and runs without a terminal: as a user meets them in one folder."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.provision import is_provisioned
from asyncrl.bus.publish import publish
from asyncrl.bus.server import EmbeddedServer
from asyncrl.cli.main import run as run_command
from asyncrl.cli.runs import runs_in
from asyncrl.run.directory import is_locked
from harness.disks import leave_free, locked_disk, small_disk
from harness.runs import SHORT, WITHOUT_MODEL, all_processes, command, kill, up
from harness.stage import until
from topics.actors import ActorStopped


def make(folder: Path, name: str, **files: str) -> Path:
    root = folder / "runs" / name
    root.mkdir(parents=True)
    for file, text in ({"config": "{}"} | files).items():
        (root / f"{file}.json").write_text(text)
    return root


def rows_of(root: Path, *steps: int, cut: str = "") -> None:
    """Write metrics of steps, and a row that is cut short."""
    rows = [{"event": "step", "step": step, "stage": "rl", "reward_mean": 0.93} for step in steps]
    (root / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + cut)


async def test_runs_are_listed_with_what_became_of_them(tmp_path):
    rows_of(make(tmp_path, "done", summary='{"finished": true}'), 129, 130)
    rows_of(make(tmp_path, "broken"), -3, 0, cut='{"event": "step", "st')
    rows_of(make(tmp_path, "killed"), 6, 7)
    (make(tmp_path, "wrong", summary='{"finished": false}') / "failure").write_text("the loss is not finite")

    code, output = await command(tmp_path, "runs", "--json")
    rows = {row["run"]: row for row in json.loads(output)}

    assert code == 0
    assert (rows["done"]["state"], rows["done"]["step"], rows["done"]["reward"]) == ("finished", 130, 0.93)
    assert (rows["broken"]["state"], rows["broken"]["step"], rows["broken"]["reward"]) == ("crashed", 0, None)
    assert (rows["killed"]["state"], rows["killed"]["step"]) == ("crashed", 7)
    assert (rows["wrong"]["state"], rows["wrong"]["step"]) == ("failed", None)
    _, table = await command(tmp_path, "runs")
    assert "done" in table and "0.930" in table and "warm-up" in table


async def test_the_doctor_says_how_a_run_ended(tmp_path):
    rows_of(make(tmp_path, "done", config='{"learner": {"steps": 130}}', summary='{"finished": true}'), 130)
    rows_of(make(tmp_path, "stopped", summary='{"finished": false}'), 6, 7)
    rows_of(make(tmp_path, "killed"), -3)
    make(tmp_path, "served", config='{"only": ["engine"]}')
    (make(tmp_path, "wrong", summary='{"finished": false}') / "failure").write_text("the loss is not finite")

    assert await command(tmp_path, "doctor", "done") == (
        0,
        "run done: ended as it should: it finished at step 130 of 130\n",
    )
    ended = "it was asked to stop at step 7 of 100; to continue: asyncrl up --resume stopped"
    assert await command(tmp_path, "doctor", "stopped") == (0, f"run stopped: ended as it should: {ended}\n")
    for name, cause, evidence in (
        ("killed", "run killed", "it ended in its warm-up: no process of it is left, and none wrote why"),
        ("served", "run killed", "it ended: no process of it is left, and none wrote why"),
        ("wrong", "run failed", "it ended before its first step: the loss is not finite"),
    ):
        code, output = await command(tmp_path, "doctor", name, "--json")
        (found,) = json.loads(output)["findings"]
        assert (code, found["cause"], found["object"], found["evidence"]) == (1, cause, name, evidence)
        assert "asyncrl up --resume RUN" in found["advice"]
        assert f"`asyncrl up --resume {name}`" in (await command(tmp_path, "doctor", name))[1]


async def test_a_live_run_and_one_that_was_killed_are_listed_with_their_newest_step(tmp_path):
    async with up(tmp_path, *WITHOUT_MODEL, "learner.steps=100000", "buffer.batch_groups=2") as run:
        await run.reaches(lambda: len(run.steps()) > 2, "three steps")
        (live,) = runs_in(run.root.parent)
        kill(run.process.pid)
        await run.ended()
        (killed,) = runs_in(run.root.parent)

    assert (live.state, killed.state) == ("live", "crashed")
    assert live.step is not None and killed.step is not None and 3 <= live.step <= killed.step


async def test_a_live_run_may_remove_files_while_it_is_listed(tmp_path, monkeypatch):
    root = make(tmp_path, "live")
    listed = os.walk

    def removing(folder):
        yield from listed(folder)
        yield str(folder), [], ["gone"]

    monkeypatch.setattr(os, "walk", removing)

    assert [row.run for row in runs_in(root.parent)] == ["live"]


async def test_a_directory_that_was_moved_is_named_with_its_old_place(tmp_path):
    root = make(tmp_path, "old")
    (root / "location").write_text(str(root))
    root.rename(tmp_path / "runs" / "new")

    for words in (["audit", "new"], ["up", "--resume", "new"], ["replay", "new"]):
        code, output = await command(tmp_path, *words)
        assert code == 1
        assert f"was made as {root}" in output and "move it back" in output


async def test_a_link_to_a_run_is_not_removed_and_a_copy_leaves_the_topics_of_its_original(tmp_path):
    config = json.dumps({"run": "old", "nats": {"url": "nats://127.0.0.1:9"}})  # nobody answers there
    for name in ("old", "copy"):
        root = make(tmp_path, name)
        (root / "config.json").write_text(config)
        (root / "location").write_text(str(tmp_path / "runs" / "old"))
        BusAddress("nats://127.0.0.1:9").save(root / "nats.json")
    (tmp_path / "runs" / "link").symlink_to(root)

    refused, output = await command(tmp_path, "rm", "link")
    removed, _ = await command(tmp_path, "rm", "copy")
    kept, why = await command(tmp_path, "rm", "old")

    assert (refused, "is a link to" in output) == (1, True), output
    assert (removed, root.exists()) == (0, False)
    assert (kept, "its topics on nats://127.0.0.1:9 cannot be removed" in why) == (1, True), why


async def test_a_directory_made_elsewhere_leaves_the_topics_of_a_run_that_may_still_lie_there(
    bus: Bus, server: EmbeddedServer, tmp_path: Path
):
    root = make(tmp_path, "copy")
    (root / "config.json").write_text(json.dumps({"run": bus.run, "nats": {"url": server.address.url}}))
    (root / "location").write_text(f"/another/machine/runs/{bus.run}")
    server.address.save(root / "nats.json")
    await publish(bus, ActorStopped("supervisor", "supervisor-1", ""))

    refused, output = await command(tmp_path, "rm", "copy")

    assert (refused, output.count("\n")) == (1, 1), output
    assert f"was made as /another/machine/runs/{bus.run}" in output and "--force" in output
    assert root.exists() and await is_provisioned(bus)
    removed, output = await command(tmp_path, "rm", "copy", "--force")
    assert (removed, root.exists(), await is_provisioned(bus)) == (0, False, False), output


async def test_a_run_is_removed_from_inside_its_directory(tmp_path: Path):
    root = make(tmp_path, "done")

    removed, output = await command(root, "rm", ".")

    assert (removed, root.exists()) == (0, False), output
    assert output == f"run done: removed {root}\n"


def test_files_of_a_run_that_are_damaged_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = make(tmp_path, "one")
    code, output = run_command(["audit", "one"]), capsys.readouterr().err
    assert (code, output) == (1, f"{root / 'base'}: No such file or directory; was it removed or moved?\n")
    (root / "base").write_text(str(tmp_path))
    for file, words in (
        ("config.json", (["replay", "one"], ["rm", "one"], ["up", "--resume", "one"])),
        ("nats.json", (["audit", "one"], ["explain", "one", "p000001-0"])),
    ):
        (root / "config.json").write_text("{}")
        (root / file).write_text("{")
        for command_line in words:
            assert run_command(command_line) == 1
            output = capsys.readouterr().err
            assert f"{root / file} holds no" in output


async def test_topics_of_a_run_on_a_full_disk_cannot_be_read_and_the_error_says_so(tmp_path):
    with small_disk(tmp_path / "runs", 1):
        root = make(tmp_path, "one")
        (root / "base").write_text(str(tmp_path))
        (root / "nats.json").write_text(json.dumps({"url": "nats://127.0.0.1:1"}))
        (root / "nats").mkdir()
        leave_free(tmp_path / "runs", 0)

        code, output = await command(tmp_path, "audit", "one")

        assert code == 1
        assert output.startswith(f"run one: its NATS server, which writes into {root}, cannot be started"), output
        assert output.endswith("No space left on device; free some room there\n"), output


async def test_a_run_on_a_disk_that_takes_no_files_is_looked_at_and_neither_resumed_nor_removed(tmp_path):
    with small_disk(tmp_path / "runs", 1):
        root = make(tmp_path, "one", summary='{"finished": false}')
        (root / "base").write_text(str(tmp_path))
        (root / "nats.json").write_text(json.dumps({"url": "nats://127.0.0.1:1"}))
        (root / "nats").mkdir()
        (root / "logs").mkdir()
        (root / "logs" / "buffer-1.log").write_text('{"event": "here", "timestamp": "2026-01-01T00:00:00Z"}\n')
        (root / "lock").touch()
        with locked_disk(tmp_path / "runs"):
            for words, said in (
                (("runs",), "stopped"),
                (("logs", "one"), "here"),
            ):
                code, output = await command(tmp_path, *words)
                assert (code, said in output) == (0, True), output
            for words, said in (
                (
                    ("audit", "one"),
                    "cannot be started to read its topics: Read-only file system; make it writable",
                ),
                (("up", "--resume", "one"), "lock: Read-only file system; nothing can be written there\n"),
                (("rm", "one"), ": Read-only file system; nothing can be written there\n"),
            ):
                code, output = await command(tmp_path, *words)
                assert (code, said in output, output.count("\n")) == (1, True, 1), output


def test_conditions_that_nothing_meets_are_refused_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make(tmp_path, "one")
    for words, expected in (
        (["tap", "batch.trained", "--where", "stp=3"], "no message of batch.trained has a 'stp'; fields: "),
        (["tap", "batch.trained", "--where", "step=abc"], "--where step=abc: step of batch.trained is a number"),
        (["tap", "*", "--where", "truncated=maybe"], "truncated of trajectory.generated is true or false"),
        (
            ["tap", "trajectory.*", "--where", "reason=rewrad"],
            "reason of trajectory.failed is one of rollout, reward, ",
        ),
        (["tap", "batch.packed", "--where", "groups.members=3"], "no message of batch.packed has a 'groups.members'"),
        (["tap", "batch.trained", "--no-follow"], "--no-follow goes with --from-start"),
        (["scale"], "asyncrl scale rollout=4"),
        (["rm", "nothing"], "no run called nothing"),
    ):
        assert run_command(words) != 0
        assert expected in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run_command(["logs", "--sinc", "3"])
    assert "usage: asyncrl logs " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.real_start
async def test_two_runs_at_once_and_what_remains_of_them(tmp_path):
    """One in the background, one whose terminal goes away; afterwards both can be looked at, and removed."""
    (tmp_path / "config.toml").write_text(SHORT)
    endless = [
        word for setting in (*WITHOUT_MODEL, "learner.steps=100000", "nats.keep=run") for word in ("--set", setting)
    ]
    code, output = await command(tmp_path, "up", "config.toml", "--detach", "--run", "back", *endless)
    assert code == 0, output
    assert "asyncrl down back" in output
    try:
        ignored = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup has tests ignore it, and so would the run
        async with up(tmp_path, *WITHOUT_MODEL, "learner.steps=100000", "run=front") as front:
            await front.reaches(front.steps, "the first step")
            for words in (["status"], ["down"], ["tap", "*"], ["scale", "rollout=2"]):
                code, output = await command(tmp_path, *words)
                assert (code, "2 runs are live" in output and "back, front" in output) == (1, True), output
            await until(lambda: trained(tmp_path / "runs" / "back") > 2, "three steps of the other run")
            front.process.send_signal(signal.SIGHUP)
            assert await front.ended() == 0
            summary = json.loads((front.root / "summary.json").read_text())
            assert not summary["finished"]
        signal.signal(signal.SIGHUP, ignored)
        code, output = await command(tmp_path, "down")  # the other one is meant now
        assert (code, output.splitlines()[-1]) == (0, "run back has ended")
    finally:
        await ended(tmp_path / "runs" / "back")

    code, output = await command(tmp_path, "status", "back", "--json")
    assert (code, json.loads(output)["state"]) == (0, "stopped")
    code, output = await command(tmp_path, "samples", "back", "--step", "1", "--count", "3", "--json")
    samples = [json.loads(line) for line in output.splitlines()]
    assert (code, len(samples)) == (0, 3)
    assert all(set("abcd") >= set(sample["label"]) or sample["label"] for sample in samples)
    assert {"prompt", "completion", "label", "reward"} <= samples[0].keys()
    code, output = await command(tmp_path, "explain", "back", samples[0]["name"])
    assert code == 0
    assert samples[0]["completion"] in output
    code, output = await command(tmp_path, "tap", "back", "batch.trained", "--from-start", "--json")
    assert (code, output.count("batch.trained") > 2) == (0, True)
    code, output = await command(tmp_path, "rm", "back", "front")
    assert code == 0, output
    assert not list((tmp_path / "runs").iterdir())


def trained(root: Path) -> int:
    return (root / "metrics.jsonl").read_bytes().count(b'"event":"step"')


async def ended(root: Path) -> None:
    """Have a run in the background end, whatever failed before."""
    if is_locked(root):
        for pid, line, _ in all_processes():
            with contextlib.suppress(OSError):  # it ended in this moment
                if "asyncrl.cli.main" in line and Path(f"/proc/{pid}/cwd").readlink() == root.parent.parent:
                    os.kill(pid, signal.SIGKILL)
    await until(lambda: not is_locked(root), "the run in the background has ended")
