"""The layout of a run's streams: the default is a fixed one, and a domain reaches every call of the JetStream API."""

from pathlib import Path

import pytest

from asyncrl.bus.address import BusAddress
from asyncrl.bus.connection import Bus
from asyncrl.bus.layout import DEFAULT, StreamLayout, layout_of
from asyncrl.bus.log import read_last, read_last_of_each, read_newest
from asyncrl.bus.logins import write_accounts
from asyncrl.bus.merged_reader import read_each
from asyncrl.bus.permissions import login_roles, permissions
from asyncrl.bus.provision import equal_sizes, held_bytes, provision, queue_states, remove_streams, runs_on
from asyncrl.bus.publish import publish
from asyncrl.config.process_settings import NatsSettings
from asyncrl.ports import free_port
from harness.servers import serving
from topics.actors import ACTOR_STARTED, ActorStarted
from topics.topic import ACTORS, DEAD, HISTORY, PROMPTS, STREAMS, Retention

RUN, SIZES = "a-run", equal_sizes(payload_mb=16, ledger_mb=16)
CALLS = "$JS.API."


def test_the_default_layout_has_the_settings_that_every_run_so_far_has():
    for stream in STREAMS:
        last = stream.keep is Retention.LAST
        subject = stream.ingest("asyncrl.a-run.>")
        assert layout_of(NatsSettings()).config(RUN, stream, 7) == {
            "name": stream.full_name(RUN),
            "subjects": [subject],
            "subject_transform": {"src": subject, "dest": "asyncrl.a-run.>"},
            "retention": "limits",
            "storage": "memory" if last else "file",
            "discard": "old" if last or stream in (DEAD, HISTORY) else "new",
            "max_bytes": 7,
            "max_msgs_per_subject": 1 if last else -1,
            "allow_direct": True,
            "allow_msg_ttl": True,
            "duplicate_window": 120_000_000_000,
            "num_replicas": 1,
            "description": stream.about,
        }
    assert {stream.keep for stream in STREAMS} == set(Retention)


def test_settings_choose_replicas_tags_and_domain():
    layout = layout_of(NatsSettings(url="nats://a:1", replicas=3, tags=["region:eu"], domain="hub"))

    config = layout.config(RUN, PROMPTS, 7)

    assert (config["num_replicas"], config["placement"]) == (3, {"tags": ["region:eu"]})
    assert layout.call("STREAM.INFO.S") == "$JS.hub.API.STREAM.INFO.S"
    assert DEFAULT.call("STREAM.INFO.S") == "$JS.API.STREAM.INFO.S"


@pytest.mark.parametrize("role", login_roles())
def test_permissions_in_a_domain_are_those_of_the_default_for_both_names_of_each_call(role: str):
    here, there = permissions(role, [RUN]), permissions(role, [RUN], layout=StreamLayout("hub"))

    for mine, other in ((here.publish, there.publish), (here.denied, there.denied)):
        assert other == [*mine, *(call.replace(CALLS, "$JS.hub.API.") for call in mine if call.startswith(CALLS))]
    assert here.subscribe == there.subscribe


class Heard:
    """Subjects that a connection publishes to."""

    def __init__(self, bus: Bus) -> None:
        self.subjects: list[str] = []
        sends = bus.client.publish

        async def publishes(subject: str, *arguments: object, **options: object) -> None:
            self.subjects.append(subject)
            await sends(subject, *arguments, **options)  # type: ignore[arg-type]

        bus.client.publish = publishes  # type: ignore[method-assign]


async def use(bus: Bus) -> None:
    """Make the topics of a run, write and read in every way, and work with a queue."""
    await provision(bus, SIZES, lease_s=5)
    for number in range(1, 4):
        await publish(bus, ActorStarted("engine", f"engine-{number}", "here", number))
    found: list[int] = []
    await read_each(bus, ACTOR_STARTED, lambda message, _: found.append(message.pid))
    assert found == [1, 2, 3]
    subjects = [ACTOR_STARTED.pattern(RUN)]
    assert await read_last(bus, ACTOR_STARTED, "engine-2") is not None
    assert len(await read_last_of_each(bus, ACTORS, subjects)) == 3
    assert await read_newest(bus, ACTORS, subjects[0]) is not None
    assert set(await queue_states(bus)) == set(bus.tables.queues)
    assert await held_bytes(bus)
    assert await runs_on(bus) == [RUN]


async def test_a_client_at_a_leaf_node_uses_the_streams_of_the_hub_by_its_domain(tmp_path: Path):
    (tmp_path / "hub").mkdir()
    (tmp_path / "leaf").mkdir()
    leaves = free_port()
    hub = f'server_name: hub\nleafnodes {{ listen: "127.0.0.1:{leaves}" }}\n'
    leaf = f'server_name: leaf\nleafnodes {{ remotes: [{{ url: "nats://127.0.0.1:{leaves}" }}] }}\n'
    async with (
        serving(tmp_path / "hub", hub, domain="hub") as at_hub,
        serving(tmp_path / "leaf", leaf, domain="edge") as at_leaf,
    ):
        bus = await Bus.connect(BusAddress(f"nats://127.0.0.1:{at_leaf}", domain="hub"), RUN)
        here = await Bus.connect(BusAddress(f"nats://127.0.0.1:{at_leaf}"), RUN)
        there = await Bus.connect(BusAddress(f"nats://127.0.0.1:{at_hub}"), RUN)
        heard = Heard(bus)

        await use(bus)

        assert await runs_on(there) == [RUN]
        assert await runs_on(here) == []
        assert await remove_streams(bus) == len(STREAMS)
        assert [subject for subject in heard.subjects if subject.startswith(CALLS)] == []
        assert any(subject.startswith("$JS.hub.API.CONSUMER.MSG.NEXT.") for subject in heard.subjects)
        for one in (bus, here, there):
            await one.close()


async def test_users_of_a_domain_may_use_it(tmp_path: Path):
    write_accounts([RUN], tmp_path / "users", server=BusAddress("", domain="hub"))
    async with serving(tmp_path, 'include "users/nats-accounts.conf"\n', domain="hub") as port:
        write_accounts([RUN], tmp_path / "users", server=BusAddress(f"nats://127.0.0.1:{port}"))
        operator = BusAddress.read(tmp_path / "users" / "operator.json")
        assert operator.domain == "hub"
        bus = await Bus.connect(operator, RUN)
        await use(bus)
        await bus.close()
