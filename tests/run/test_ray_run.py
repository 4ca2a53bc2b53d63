"""A whole run on the nodes of a real Ray cluster, which are simulated on this machine: nodes die, then the head.

Its topics are on a server with TLS that trusts the clients of a private authority alone.
"""

import json
from pathlib import Path

import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.log import read_last_of_each
from asyncrl.bus.publish import read
from benchmarks.ray_nodes import Nodes, ray_nodes
from harness.audited import audited_clean
from harness.runs import UNTRAINED, Run, address_of, command, resume_as_job, two_steps_more, up
from harness.servers import Authority, serving, tls
from harness.stage import until
from topics.engines import ENGINE_READY, EngineReady

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

USERS = 'authorization { users = [ { user: "me", password: "secret" } ] }\nmax_payload: 8MB\n'


def supervisor_events(run: Run, event: str) -> list[dict[str, object]]:
    return [row for row in run.events("supervisor-1") if row["event"] == event]


def settings_of(nodes: Nodes, folder: Path, port: int, authority: Authority) -> list[str]:
    (folder / "password").write_text("secret")
    mine = authority.sign("me", "me")
    login = {"user": "me", "password_file": folder / "password", "tls_ca": authority.ca, "tls_cert": mine}
    login |= {"tls_key": mine.with_suffix(".key"), "url": f"tls://localhost:{port}"}
    placed = {"kind": "ray", "address": nodes.address, "folder": folder / "hosts"}
    given = [f'nats.{key}="{value}"' for key, value in login.items()]
    given += [f'placement.{key}="{value}"' for key, value in placed.items()]
    return [*given, 'weights.store="stream"', "learner.steps=20000"]


async def test_a_run_outlives_nodes_that_are_killed_and_goes_on_with_another_cluster_after_the_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "8")  # Ray waits a minute for a head otherwise
    authority = Authority(tmp_path / "authority")
    secured = tls(authority.sign("server", "localhost"), f', ca_file: "{authority.ca}", verify: true')
    with ray_nodes(2, 2) as nodes:
        async with serving(tmp_path, secured + USERS) as port:
            settings = settings_of(nodes, tmp_path, port, authority)
            async with up(tmp_path, *settings, *UNTRAINED) as run:
                await two_steps_more(run, "it trains")
                await everything_was_sent(run, nodes)
                await nodes_are_lost(run, nodes)
                await the_head_is_lost(run, nodes)
            await until(lambda: not nodes.found("actors.main"), "what ran on the hosts has ended by itself")

            nodes.renew(4)
            async with resume_as_job(tmp_path, "short", nodes.address, "--set", "placement.address=") as run:
                await two_steps_more(run, "it goes on")
                code, said = await command(tmp_path, "scale", "short", "rollout=2")
                assert code == 0, said
                assert nodes.found("actors.main rollout rollout-2")
                code, said = await command(tmp_path, "logs", "short", "engine-1")
                assert code == 0, said
                assert "engine-1" in said
                code, said = await command(tmp_path, "down", "short")
                assert code == 0, said
                assert await run.ended() == 0, run.story
            assert not nodes.found("actors.main")
            await audited_clean(tmp_path)


async def everything_was_sent(run: Run, nodes: Nodes) -> None:
    """Processes on a host have only what was sent: one login with its certificates. Others reach its servers."""
    assert not nodes.found(f"--credentials {run.root}")
    folders = list(run.folder.glob("hosts/runs/*/*/*/credentials"))
    names = {path.name for folder in folders for path in folder.iterdir()}
    ends = (".json", ".tls_cert", ".tls_key")
    assert names == {f"{role}{end}" for role in ("engine", "rollout", "reward") for end in ends}
    logins = [json.loads(path.read_text()) for folder in folders for path in folder.glob("*.json")]
    assert all("BEGIN CERTIFICATE" in login["tls_ca"] for login in logins)
    assert all(str(run.folder / "hosts") in login["tls_key"] for login in logins)

    bus = await Bus.connect(address_of(run), "short", name="test")
    try:
        (record,) = await read_last_of_each(bus, ENGINE_READY.stream, [ENGINE_READY.subject("short", "engine-1")])
        ready = await read(bus, EngineReady, record)
    finally:
        await bus.close()
    assert ready.address.startswith(f"http://{nodes.address.partition(':')[0]}:")


async def nodes_are_lost(run: Run, nodes: Nodes) -> None:
    """A node is killed; its actors wait by name, and start on one that joins."""
    words = ("--targets", "node", "--kills", "1", "--every", "1")
    code, said = await command(run.folder, "chaos", "--run", "short", *words)
    assert code == 0, said
    assert "1 injections: node:kill 1" in said
    assert "raylet" not in said, "what Ray prints about a node that died"
    assert len(nodes.swept()) == 1
    await run.reaches(lambda: supervisor_events(run, "actor waits for room"), "one waits, as two CPUs are left")
    (died, *_) = supervisor_events(run, "actor died")
    assert str(died["reason"]).startswith("its host is lost: ")
    (waits, *_) = supervisor_events(run, "actor waits for room")
    assert "room for its bundle {CPU: 1}" in str(waits["reason"])
    _, found = await command(run.folder, "doctor", "short")
    assert "waits for a node of the Ray cluster with room for its bundle {CPU: 1}" in found

    nodes.add(2)
    await run.reaches(lambda: nodes.found(f"actors.main {str(waits['actor']).split('-')[0]}"), "it is started")
    await two_steps_more(run, "it trains again")


async def the_head_is_lost(run: Run, nodes: Nodes) -> None:
    """The head is killed; that is told at once, and the run ends when Ray ends what is connected to it."""
    nodes.kill_head()
    await run.reaches(lambda: "cluster away" in run.log("supervisor-1"), "the supervisor misses the head")
    _, found = await command(run.folder, "doctor", "short")
    assert f"cluster away: supervisor-1\n  seen:  the head of the Ray cluster {nodes.address} has not" in found
    assert await run.ended() == 1, run.story
    assert "cluster away: supervisor-1: the head of the Ray cluster" in run.out
    assert f"no Ray cluster at {nodes.address} answers" in run.error
