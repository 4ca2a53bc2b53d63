"""Places of what belongs to a trajectory and lies outside of its messages: progress in logs, experts in blobs."""

from __future__ import annotations

import msgspec

from topics.wire import Count, Id, Sequence

ROUTING = "routing"  # header, and field, with what lies in a blob beside the message: name:size:xxh3:chunks


class Routing(msgspec.Struct):
    """The blob with the experts that tokens went to, as in `Answer`; a chunk has some layers of some tokens.

    The chunks of the first tokens come first, the first layers first.
    """

    blob: str  # name:size:xxh3:chunks
    width: Count  # bytes of a token in one layer
    layers: list[Count]  # bounds of the layers of a chunk: 0, ..., all that the model has
    tokens: list[Count]  # bounds of the tokens of a chunk, of all segments end to end: 0, ..., all
    digests: list[str]  # xxh3_64 of each chunk as it is stored, hex
    known: bytes  # a bit for each token, the first one in the highest: 1 where its experts were recorded


class Holding(msgspec.Struct):
    """The progress that one delivery of a trajectory stored: entries in a worker's progress log."""

    log: Id
    delivery: Count
    since: Sequence  # no entry lies below
    until: Count  # no entry above counts: the delivery after it continued from here; 0: no bound
