"""A live run under kills of everything that a turn passes: `asyncrl chaos` on the demo with users, and the audit."""

import json
import re
from pathlib import Path

import pytest

from asyncrl.ports import free_port
from harness.runs import command

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

ROLES = ("gateway", "engine-server", "judge", "sessions", "prompter", "learner", "nats")
SMALL = {
    "warmup.steps": 4,
    "learner.steps": 40,
    "buffer.batch_groups": 8,
    "task.options": "{users=8,tastes=1,think_s=0.2}",
    "live.idle_s": 5,
    "live.method": "combine",
}


async def test_every_turn_has_one_end_and_users_meet_nothing_but_cut_connections(tmp_path: Path):
    settings = [word for key, value in SMALL.items() for word in ("--set", f"{key}={value}")]
    targets = ",".join(f"{role}:kill" for role in ROLES)
    kills = ["--targets", targets, "--kills", "8", "--every", "3", "--seconds", "90", "--stall", "120"]

    port = ("--set", f"gateway.port={free_port()}")
    code, output = await command(tmp_path, "chaos", "live-demo", *kills, *settings, *port, limit_s=1200)

    assert code == 0, output
    root = Path(re.findall(r"the run: (\S+)", output)[0])
    found = json.loads((root / "reports" / "users.json").read_text())
    assert ", 0 failed" in found["users"], found
