"""Several runs on one server of one's own: a private authority, users that serve many runs, and their removal."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.logins import write_accounts
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import publish
from asyncrl.config.load import load_config
from asyncrl.run.preflight import check_surroundings
from harness.configs import the_problem
from harness.runs import command, resume, up
from harness.servers import Authority, serving, tls
from topics.actors import ActorStarted

SCRIPTED = ('engine.kind="scripted"', 'learner.trainer="scripted"', "warmup.steps=0", "learner.scripted_step_s=0.2")


async def test_a_private_authority_is_named_by_an_option_or_in_the_credentials(authority: Authority, tmp_path: Path):
    good, users = authority.sign("server", "localhost"), tmp_path / "users"
    write_accounts(["mine"], users, server=BusAddress("tls://localhost:1"))
    async with serving(tmp_path, tls(good) + 'include "users/nats-accounts.conf"\n') as port:
        write_accounts(["mine"], users, server=BusAddress(f"tls://localhost:{port}"))
        operator = BusAddress.read(users / "operator.json")
        operator.tls_ca = str(authority.ca)
        bus = await Bus.connect(operator, "mine")
        await provision(bus, equal_sizes(payload_mb=8, ledger_mb=8), lease_s=5)
        await publish(bus, ActorStarted("supervisor", "supervisor-1", "here", 1))
        await bus.close()
        (tmp_path / "password").write_text(operator.password)
        reached = ("--credentials", "users/monitor.json")
        by_password = ("--url", operator.url, "--user", operator.user, "--password-file", "password")

        refused, words = await command(tmp_path, "status", "mine", "--json", *reached)
        named = [
            await command(tmp_path, "status", "mine", "--json", *how, "--tls-ca", str(authority.ca))
            for how in (reached, by_password)
        ]
        write_accounts(["mine"], users, server=BusAddress("", tls_ca=authority.ca.read_text()))
        held = await command(tmp_path, "status", "mine", "--json", *reached)

    assert (refused, words.count("\n")) == (1, 1)
    assert "shows a certificate that is not accepted" in words and "--tls-ca" in words
    assert "eof_received" not in words
    for code, output in (*named, held):
        assert (code, json.loads(output)["run"]) == (0, "mine"), output


def test_a_missing_password_file_is_reported_once_and_as_such(authority: Authority):
    login = ("nats.user=me", "nats.password_file=nofile", f"nats.tls_ca={authority.ca}", "nats.url=tls://host:4222")

    problem = the_problem("demo", *login, files=True)

    assert problem.key == "--set nats.password_file"
    assert re.fullmatch(
        r"/.*/nofile: found no such file or directory, expected a readable file that .*", problem.message
    )


def test_a_run_that_the_users_do_not_serve_is_refused_before_it_has_a_directory(tmp_path: Path):
    write_accounts(["demo", "demo-2"], tmp_path / "users")
    settings = (f"nats.credentials={tmp_path}/users", f"directory={tmp_path}/runs", "nats.url=nats://localhost:1")
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    load_config("demo", overrides=settings, further=check_surroundings)  # it would be called demo-2
    (tmp_path / "runs" / "demo-2").mkdir()

    problem = the_problem("demo", *settings, files=True)

    assert problem.key == "--set nats.credentials"
    assert problem.message.startswith("its users serve demo, demo-2, and this run would be called demo-3; name it ")
    assert f"asyncrl roles demo-3 --config {tmp_path}/users" in problem.message


def test_passwords_are_kept_until_new_ones_are_asked_for(tmp_path: Path):
    def passwords() -> list[str]:
        return [path.read_text() for path in sorted((tmp_path / "users").iterdir())]

    write_accounts(["demo"], tmp_path / "users")
    first = passwords()
    write_accounts(["demo"], tmp_path / "users")
    kept = passwords()
    write_accounts(["demo"], tmp_path / "users", rotate=True)

    assert kept == first
    assert all(new != old for new, old in zip(passwords(), first, strict=True))


@pytest.mark.slow
async def test_users_that_serve_two_runs_and_what_removing_one_leaves(tmp_path: Path):
    code, output = await command(tmp_path, "roles", "short", "--runs", "2", "--config", "users")
    assert code == 0, output
    async with serving(tmp_path, 'include "users/nats-accounts.conf"\n') as port:
        url = f"nats://127.0.0.1:{port}"
        write_accounts(["short"], tmp_path / "users", server=BusAddress(url))
        where = (f'nats.url="{url}"', f'nats.credentials="{tmp_path}/users"', *SCRIPTED)
        operator = ("--credentials", "users/operator.json")

        async with up(tmp_path, *where) as first:
            assert await first.ended() == 0, first.story
        async with up(tmp_path, *where, "learner.steps=100000") as second:
            second.root = tmp_path / "runs" / "short-2"
            await second.reaches(second.steps, "the first step of the second run")
            code, output = await command(tmp_path, "rm", "short-2")
            assert (code, "run short-2 is live" in output) == (1, True), output
            code, output = await command(tmp_path, "rm", "short-2", *operator)
            assert (code, "run short-2 has not ended" in output) == (1, True), output
            second.interrupt()
            assert await second.ended() == 0, second.story
        async with up(tmp_path, *where) as third:
            assert await third.ended() == 1
            assert "its users serve short, short-2, and this run would be called short-3" in third.error
        assert sorted(root.name for root in (tmp_path / "runs").iterdir()) == ["short", "short-2"]
        assert await listed(tmp_path, *operator) == ["short", "short-2"]

        code, output = await command(tmp_path, "rm", "short")
        assert (code, f"streams from {url}" in output) == (0, True), output
        assert [root.name for root in (tmp_path / "runs").iterdir()] == ["short-2"]
        assert await listed(tmp_path, *operator) == ["short-2"]
        code, output = await command(tmp_path, "audit", "short-2")  # its topics are whole
        assert code == 0, output

        code, output = await command(tmp_path, "rm", "short-2", *operator)
        assert (code, f"streams removed from {url}" in output) == (0, True), output
        assert await listed(tmp_path, *operator) == []
        assert (tmp_path / "runs" / "short-2" / "summary.json").exists()
        async with resume(tmp_path, "short-2") as gone:
            assert await gone.ended() == 1
            assert "holds no run called short-2" in gone.error


async def listed(folder: Path, *operator: str) -> list[str]:
    """The runs on the server."""
    code, output = await command(folder, "runs", "--json", *operator)
    assert code == 0, output
    return sorted(json.loads(output))
