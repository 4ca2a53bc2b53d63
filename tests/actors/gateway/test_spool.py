"""What a gateway cannot store waits in a file: over its death, beside a purge, on a disk that is full."""

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from actors.gateway.turn_store import TurnStore
from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import Vault
from asyncrl.bus.log import last_sequence
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import Prepared, prepare, publish
from asyncrl.bus.server import EmbeddedServer
from asyncrl.live.keys import make_key
from asyncrl.live.spool import Spool, SpoolFault, SpoolTaken, Waiting
from asyncrl.live.stored import TurnReader
from asyncrl.live.tenant_keys import new_secret, owner_in, owner_of
from asyncrl.live.turn_log import TurnLog
from asyncrl.ports import free_port
from asyncrl.run.purge import purge, purge_spools
from harness.gateways import Served, gateway, gateway_stage, ready, stored_turns
from harness.live_runs import answers
from harness.sdks import sdks
from harness.sglang_like import LikeSGLang
from harness.stage import DEADLINE_S, LEASE_S, Stage, until
from topics.keys import TurnCounted
from topics.secrets import SecretMade
from topics.topic import SECRETS, TURNS
from topics.turns import TurnFinished, TurnStarted
from topics.wire import SEALED

# Long enough that sealed bytes do not contain them by chance.
SECRET_WORDS = "wxyzwxyz"
USER = "user-to-be-erased"


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def test_a_gateway_killed_while_the_server_is_away_loses_nothing_that_was_answered(
    bus: Bus, server: EmbeddedServer, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    made = gateway_stage(stage, tmp_path / "model", inference, port=(port := free_port()))
    spool = made.files.spool / "gateway-1"
    address = f"http://127.0.0.1:{port}"
    key, added = make_key("anna")
    await publish(bus, added)
    await publish(bus, ready(inference))
    process = await made.start("gateway")
    await until(lambda: answers(address), "the gateway listens")
    ask: dict[str, Any] = {"model": "any", "max_tokens": 5}
    async with sdks(address, key) as (_, second):
        first = await second.messages.create(messages=said("abc"), **ask)
        await server.stop()
        history = [*said("abc"), {"role": "assistant", "content": first.content[0].text}, *said(SECRET_WORDS)]
        away = await second.messages.create(messages=history, **ask)
        await second.messages.create(messages=said(SECRET_WORDS), metadata={"user_id": USER}, **ask)
        process.kill()
        await process.wait()
        raw = spool.read_bytes()
        assert len(raw) > 500 and spool.stat().st_mode & 0o77 == 0
        assert SECRET_WORDS.encode() not in raw and USER.encode() not in raw
        await server.start()
        keys = await last_sequence(bus, SECRETS)
        # It knows of no key of this user: that waits in the file.
        assert (await purge(bus, owner_of("anna", USER), "", "operator")).keys == []
        await made.start("gateway")
        await until(lambda: answers(address), "the next gateway listens")
        await until(lambda: not spool.read_bytes(), "all is stored")
        history += [{"role": "assistant", "content": away.content[0].text}, *said("abc")]
        await second.messages.create(messages=history, **ask)
    facts = await stored_turns(bus)
    begun = [fact for fact in facts if isinstance(fact, TurnStarted)]
    ended = {fact.turn_id: fact for fact in facts if isinstance(fact, TurnFinished)}
    assert [turn.parent for turn in begun] == ["", begun[0].turn_id, begun[1].turn_id]
    assert [ended[turn.turn_id].finish for turn in begun] == ["length"] * 3 and len(facts) == 6
    assert {owner_in(turn.secret) for turn in begun} == {owner_of("anna", "")}
    assert await last_sequence(bus, SECRETS) == keys + 1  # of the next gateway; the erased user's was never stored


async def test_a_purge_erases_keys_that_wait_beside_it_and_later_turns_have_another(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    sizes = equal_sizes(payload_mb=64, ledger_mb=16)
    await provision(bus, sizes | {"SECRETS": 1}, lease_s=LEASE_S)  # it takes no key
    ask: dict[str, Any] = {"model": "any", "max_tokens": 5}
    async with (
        gateway(bus, stage, tmp_path / "model", inference) as served,
        sdks(served.address, served.key) as (_, second),
    ):
        first = await second.messages.create(messages=said("abc"), **ask)
        assert served.count("facts_waiting") == 3
        await purge(bus, owner_of("anna", ""), "", "operator")
        await until(lambda: not served.gateway._data_keys._current, "the gateway has read it")
        history = [*said("abc"), {"role": "assistant", "content": first.content[0].text}, *said("abc")]
        await second.messages.create(messages=history, **ask)
        await provision(bus, sizes, lease_s=LEASE_S)
        await until(lambda: served.count("facts_waiting") == 0, "all is stored")
        assert served.count("facts_purged") >= 2  # the key itself was on its way
    bus.vault = Vault()  # as of another process
    begun, ended = await stored_turns(bus)
    assert isinstance(begun, TurnStarted) and begun.parent == "" and ended.turn_id == begun.turn_id
    assert (await TurnReader(bus).read(begun.turn_id)).prompt.tolist() == inference.asked[1].ids


def waiting(number: int, size: int = 10) -> Waiting:
    return Waiting(number, Prepared("turn.counted", f"t{number}", b"x" * size, {"a": "b"}))


def test_a_file_gives_back_what_was_written_whole(tmp_path: Path):
    spool = Spool(tmp_path / "spool" / "g")
    spool.open()
    for number in range(3):
        spool.add(waiting(number))
    spool.close()
    raw = (tmp_path / "spool" / "g").read_bytes()
    (tmp_path / "spool" / "g").write_bytes(raw[:-1])  # the last record was cut

    again = Spool(tmp_path / "spool" / "g")
    again.open()
    assert len(again) == 2 and again.damaged == 0 and again.taken < len(raw)
    again.add(waiting(3))
    found = []
    while len(again):
        found.append(again.first().message.key)
        again.drop_first()
    assert found == ["t0", "t1", "t3"] and (tmp_path / "spool" / "g").read_bytes() == b""


def test_a_record_that_is_damaged_takes_no_others_with_it(tmp_path: Path):
    spool = Spool(tmp_path / "g")
    spool.open()
    for number in range(4):
        spool.add(waiting(number))
    spool.close()
    raw = bytearray((tmp_path / "g").read_bytes())
    raw[len(raw) // 2 - 1] ^= 1  # the end of the second
    (tmp_path / "g").write_bytes(raw)

    again = Spool(tmp_path / "g")
    again.open()
    assert again.damaged == 1
    found = [again.first().message.key]
    while len(again) > 1:
        again.drop_first()
        found.append(again.first().message.key)
    assert found == ["t0", "t2", "t3"]


def test_a_disk_that_is_full_takes_no_more_and_keeps_what_it_has(tmp_path: Path):
    spool = Spool(tmp_path / "g")
    spool.open()
    spool.add(waiting(0))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (spool.taken + 50, before[1]))
    try:
        with pytest.raises(SpoolFault, match="takes no more"):
            spool.add(waiting(1, size=1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (tmp_path / "g").stat().st_size == spool.taken
    spool.add(waiting(2))
    spool.drop_first()
    assert spool.first() == waiting(2)


async def test_a_file_that_cannot_be_emptied_ends_no_gateway_and_is_emptied_later(
    bus: Bus,
    server: EmbeddedServer,
    stage: Callable[..., Stage],
    inference: LikeSGLang,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    async def said_while_away(served: Served) -> None:
        async with sdks(served.address, served.key) as (_, second):
            await server.stop()
            await until(lambda: not bus.client.is_connected, "the gateway has noticed")
            await second.messages.create(model="any", max_tokens=5, messages=said("abc"))
            await server.start()
            await until(lambda: served.count("facts_waiting") == 0, "all is stored")

    def fails(_file: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    async with gateway(bus, stage, tmp_path / "model", inference) as served:
        spool = served.context.files.spool / "gateway-1"
        with monkeypatch.context() as patched:
            patched.setattr("asyncrl.live.spool.os.fdatasync", fails)
            await said_while_away(served)
        assert served.count("spool_failed") == 1 and spool.stat().st_size > 0
        await said_while_away(served)
        assert spool.stat().st_size == 0 and served.count("facts_lost") == 0
    assert sum(isinstance(fact, TurnFinished) for fact in await stored_turns(bus)) == 2


async def test_what_waits_for_a_gateway_that_the_run_has_no_more_is_stored_and_what_is_refused_holds_up_nothing(
    bus: Bus, stage: Callable[..., Stage], inference: LikeSGLang, tmp_path: Path
):
    made = gateway_stage(stage, tmp_path / "model", inference)
    left = Spool(made.files.spool / "gateway-2")
    left.open()
    for turn, tenant in (("t1", "a" * 2000), ("t2", "a")):
        left.add(Waiting(1, await prepare(bus, TurnCounted(turn_id=turn, tenant=tenant, begun_s=1.0, tokens=2))))
    left.close()
    config = (await bus.api(f"STREAM.INFO.{TURNS.full_name(bus.run)}"))["config"]
    await bus.api(f"STREAM.UPDATE.{TURNS.full_name(bus.run)}", config | {"max_msg_size": 500})
    served = Served(bus, made)
    await served.start()
    await publish(bus, ready(inference))
    try:
        assert [fact.turn_id for fact in await stored_turns(bus)] == ["t2"]
        assert (served.count("facts_refused"), served.count("facts_waiting")) == (1, 0)
        assert [path.name for path in made.files.spool.iterdir()] == ["gateway-1"]
        async with sdks(served.address, served.key) as (_, second):
            await second.messages.create(messages=said("abc" * 100), model="any", max_tokens=5)
        assert served.count("turns_unrecorded") == 1
        other = Served(await Bus.connect(bus.address, bus.run, name="other"), made)
        with pytest.raises(SpoolTaken, match="another process of this gateway has it"):
            await other.gateway.run()
        await other.bus.close()
    finally:
        await served.stop()


async def test_what_the_server_does_not_allow_is_left_out_and_counted(stage: Callable[..., Stage], tmp_path: Path):
    server = EmbeddedServer(tmp_path, run="mine")
    await server.start()
    operator, sessions = [
        await Bus.connect(BusAddress.read(tmp_path / "credentials" / f"{role}.json"), "mine", name=role)
        for role in ("operator", "sessions")
    ]
    try:
        await provision(operator, equal_sizes(payload_mb=16, ledger_mb=16), lease_s=LEASE_S)
        facts = [TurnCounted(turn_id=turn, tenant="a", begun_s=1.0, tokens=2) for turn in ("t1", "t2")]
        context = stage().context("gateway", sessions)
        left = Spool(context.files.spool / "sessions")
        left.open()
        left.add(Waiting(1, await prepare(sessions, facts[0])))
        left.close()
        stored = TurnStore(context, TurnLog(None, most_tokens=1, retry_s=1.0), most_bytes=1000)  # type: ignore[arg-type]
        await stored.start(DEADLINE_S)
        assert (await stored.put(facts[1]), stored.waits, context.vitals["facts_refused"]) == (False, False, 2)
        await stored.close(0.0)
    finally:
        await operator.close()
        await server.stop()


async def test_a_purge_reaches_what_waits_for_a_gateway_that_does_not_run(bus: Bus, tmp_path: Path):
    spools, owners = tmp_path / "spool", [owner_of("anna", "u1"), owner_of("anna", USER)]
    for name in ("gateway-1", "gateway-2"):
        spool = Spool(spools / name)
        spool.open()
        for owner in owners:
            made = SecretMade(new_secret(owner, 0.0), owner.encode().ljust(32))
            spool.add(Waiting(1, await prepare(bus, made)))
            spool.add(Waiting(1, Prepared("turn.started", "t", b"body of " + owner.encode(), {SEALED: made.secret_id})))
        if name == "gateway-1":
            spool.close()

    assert purge_spools(spools, owners[0], "") == 2  # the other file's gateway lives, and reads of the purge
    assert purge_spools(tmp_path / "none", "", "") == 0

    raw = (spools / "gateway-1").read_bytes()
    assert owners[0].encode() not in raw and raw.count(owners[1].encode()) >= 2
    again = Spool(spools / "gateway-1")
    again.open()
    assert (len(again), again.damaged) == (2, 0) and again.first().secrets[0].startswith(owners[1])
    again.close()
    assert purge_spools(spools, owners[1], "") == 2 and not (spools / "gateway-1").read_bytes()
    spool.close()
