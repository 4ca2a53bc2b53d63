"""`asyncrl chaos --run`: processes of a run that is up are killed and stopped, and its audit is printed."""

import re
from pathlib import Path

import pytest

from harness.runs import command, two_steps_more, up

SETTINGS = ["learner.steps=100000", "learner.checkpoint_every=5", "workers.lease_s=1.0", "supervision.silence_s=3.0"]


@pytest.mark.slow
async def test_processes_of_a_live_run_are_killed_and_stopped_and_its_audit_is_clean(tmp_path: Path):
    async with up(tmp_path, *SETTINGS) as run:
        await run.reaches(run.steps, "the first step")
        rank = ("--targets", "learner-rank:kill", "--kills", "1", "--every", "0")
        first, killed = await command(tmp_path, "chaos", "--run", *rank)
        await two_steps_more(run, "steps of the next trainer group")
        several = ("--targets", "rollout,reward:kill,engine-server:kill", "--kills", "6", "--every", "1")
        second, output = await command(tmp_path, "chaos", "--run", "short", *several)
        await two_steps_more(run, "steps after the faults")

    assert (first, second) == (0, 0), killed + output
    assert re.search(r"s  kill learner-1-rank0\n(.*\n)*run short, seed 7: 1 injections: learner-rank:kill 1\n", killed)
    assert "run short: clean" in killed and "run short: clean" in output
    assert len(re.findall(r"^ +[\d.]+ s  (kill|freeze|wake) (rollout|reward|engine)", output, re.MULTILINE)) == 6


async def test_options_of_a_campaign_are_refused_with_a_run_that_is_up(tmp_path: Path):
    code, output = await command(tmp_path, "chaos", "demo", "--run", "short", "--points-each", "2")

    assert (code, "CONFIG, --points-each: only for a campaign" in output) == (2, True), output
