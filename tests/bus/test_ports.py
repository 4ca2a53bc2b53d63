"""Addresses of a run's own servers: a port and an address of one's choice, or any free port on loopback."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
from aiohttp import ClientSession

from asyncrl.bus.address import BusAddress, own_address
from asyncrl.bus.connection import Bus
from asyncrl.bus.errors import BusUnreachable
from asyncrl.bus.server import SERVERS, OwnServer, own_server
from asyncrl.config.hints import hints
from asyncrl.config.load import ConfigError
from asyncrl.errors import AsyncRLError, LaunchError
from asyncrl.ports import Listen, free_port, listen_problem, places_of
from asyncrl.run.gateway_port import held_gateway
from asyncrl.run.resume import longer
from harness.configs import from_settings, the_problem
from harness.runs import SHORT, command


@asynccontextmanager
async def started(folder: Path, listen: Listen, servers: int = 1, **options: bool) -> AsyncIterator[BusAddress]:
    """The servers of a run, and how its monitor reaches them."""
    server: OwnServer = own_server(folder, "mine", servers, listen, **options)
    await server.start()
    try:
        yield BusAddress.read(folder / "credentials" / "monitor.json")
    finally:
        await server.stop()


@contextmanager
def taken(port: int = 0) -> Iterator[int]:
    """A port that another program listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        yield other.getsockname()[1]


def row_of_free_ports() -> int:
    """The first of three in a row."""
    while any(listen_problem("127.0.0.1", (port := free_port()) + more) for more in range(SERVERS)):
        pass
    return port


@pytest.mark.parametrize(
    ("host", "reached_at"),
    [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]")],
)
async def test_a_server_listens_on_the_address_and_port_that_are_set(tmp_path: Path, host: str, reached_at: str):
    if problem := listen_problem(host, 0):
        pytest.skip(problem)  # a machine without IPv6
    port = free_port(host)

    async with started(tmp_path, Listen(host, port)) as monitor:
        assert monitor.url == f"nats://{reached_at}:{port}"
        bus = await Bus.connect(monitor, "mine")
        await bus.close()
        beyond = socket.socket()  # a second address of this machine
        with beyond:
            assert (beyond.connect_ex(("127.0.0.3", port)) == 0) == (host == "0.0.0.0")


async def test_of_three_servers_each_has_a_port_after_the_first(tmp_path: Path):
    first = row_of_free_ports()

    async with started(tmp_path, Listen(port=first), SERVERS) as monitor:
        assert monitor.url == ",".join(f"nats://127.0.0.1:{first + more}" for more in range(SERVERS))
        bus = await Bus.connect(monitor, "mine")
        await bus.close()


async def test_without_a_port_the_one_of_the_start_before_is_kept_unless_it_is_taken(tmp_path: Path):
    async with started(tmp_path, Listen()) as first:
        pass
    async with started(tmp_path, Listen()) as again:
        assert again.url == first.url
    with taken(int(first.url.rsplit(":", 1)[1])):
        async with started(tmp_path, Listen()) as elsewhere:
            assert elsewhere.url != first.url
            assert elsewhere.password == first.password
            bus = await Bus.connect(elsewhere, "mine")
            await bus.close()


@pytest.mark.parametrize("servers", [1, SERVERS])
async def test_a_port_that_is_taken_between_its_choice_and_the_start_is_no_fault(tmp_path: Path, servers: int):
    server = own_server(tmp_path, "mine", servers, Listen())
    chosen = server.address.url
    with taken(int(chosen.rsplit(":", 1)[1])):
        try:
            address = await server.start()
            assert address.url != chosen
            bus = await Bus.connect(BusAddress.read(tmp_path / "credentials" / "monitor.json"), "mine")
            await bus.close()
        finally:
            await server.stop()


async def test_the_port_of_the_gateways_is_theirs_before_they_listen(tmp_path: Path):
    config, holder = await held_gateway(from_settings("gateway.count=2", "gateway.port=0").config)
    assert holder is not None
    place = (config.gateway.host, config.gateway.port)
    with holder:
        assert listen_problem(*place) == f"port {place[1]} on 127.0.0.1 is taken by another program"
        with pytest.raises(
            LaunchError, match=rf"port {place[1]} on 127.0.0.1 is taken by another program; name another"
        ):
            await held_gateway(config)
        serving = [await asyncio.start_server(answer, sock=holder.dup()) for _ in range(2)]
        _, writer = await asyncio.open_connection(*place)
        writer.close()
        for one in serving:
            one.close()
        assert listen_problem(*place)  # for the next start of the gateways, though connections linger
    again, holder = await held_gateway(config)
    assert holder is not None
    with holder:
        assert again == config


async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """End a connection first: it lingers at the server."""
    writer.close()


