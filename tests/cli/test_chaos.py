"""`asyncrl chaos --run`: processes of a run that is up are killed and stopped, and its audit is printed."""

import fcntl
import re
from pathlib import Path

import pytest

from asyncrl.cli import bench
from asyncrl.cli.chaos import Plan, inject_until_end
from asyncrl.cli.main import run as run_command
from asyncrl.errors import AsyncRLError
from asyncrl.run.directory import RunFiles
from asyncrl.run.fault_injection import Target
from harness.runs import PACED, command, two_steps_more, up

SETTINGS = [PACED, "learner.steps=100000", "learner.checkpoint_every=5"]
SETTINGS += ["workers.lease_s=1.0", "supervision.silence_s=3.0"]


@pytest.mark.slow
async def test_processes_of_a_live_run_are_killed_and_stopped_and_its_audit_is_clean(tmp_path: Path):
    async with up(tmp_path, *SETTINGS) as run:
        await run.reaches(run.steps, "the first step")
        rank = ("--targets", "learner-rank:kill", "--kills", "1", "--every", "0")
        first, killed = await command(tmp_path, "chaos", "--run", *rank)
        await two_steps_more(run, "steps of the next trainer group")
        several = ("--targets", "rollout,reward:kill,engine-server:kill,nats:kill", "--kills", "6", "--every", "1")
        second, output = await command(tmp_path, "chaos", "--run", "short", *several)
        await two_steps_more(run, "steps after the faults")
        code, refused = await command(tmp_path, "chaos", "--run", "short", "--targets", "up")

    assert (code, "--targets up: no role is called 'up'; expected one of" in refused) == (1, True), refused
    assert (first, second) == (0, 0), killed + output
    assert re.search(r"s  kill learner-1-rank0\n(.*\n)*run short, seed 7: 1 injections: learner-rank:kill 1\n", killed)
    assert "run short: clean" in killed and "run short: clean" in output
    assert len(re.findall(r"^ +[\d.]+ s  (kill|freeze|wake) (rollout|reward|engine|nats)", output, re.MULTILINE)) == 6


async def test_options_of_a_campaign_are_refused_with_a_run_that_is_up(tmp_path: Path):
    code, output = await command(tmp_path, "chaos", "demo", "--run", "short", "--points-each", "2")

    assert (code, "CONFIG, --points-each: only for a campaign" in output) == (2, True), output


def test_without_a_source_checkout_there_are_neither_campaigns_nor_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(bench, "_CHECKOUT", tmp_path)

    assert [run_command(["chaos", "demo"]), run_command(["bench", "bus"])] == [2, 2]
    assert run_command(["chaos", "--run", "none", "--targets", "up"]) == 1
    campaign, benchmark, target = capsys.readouterr().err.splitlines()
    assert campaign.endswith("run it from a source checkout, or take a run that is up: --run RUN")
    assert benchmark.endswith("benchmarks are not installed with the package; run it from a source checkout")
    assert target.startswith("no run called none")


async def test_injections_end_where_no_process_of_the_wanted_roles_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("asyncrl.cli.chaos._FIND_S", 0.0)
    (tmp_path / "config.json").write_text("{}")
    plan = Plan([Target("rollout", "kill")], seconds=30.0, every_s=0.0, most=1, seed=7)
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(AsyncRLError, match="no process of rollout:kill runs"):
            await inject_until_end(RunFiles(tmp_path), plan, print)
    assert await inject_until_end(RunFiles(tmp_path), plan, print) == {}  # the run is over
