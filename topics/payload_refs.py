"""References to data of a trajectory outside its messages: progress in logs, experts in blobs."""

from __future__ import annotations

import msgspec

from topics.wire import Count, Id, Sequence, Width

ROUTING = "routing"  # header and field that name a blob: name:size:xxh3:chunks


class Routing(msgspec.Struct):
    """The blob with the experts that tokens went to, as in `Answer`; a chunk has some layers of some tokens.

    The chunks of the first tokens come first, the first layers first.
    """

    blob: str  # name:size:xxh3:chunks
    width: Count  # bytes of a token in one layer
    layers: list[Count]  # bounds of the layers of a chunk: 0, ..., all that the model has
    tokens: list[Count]  # bounds of the tokens of a chunk, of all segments end to end: 0, ..., all
    digests: list[str]  # xxh3_64 of each stored chunk, hex
    known: bytes  # a bit for each token, the first one in the highest: 1 where its experts were recorded


class Experts(msgspec.Struct, omit_defaults=True):
    """The experts of an answer's tokens: one row for each fed token of prompt and answer, from `first`.

    A row has [layers, experts of a token] of one byte each, or two for more than 256 experts; unknown experts are
    zeros. Rows of a progress message are in the blob that the message names."""

    width: Width  # bytes of a row
    follows: str = ""  # call whose answer has the rows of the tokens before `first`, which are the same there
    first: Count = 0  # token of the first row
    rows: bytes = b""  # end to end
    before: Count = 0  # rows in the messages before; those here follow them
    start: Count = 0  # of the bytes of those here in the blob
    stop: Count = 0

    def __post_init__(self) -> None:
        if len(self.rows) % self.width:
            raise ValueError(f"{len(self.rows)} bytes of experts are no whole number of rows of {self.width}")

    @property
    def end(self) -> int:
        """The token after the last row."""
        return self.first + self.before + len(self.rows) // self.width


class Holding(msgspec.Struct):
    """The progress that one delivery of a trajectory stored: entries in a worker's progress log."""

    log: Id
    delivery: Count
    since: Sequence  # the smallest entry
    until: Count  # no entry above counts: the delivery after it continued from here; 0: no bound
