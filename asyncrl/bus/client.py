"""The client of nats-py, with a faster reading of headers."""

from __future__ import annotations

from nats.aio import client


class Client(client.Client):
    """As its base; the headers of a message, of which each record has a dozen, take a third of the time."""

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        found = {}
        for line in raw.decode("utf-8", "replace").split("\r\n"):
            name, colon, value = line.partition(":")
            # A name with white space in it, or with other than ASCII characters, is none.
            if colon and name.isascii() and len(words := name.split()) == 1:
                found[words[0]] = value.strip(" \t\r\n\v\f")
        return found
