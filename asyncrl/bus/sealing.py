"""Encrypted bodies: XChaCha20-Poly1305 under data keys that lie in one stream, which few roles may read.

The nonce is a keyed hash of name and content, so that a body that is published again is the same body: repeats are
known by it, as everywhere. Two bodies share a nonce only if they are equal.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from nacl.exceptions import CryptoError
from nacl.secret import Aead

from asyncrl.bus.errors import BusDenied
from asyncrl.bus.key_cache import SecretGone
from asyncrl.bus.log import Record, read_last
from topics.secrets import SECRET_MADE, SecretMade
from topics.topic import Topic
from topics.wire import SEALED, WireError, decode

if TYPE_CHECKING:
    from asyncrl.bus.connection import Bus


async def seal_body(bus: Bus, topic: Topic[Any], key: str, secrets: str, body: bytes) -> bytes:
    """Return the stored form of a message body.

    Args:
        key: of the message.
        secrets: ids of the data keys, all of which are needed to read it.

    Raises:
        SecretGone: one of them is not there.
    """
    return await seal_under(bus, secrets, _name(topic, key), body)


async def seal_under(bus: Bus, secrets: str, name: bytes, body: bytes) -> bytes:
    """Encrypt data outside topics with data keys; raises as `seal_body`."""
    return seal(await _key_of(bus, secrets), name, body)


async def open_under(bus: Bus, secrets: str, name: bytes, sealed: bytes) -> bytes:
    """Decrypt what `seal_under` made; raises as `open_body`."""
    return unseal(await _key_of(bus, secrets), name, sealed)


async def open_body(bus: Bus, topic: Topic[Any], record: Record, body: bytes) -> bytes:
    """Return the published body of a record, decrypted if necessary.

    Raises:
        SecretGone: a data key is not there.
        WireError: it is not sealed under these keys, or not as this message.
    """
    secrets = record.headers.get(SEALED)
    if not secrets:
        return body
    return await open_under(bus, secrets, _name(topic, record.key), body)


async def check_keys(bus: Bus, secrets: str) -> None:
    """Raise `SecretGone` if one of some data keys is missing."""
    for secret in filter(None, secrets.split(",")):
        await _data_key(bus, secret)


def seal(key: bytes, name: bytes, body: bytes) -> bytes:
    """Encrypt a body: nonce (24 bytes), ciphertext, tag (16 bytes).

    Args:
        key: [32].
        name: the encryption is bound to this name.
    """
    nonce_key = hashlib.blake2b(b"", key=key, person=b"asyncrl nonce").digest()
    made = hashlib.blake2b(len(name).to_bytes(8) + name, key=nonce_key, digest_size=Aead.NONCE_SIZE)
    made.update(body)
    return bytes(Aead(key).encrypt(body, name, made.digest()))


def unseal(key: bytes, name: bytes, sealed: bytes) -> bytes:
    """Decrypt what `seal` made.

    Raises:
        WireError: it was made with another key or name, or changed since.
    """
    try:
        return bytes(Aead(key).decrypt(sealed, name))
    except (CryptoError, ValueError) as error:
        raise WireError(f"{len(sealed)} bytes that are not sealed under the data key of their header") from error


def _name(topic: Topic[Any], key: str) -> bytes:
    return f"{topic.name}:{key}".encode()


async def _key_of(bus: Bus, secrets: str) -> bytes:
    """Return the key that some data keys make together: without one of them there is none."""
    keys = [await _data_key(bus, secret) for secret in secrets.split(",")]
    if len(keys) == 1:
        return keys[0]
    return hashlib.blake2b(b"".join(keys), digest_size=32, person=b"asyncrl keys").digest()


async def _data_key(bus: Bus, secret: str) -> bytes:
    key = bus.vault.get(secret)
    if key is None:
        try:
            record = await read_last(bus, SECRET_MADE, secret)
        except BusDenied as error:
            raise SecretGone(f"data key {secret} may not be read by {bus.address.user}") from error
        if record is None:
            raise SecretGone(f"data key {secret} is not there: it was erased, or is lost")
        key = decode(SecretMade, record.data).key
        bus.vault.put(secret, key)
    return key
