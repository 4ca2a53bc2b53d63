"""Answers of the server: a publish is stored, not yet, or never; and refusals, with what to do about them."""

from __future__ import annotations

import re
import ssl
from typing import NamedTuple

import msgspec
import nats.errors

from asyncrl.bus.address import BusAddress
from asyncrl.bus.errors import BusDenied, BusRefused, WrongSequence

MESSAGE_ID = "Nats-Msg-Id"  # header: a message that is already stored is a duplicate
_FULL = (10002, 10077)  # of the account, of the stream; of the server the code is 503
_WRONG_SEQUENCE = (10070, 10071, 10164)
PASSING = (10005, 10008, 10009, 10118, 10119, 10158)  # a cluster that finds itself: no leader, too few servers yet


class _AckError(msgspec.Struct):
    code: int
    err_code: int = 0
    description: str = ""


class Ack(msgspec.Struct):
    """The server's acknowledgement that a message is stored."""

    stream: str = ""
    seq: int = 0
    duplicate: bool = False
    error: _AckError | None = None

    def raise_unless_passing(self, subject: str) -> None:
        """Return where another attempt may help: the stream is full, or has no leader yet.

        Raises:
            WrongSequence: the compare-and-set expectation did not hold.
            BusRefused: the server will never take it.
        """
        error = self.error
        if error is None:
            return
        if error.err_code in _WRONG_SEQUENCE:
            raise WrongSequence(f"{subject}: {error.description}")
        if error.err_code not in (*_FULL, *PASSING) and error.code != 503:  # 503: no leader yet, or it starts
            raise BusRefused(subject, error.err_code, error.description)


read_ack = msgspec.json.Decoder(Ack).decode


_SUBJECT = re.compile(r'permissions violation for (publish|subscription) to "?([^\s"]+)', re.IGNORECASE)
_LOGIN = re.compile(r"authorization (violation|failed)|authentication (expired|revoked)", re.IGNORECASE)
_NOT_TRUSTED = re.compile(r"certificate|unknown ca|without TLS", re.IGNORECASE)


class Denied(NamedTuple):
    """A subject that a user may not use."""

    publishing: bool  # else listening
    subject: str  # in lower case, as the client reports it

    def error(self, address: BusAddress, run: str, subject: str = "") -> BusDenied:
        """Return the refusal as text.

        Args:
            subject: as it was asked for.
        """
        return BusDenied(
            f"NATS at {address.url} does not allow {address.who} to {'publish to' if self.publishing else 'listen to'} "
            f"{subject or self.subject}; what each role may do: asyncrl roles {run}"
        )


def denied_subject(error: Exception) -> Denied | None:
    """Return the denied subject, where the error is a permissions violation."""
    found = _SUBJECT.search(str(error))
    return None if found is None else Denied(found[1].lower() == "publish", found[2].lower())


def refusal(address: BusAddress, error: Exception | str) -> BusDenied | None:
    """Return advice on an error that every attempt would repeat; None where another attempt may help."""
    text = str(error)
    if _LOGIN.search(text):
        return BusDenied(
            f"NATS at {address.url} refused {address.who}: {text}; the login is unknown, expired or revoked: check "
            "nats.user and nats.password_file, nats.nkey_file, or nats.credentials"
        )
    if isinstance(error, ssl.SSLCertVerificationError):
        return BusDenied(
            f"NATS at {address.url} shows a certificate that is not accepted: {error.verify_message}; check "
            f"nats.tls_ca or --tls-ca ({address.ca}), the server's name and its dates"
        )
    if isinstance(error, ssl.SSLError | nats.errors.Error) and _NOT_TRUSTED.search(text):
        return BusDenied(f"NATS at {address.url}: {text}; check nats.url, nats.tls_cert and nats.tls_key")
    return None
