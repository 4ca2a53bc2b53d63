"""The layout of a run's streams on JetStream: the domain and the servers that keep them, and how clients reach them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from topics.topic import DEAD, HISTORY, Retention, Stream

if TYPE_CHECKING:
    from asyncrl.config.process_settings import NatsSettings

_API = "$JS.API"


class StreamLayout(NamedTuple):
    """A place for streams. The default is the server that a client is connected to."""

    domain: str = ""  # of JetStream, where leaf nodes connect several; empty: that of the client's server
    replicas: int = 1  # servers that keep each stream
    tags: tuple[str, ...] = ()  # that each of these servers has

    def call(self, name: str) -> str:
        """Return the subject of a call of the JetStream API, such as `STREAM.INFO.NAME`."""
        return f"$JS.{self.domain}.API.{name}" if self.domain else f"{_API}.{name}"

    def with_calls(self, subjects: Iterable[str]) -> list[str]:
        """Add to subjects with a default call of the API the same call in the domain.

        A server checks a call as the client sends it, and again as the domain's server maps it to the default.
        """
        subjects = list(subjects)
        calls = [subject.removeprefix(f"{_API}.") for subject in subjects if subject.startswith(f"{_API}.")]
        return [*subjects, *(map(self.call, calls) if self.domain else ())]

    def config(self, run: str, stream: Stream, size: int) -> dict[str, Any]:
        """Return the server-side configuration of one stream.

        Args:
            size: bytes that it may hold.
        """
        stored, published = f"asyncrl.{run}.>", stream.ingest(f"asyncrl.{run}.>")
        last = stream.keep is Retention.LAST
        return {
            "name": stream.full_name(run),
            "subjects": [published],
            "subject_transform": {"src": published, "dest": stored},
            "retention": "limits",
            "storage": "memory" if last else "file",
            # A flood of bad messages does not stop their reporting; a long history loses its beginning.
            "discard": "old" if last or stream in (DEAD, HISTORY) else "new",
            "max_bytes": size,
            "max_msgs_per_subject": 1 if last else -1,
            "allow_direct": True,
            "allow_msg_ttl": True,
            "duplicate_window": 120_000_000_000,
            "num_replicas": self.replicas,
            "description": stream.about,
            **({"placement": {"tags": list(self.tags)}} if self.tags else {}),
        }


DEFAULT = StreamLayout()


def layout_of(nats: NatsSettings) -> StreamLayout:
    """Return the layout that settings describe."""
    return StreamLayout(nats.domain, nats.copies, tuple(nats.tags))
