"""Logins: TLS, nkeys, passwords, revoked users; each refusal is one clear error at once."""

import asyncio
import os
import re
import signal
from pathlib import Path

import msgspec
import nkeys
import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusDenied, BusUnreachable
from asyncrl.bus.log import Record, read_last
from asyncrl.bus.logins import given_logins, known_logins
from asyncrl.bus.merged_reader import Part, read_merged
from asyncrl.bus.permissions import login_roles
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import publish, read
from asyncrl.bus.server import EmbeddedServer
from asyncrl.config.process_settings import NatsSettings
from asyncrl.config.settings import Config
from asyncrl.process import DENIED, FATAL
from asyncrl.state.diagnose import diagnose
from asyncrl.state.watch import read_state
from harness.runs import WITHOUT_MODEL, address_of, command, up
from harness.servers import Authority, serving, tls
from harness.stage import Stage, until
from topics.actors import ACTOR_STARTED, ACTOR_STOPPED, RUN_OPENED, ActorStarted, ActorStopped, RunOpened
from topics.topic import STREAMS

AT_ONCE_S = 60.0  # far below the deadline of an answer that never comes
DEADLINE_S = 300.0


async def refusal(address: BusAddress) -> str:
    """Return why a login is refused, which must be known at once."""
    async with asyncio.timeout(AT_ONCE_S):
        with pytest.raises(BusDenied) as error:
            await Bus.connect(address, "mine", deadline_s=DEADLINE_S)
    return str(error.value)


async def logs_in(address: BusAddress) -> bool:
    """Return whether a login succeeds, and JetStream answers."""
    bus = await Bus.connect(address, "mine")
    await bus.api("INFO")
    await bus.close()
    return True


# --- TLS with a private CA


USERS = 'authorization { users = [ { user: "me", password: "secret" } ] }\n'


async def test_a_certificate_of_the_private_authority_is_accepted_and_no_other(authority: Authority, tmp_path: Path):
    good = authority.sign("server", "localhost")
    other = Authority(tmp_path / "other")
    async with serving(tmp_path, tls(good) + USERS) as port:
        login = BusAddress(f"tls://localhost:{port}", "me", "secret", tls_ca=str(authority.ca))
        assert await logs_in(login)

        wrong = await refusal(msgspec.structs.replace(login, tls_ca=str(other.ca)))
        named = await refusal(msgspec.structs.replace(login, url=f"tls://127.0.0.1:{port}"))
        untold = await refusal(msgspec.structs.replace(login, tls_ca=""))

    assert wrong.startswith(f"NATS at tls://localhost:{port} shows a certificate that is not accepted: ")
    assert f"check nats.tls_ca or --tls-ca ({other.ca})" in wrong
    assert "127.0.0.1" in named.split("not accepted: ")[1]
    assert "check nats.tls_ca or --tls-ca (the CAs that this system trusts)" in untold


async def test_an_expired_certificate_is_refused_and_named(authority: Authority, tmp_path: Path):
    old = authority.sign("old", "localhost", days=-1)
    async with serving(tmp_path, tls(old) + USERS) as port:
        login = BusAddress(f"tls://localhost:{port}", "me", "secret", tls_ca=str(authority.ca))

        assert "certificate has expired" in await refusal(login)


async def test_a_server_that_asks_for_a_client_certificate_gets_one(authority: Authority, tmp_path: Path):
    good, mine = authority.sign("server", "localhost"), authority.sign("client", "client")
    async with serving(tmp_path, tls(good, f', ca_file: "{authority.ca}", verify: true') + USERS) as port:
        without = BusAddress(f"tls://localhost:{port}", "me", "secret", tls_ca=str(authority.ca))
        login = msgspec.structs.replace(without, tls_cert=str(mine), tls_key=str(mine.with_suffix(".key")))
        assert await logs_in(login)

        assert "check nats.url, nats.tls_cert and nats.tls_key" in await refusal(without)
    with pytest.raises(BusUnreachable, match=r"nats\.tls_cert and nats\.tls_key: .* are no certificate and its key"):
        msgspec.structs.replace(login, tls_key=str(authority.ca)).login()


async def test_no_password_goes_to_a_server_without_tls_where_the_url_insists_on_it(tmp_path: Path):
    received = asyncio.get_running_loop().create_future()

    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","auth_required":true,"max_payload":1048576,"headers":true}\r\n')
        received.set_result(await reader.read())
        writer.close()

    server = await asyncio.start_server(pretend, "127.0.0.1", 0)
    async with server:
        output = await refusal(BusAddress(f"tls://127.0.0.1:{server.sockets[0].getsockname()[1]}", "me", "secret"))
        assert b"secret" not in await received

    assert "without TLS" in output


# --- nkeys