async def test_a_run_whose_port_is_taken_is_refused_with_one_line(tmp_path: Path):
    (tmp_path / "short.toml").write_text(SHORT)
    with taken() as port:
        for name, key, more in (
            ("check", "nats.port", ()),
            ("up", "gateway.port", ("gateway.count=1", "model.create.template=x")),
        ):
            code, words = await command(
                tmp_path, name, "short.toml", *(f"--set={one}" for one in (f"{key}={port}", *more))
            )

            assert code == 1
            assert words == (
                f"--set {key}: port {port} on 127.0.0.1 is taken by another program; name another "
                "address or port (0: any free one)\n"
            )
        assert not (tmp_path / "runs").exists()

        with pytest.raises(BusUnreachable, match=rf"on port {port} did not start: .*name another place with nats.port"):
            async with started(tmp_path, Listen(port=port)):
                pass


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["nats.host=192.0.2.1"], "192.0.2.1 is no address of this machine"),
        (["nats.host=localhost"], 'found "localhost", expected an IP address of this machine'),
        (["nats.port=65536"], "found 65536"),
        (["nats.port=65534", "nats.servers=3"], "three servers would listen on 65534 to 65536"),
        (["nats.port=4222", "nats.url=nats://host:4222"], "nats.port is for a server started here"),
        (["nats.host=0.0.0.0", "nats.url=nats://host:4222"], "nats.host is for a server started here"),
    ],
)
def test_a_place_that_cannot_be_is_refused_at_its_setting(overrides: list[str], message: str):
    problem = the_problem("demo", *overrides, files=True)

    assert problem.key == f"--set {overrides[0].partition('=')[0]}"
    assert message in problem.message


def test_a_server_that_other_machines_reach_is_hinted_at():
    (hint,) = hints(from_settings("nats.host=0.0.0.0").config)

    assert "passwords and tokens travel unencrypted" in hint
    assert hints(from_settings("nats.host=127.0.0.2").config) == []


def test_a_run_that_goes_on_may_listen_elsewhere():
    config = from_settings("learner.schedule=constant").config

    moved = longer(config, ["nats.port=4222", "nats.host=0.0.0.0", "learner.steps=200"])

    assert (moved.nats.port, moved.nats.host, moved.learner.steps) == (4222, "0.0.0.0", 200)
    with pytest.raises(LaunchError, match=r"nats\.servers=3: a resumed run keeps its settings"):
        longer(config, ["nats.servers=3"])
    with pytest.raises(ConfigError, match=r"learner\.step: unknown setting; did you mean learner\.steps\?"):
        longer(config, ["learner.step=3"])


def test_an_address_that_this_machine_has_no_more_ends_the_search_for_a_port(tmp_path: Path):
    own_address(tmp_path / "nats.json", Listen()).save(tmp_path / "nats.json")
    for search in (lambda: free_port("192.0.2.1"), lambda: own_address(tmp_path / "nats.json", Listen("192.0.2.1"))):
        with pytest.raises(AsyncRLError, match=r"192\.0\.2\.1 is no address of this machine; name another address"):
            search()


@pytest.mark.parametrize(
    "url", ["http://localhost:80/", "http://LOCALHOST.", "http://[::1]", "http://{name}:80", "http://0.0.0.0"]
)
def test_a_server_of_this_machine_is_the_same_however_its_address_is_written(url: str):
    assert places_of(url.format(name=socket.gethostname())) == places_of("http://127.0.0.1:80")


def test_servers_behind_one_proxy_are_told_apart_by_their_names(monkeypatch: pytest.MonkeyPatch):
    at = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 443))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: at)

    assert not places_of("https://one.example") & places_of("https://two.example")
    assert places_of("https://One.example/") == places_of("https://one.example.:443")
    assert places_of("http://one.example") == places_of("http://two.example:80")  # names of one machine


def test_servers_at_other_addresses_ports_and_paths_are_others():
    urls = ["http://127.0.0.1:80", "http://10.1.2.3:80", "https://10.1.2.3", "http://10.1.2.3/a", "http://a.invalid"]
    assert len({place for url in urls for place in places_of(url)}) == len(urls)


async def test_a_server_listens_for_browsers_on_loopback_and_keeps_the_port(tmp_path: Path):
    async with started(tmp_path, Listen()) as monitor:
        first = monitor.websocket
        assert first.startswith("ws://127.0.0.1:")
        assert await upgraded(first)
    async with started(tmp_path, Listen()) as monitor:
        assert monitor.websocket == first


async def test_a_server_moves_its_websocket_if_another_program_has_the_port(tmp_path: Path):
    async with started(tmp_path, Listen()) as monitor:
        first, url = monitor.websocket, monitor.url
    with socket.create_server(("127.0.0.1", int(first.rsplit(":", 1)[1]))):
        async with started(tmp_path, Listen()) as monitor:
            assert monitor.url == url
            assert monitor.websocket != first
            assert await upgraded(monitor.websocket)


async def test_each_server_of_a_cluster_listens_for_browsers(tmp_path: Path):
    async with started(tmp_path, Listen(), SERVERS) as monitor:
        urls = monitor.websocket.split(",")
        assert len(urls) == SERVERS
        assert all([await upgraded(url) for url in urls])


async def test_a_server_does_not_listen_for_browsers_if_it_shall_not(tmp_path: Path):
    async with started(tmp_path, Listen(), websocket=False) as monitor:
        assert monitor.websocket == ""
    assert "websocket" not in (tmp_path / "nats.conf").read_text()


async def upgraded(url: str) -> bool:
    """Return whether a server answers as websockets begin."""
    async with ClientSession() as session, session.ws_connect(url) as connection:
        return (await connection.receive_bytes(timeout=60)).startswith(b"INFO")
