"""Sealed messages: what is stored is ciphertext, opens as what it was under its keys alone, and an erased key opens
nothing: neither the key nor the text stands in the server's files."""

import math
import secrets
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncrl.bus.connection import Bus
from asyncrl.bus.key_cache import SecretGone, Vault
from asyncrl.bus.log import read_last
from asyncrl.bus.provision import equal_sizes, provision
from asyncrl.bus.publish import publish, read
from asyncrl.bus.sealing import seal, unseal
from asyncrl.bus.server import EmbeddedServer
from asyncrl.live.tenant_keys import covers, new_secret, owner_of, tenant_digest, user_of
from asyncrl.run.purge import _stored, purge
from topics.secrets import SecretMade
from topics.turns import TURN_FINISHED, TurnFinished
from topics.wire import WireError

KEY, NAME, TEXT = bytes(range(32)), b"turn.started:t1", b"what a user said"
TOKENS = np.array([7001, 7002, 7003], np.int32)


def test_a_body_opens_under_its_key_and_name_alone():
    sealed = seal(KEY, NAME, TEXT)

    assert unseal(KEY, NAME, sealed) == TEXT
    assert TEXT not in sealed and len(sealed) == len(TEXT) + 24 + 16
    for key, name, body in [
        (bytes(32), NAME, sealed),
        (KEY, b"turn.started:t2", sealed),
        (KEY, NAME, sealed[:-1] + bytes([sealed[-1] ^ 1])),
        (KEY, NAME, b""),
    ]:
        with pytest.raises(WireError, match="not sealed under the data key"):
            unseal(key, name, body)


def test_a_repeat_is_the_same_body_and_another_text_has_another_nonce():
    assert seal(KEY, NAME, TEXT) == seal(KEY, NAME, TEXT)
    nonces = {seal(KEY, name, text)[:24] for name in (NAME, b"other") for text in (TEXT, b"another text")}
    assert len(nonces) == 4


def test_an_erased_key_is_never_known_again():
    vault = Vault()
    vault.put("s", KEY, until_s=math.inf)
    vault.erase(["s"])
    vault.put("s", KEY)

    with pytest.raises(SecretGone, match="data key s was erased"):
        vault.get("s")


def test_names_of_keys_tell_whose_they_are_and_of_which_day():
    secret = new_secret(owner_of("anna", "u1"), 0.0)

    assert "_19700101_" in secret and "anna" not in secret and "u1" not in secret
    assert covers(secret, tenant_digest("anna"), "") and covers(secret, owner_of("anna", "u1"), "19700102")
    assert covers(secret, "", "19700102") and not covers(secret, "", "19700101")
    assert not covers(secret, owner_of("anna", "u2"), "") and not covers(secret, tenant_digest("ann"), "")
    assert owner_of("ab", "c") != owner_of("a", "bc")


def test_the_user_is_named_by_header_or_body_and_a_session_does_not_count():
    cli = '{"account": "a", "session_id": "%s"}'

    assert user_of({"x-asyncrl-user": "u"}, "v") == "u" and user_of({}, "v") == "v"
    assert user_of({}, cli % "1") == user_of({}, cli % "2") == '{"account":"a"}'
    assert user_of({"x-asyncrl-user": (no_text := "{\udcff")}, "") == no_text  # a byte of a header that is no text
    for odd in ("{no json", '{"a":' * 2000 + "1" + "}" * 2000):
        assert user_of({}, odd) == odd


async def stored_turn(bus: Bus, secret: str, turn: str = "t1") -> TurnFinished:
    reals = np.zeros(3, np.float32)
    versions = np.zeros(3, np.int32)
    message = TurnFinished(turn, "s", "stop", TOKENS, reals, versions, secret=secret)
    await publish(bus, message)
    return message


async def turn_left(bus: Bus, turn: str = "t1") -> TurnFinished:
    record = await read_last(bus, TURN_FINISHED, turn)
    assert record is not None and TOKENS.tobytes() not in record.data
    return await read(bus, TurnFinished, record)


async def test_what_is_sealed_is_read_until_one_of_its_keys_is_erased(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    server = EmbeddedServer(tmp_path)
    bus = await Bus.connect(await server.start(), "sealed")
    keys = {new_secret(owner_of("anna", user), 0.0): secrets.token_bytes(32) for user in ("u1", "u2")}
    first, second = keys
    try:
        await provision(bus, equal_sizes(payload_mb=8, ledger_mb=8), lease_s=30)
        for secret, key in keys.items():
            await publish(bus, SecretMade(secret, key))
        await stored_turn(bus, first)
        await stored_turn(bus, f"{first},{second}", "t2")
        assert (await turn_left(bus)).tokens.tolist() == (await turn_left(bus, "t2")).tokens.tolist() == TOKENS.tolist()

        assert (await purge(bus, "", "20200101", "retention")).keys == []  # named of 1970, and stored today
        purged = await purge(bus, owner_of("anna", "u2"), "", "operator")
        assert (purged.keys, purged.left) == ([second], 1)
        assert (await purge(bus, owner_of("anna", "u2"), "", "operator")).keys == []

        looks, late = count(), new_secret(owner_of("anna", "u2"), 0.0)

        async def while_another_comes(of: Bus) -> Any:
            found = await _stored(of)
            if not next(looks):
                await publish(of, SecretMade(late, secrets.token_bytes(32)))
            return found

        monkeypatch.setattr("asyncrl.run.purge._stored", while_another_comes)
        assert await purge(bus, owner_of("anna", "u2"), "", "operator") == ([late], 1)

        bus.vault = Vault()  # as of another process
        with pytest.raises(SecretGone, match="is not there"):
            await turn_left(bus, "t2")
    finally:
        await bus.close()
        await server.stop()
    stored = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert keys[second] not in stored and TOKENS.tobytes() not in stored
    assert keys[first] in stored, "what was not erased is found"
