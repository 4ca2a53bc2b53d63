"""Parse JetStream's acknowledgement of a publish: stored, not yet, or never."""

from __future__ import annotations

import msgspec

from asyncrl.bus.errors import BusRefused, WrongSequence

_STREAM_FULL = 10077
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
        if error.err_code not in (_STREAM_FULL, *PASSING) and error.code != 503:  # 503: no leader yet, or it starts
            raise BusRefused(subject, error.err_code, error.description)


read_ack = msgspec.json.Decoder(Ack).decode