def nkey(folder: Path, name: str, number: int) -> tuple[Path, str]:
    """A file with an nkey seed, and its public key."""
    seed = nkeys.encode_seed(bytes([number]) * 32, nkeys.PREFIX_BYTE_USER)
    (folder / name).write_bytes(seed)
    return folder / name, nkeys.from_seed(bytearray(seed)).public_key.decode()


async def test_an_nkey_logs_in_and_another_one_does_not(tmp_path: Path):
    (_, public), (stranger, _) = nkey(tmp_path, "known", 1), nkey(tmp_path, "stranger", 2)
    async with serving(tmp_path, f"authorization {{ users = [ {{ nkey: {public} }} ] }}\n") as port:
        nats = NatsSettings(url=f"nats://127.0.0.1:{port}", nkey_file="known")
        logins = given_logins(nats, tmp_path)
        assert all(logins[role] == logins["rollout"] for role in login_roles())
        assert await logs_in(logins["rollout"])

        output = await refusal(BusAddress(nats.url, nkey_file=str(stranger)))
    assert f"refused nkey {stranger}: " in output
    assert stranger.read_text() not in output
    (tmp_path / "broken").write_text("no seed")
    with pytest.raises(BusUnreachable, match=r"nats\.nkey_file: \S+broken holds no nkey seed"):
        BusAddress(nats.url, nkey_file=str(tmp_path / "broken")).login()


# --- users of a run on a server of one's own


async def test_the_users_that_the_roles_command_makes_work_on_a_server_of_ones_own(tmp_path: Path):
    code, output = await command(tmp_path, "roles", "mine", "--config", "users", "--url", "nats://elsewhere:1")
    assert code == 0, output
    users = tmp_path / "users"
    assert users.stat().st_mode & 0o077 == 0
    assert all(file.stat().st_mode & 0o077 == 0 for file in users.iterdir())
    assert len(list(users.iterdir())) == len(login_roles()) + 1

    async with serving(tmp_path, f'include "{(users / "nats-accounts.conf").relative_to(tmp_path)}"\n') as port:
        nats = NatsSettings(url=f"nats://127.0.0.1:{port}", credentials="users")
        logins = given_logins(nats, tmp_path)
        operator = await Bus.connect(logins["operator"], "mine")
        await provision(operator, equal_sizes(payload_mb=8, ledger_mb=8), lease_s=5)
        monitor = await Bus.connect(logins["monitor"], "mine")
        assert await read_last(monitor, RUN_OPENED) is None
        with pytest.raises(BusDenied, match="does not allow user 'mine-monitor'"):
            await provision(monitor, equal_sizes(payload_mb=8, ledger_mb=8), lease_s=5)
        await operator.close()
        await monitor.close()
    assert len({login.password for login in known_logins(users).values()}) == len(login_roles())
    (users / "buffer.json").unlink()
    with pytest.raises(OSError, match=re.escape("buffer.json")):
        given_logins(nats, tmp_path)


async def test_commands_that_only_read_work_as_monitor_and_others_give_the_reason(tmp_path: Path):
    server = EmbeddedServer(tmp_path / "own", run="mine")
    await server.start()
    try:
        owner = await Bus.connect(server.address, "mine")
        await provision(owner, equal_sizes(payload_mb=8, ledger_mb=8), lease_s=5)
        await publish(owner, ActorStarted("supervisor", "supervisor-1", "here", 1))
        await owner.close()
        monitor = ("--credentials", str(tmp_path / "own" / "credentials" / "monitor.json"))

        for name, *words in (("status",), ("audit",), ("tap", "*", "--from-start", "--count", "1")):
            code, output = await command(tmp_path, name, "mine", *words, *monitor)
            assert code == 0, output
        code, output = await command(tmp_path, "scale", "mine", "rollout=2", *monitor)
    finally:
        await server.stop()
    assert (code, output.count("\n")) == (1, 1), output
    assert "does not allow user 'mine-monitor' to publish to _R_.ACTORS.asyncrl.mine.scale.requested" in output


# --- what nobody shall read


@pytest.mark.slow
async def test_no_secret_of_a_run_is_in_a_log_a_message_or_a_process_list(tmp_path: Path):
    async with up(tmp_path, *WITHOUT_MODEL, "learner.steps=1000") as run:
        await run.reaches(lambda: len(run.steps()) >= 2, "the second step")
        owner, logins = address_of(run), known_logins(run.root / "credentials")
        secrets = [login.password.encode() for login in (owner, *logins.values())]
        private = [run.root / "nats.json", run.root / "nats.conf", *(run.root / "credentials").iterdir()]
        assert all(file.stat().st_mode & 0o077 == 0 for file in private)
        seen = run.visible()
        assert len(seen) >= 2 * 8  # up, server, supervisor and at least one actor of each role
        bus = await Bus.connect(owner, run.root.name)
        for stream in STREAMS:
            output = Messages()
            await read_merged(bus, [Part(stream)], output.apply, output.refuse)
            seen += output.all
        assert len(seen) > 100
        await bus.close()
        run.interrupt()
        await run.ended()
    seen += [file.read_bytes() for file in run.root.rglob("*") if file.is_file() and file not in private]
    seen += [run.out.encode(), run.error.encode()]
    assert not [text for text in seen for secret in secrets if secret in text]
    assert repr(owner) == f"BusAddress(user 'asyncrl' at {owner.url})"


class Messages:
    """Every message of a log as it came."""

    def __init__(self) -> None:
        self.all: list[bytes] = []

    def apply(self, topic: object, message: object, record: Record) -> None:
        self.all.append(repr(record.headers).encode() + record.data)

    def refuse(self, record: Record, error: Exception) -> None:
        self.all.append(repr(record.headers).encode() + record.data)


# --- revoked


async def revoke(server: EmbeddedServer, user: str) -> None:
    """Take a user out of a running server's configuration."""
    config = server.directory / "nats.conf"
    text, count = re.subn(rf'    \{{ user: "{user}".*?\n    \}} \}}\n', "", config.read_text(), flags=re.DOTALL)
    assert count == 1
    config.write_text(text)
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGHUP)


async def test_a_revoked_login_ends_the_connection_and_whoever_waits_on_it(tmp_path: Path):
    server = EmbeddedServer(tmp_path, run="mine")
    await server.start()
    try:
        bus = await Bus.connect(BusAddress.read(tmp_path / "credentials" / "rollout.json"), "mine")
        fault: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        bus.on_fault = fault.set_result
        other = await Bus.connect(BusAddress.read(tmp_path / "credentials" / "reward.json"), "mine")
        waiting = asyncio.create_task(bus.store("asyncrl.mine.trajectory.failed.p000001-0", b"", {}))

        await revoke(server, "mine-rollout")

        async with asyncio.timeout(AT_ONCE_S):
            assert isinstance(error := await fault, BusDenied)
            with pytest.raises(BusDenied):
                await waiting  # no stream is there to take it
            with pytest.raises(BusDenied):
                await bus.store("asyncrl.mine.trajectory.failed.p000001-0", b"", {})
        assert re.search(r"refused user 'mine-rollout': .*; the login is unknown, expired or revoked", str(error))
        assert other.client.is_connected
        await other.close()
    finally:
        await server.stop()


async def test_an_actor_whose_login_is_revoked_ends_for_good_with_the_reason(tmp_path: Path):
    server = EmbeddedServer(tmp_path / "server", run="mine")
    await server.start()
    stage = Stage(tmp_path / "run", server, msgspec.convert({"run": "mine"}, Config))
    try:
        owner = await Bus.connect(server.address, "mine")
        await provision(owner, equal_sizes(payload_mb=8, ledger_mb=8), lease_s=5)
        login = BusAddress.read(server.directory / "credentials" / "recorder.json")
        login.save(stage.files.credentials / "recorder.json")
        recorder = await stage.start("recorder")

        async def has_started() -> bool:
            return await read_last(owner, ACTOR_STARTED, "recorder-1") is not None

        await until(has_started, "the recorder has started", DEADLINE_S)
        await owner.close()

        await revoke(server, "mine-recorder")

        async with asyncio.timeout(DEADLINE_S):
            assert await recorder.wait() == FATAL
        again = await stage.start("recorder")
        async with asyncio.timeout(DEADLINE_S):
            assert await again.wait() == DENIED
    finally:
        await stage.stop()
        await server.stop()
    log = (stage.files.logs / "recorder-1.log").read_text()
    assert "the login is unknown, expired or revoked" in log
    assert login.password not in log


async def test_the_supervisor_reports_an_actor_whose_login_is_refused_and_the_doctor_names_it(tmp_path: Path):
    server = EmbeddedServer(tmp_path / "server", run="mine")
    await server.start()
    settings = {"run": "mine", "engine": {"kind": "scripted"}, "learner": {"trainer": "scripted"}}
    stage = Stage(tmp_path / "run", server, msgspec.convert(settings, Config))
    stage.make_model()  # without one the rollout worker could end the run first
    BusAddress(server.address.url, "mine-reward", "wrong").save(stage.files.credentials / "reward.json")
    try:
        owner = await Bus.connect(server.address, "mine")
        await provision(owner, equal_sizes(payload_mb=8, ledger_mb=8), lease_s=5)
        await publish(owner, RunOpened(5, 0, msgspec.to_builtins(stage.config)))

        supervisor = await stage.start("supervisor")

        async with asyncio.timeout(3 * DEADLINE_S):  # it stops every role in turn
            assert await supervisor.wait() == FATAL  # another start cannot help
        record = await read_last(owner, ACTOR_STOPPED, "reward-1")
        assert record is not None and (await read(owner, ActorStopped, record)).denied
        state = await read_state(owner, brief=True)
        assert ("permission missing", "reward-1") in [(found.cause, found.object) for found in diagnose(state)]
        await owner.close()
    finally:
        await stage.stop()
        await server.stop()
