"""Addresses of engines: what no client could use is refused where it is written, and one server counts once."""

import socket

import pytest

from asyncrl.engine.client import EngineClient
from asyncrl.ports import places_of
from harness.configs import from_settings, the_problem
from topics.engines import announced_name, check_address

NONE = [
    *("http://a..b:1", f"http://{'a' * 64}:1", "http://.:1", "http://:1", "http://gpu:0", "http://gpu:65536"),
    *("http://[1.2]:1", "http://[::1:1", "http://user:pw@gpu:1", "http://gpu:1/?a=1", "HTTP://gpu:1", "http://ü:1"),
    *("http://gpu:1/..", "http://gpu:1/a/../b", "http://gpu:1/./", "http://gpu:1/a b", "gpu:1", "ftp://gpu:1", ""),
]
SOME = ["http://gpu:1", "https://GPU.", "http://[::1]:65535", "http://127.0.0.1:9/v1/", "http://a_b.c-d:1/.x/..y"]
SOME += ["http://kube/api/services/http:sglang:30000/proxy", "http://hub/user/me@x.org/~/8000"]


def external(*addresses: str) -> list[str]:
    return ['engine.kind="external"', f"engine.addresses={[*addresses]}"]


@pytest.mark.parametrize("address", NONE)
def test_what_is_no_address_of_an_engine_is_refused_by_check_and_when_it_is_announced(address: str):
    problem = the_problem("demo", *external(address))

    assert ("engine.addresses" in problem.key, problem.message) == (
        True,
        f'found "{address}", expected http://host:port, without a login',
    )
    for refuse in (check_address, announced_name):
        with pytest.raises(ValueError, match="is no address of an engine; expected http://host:port"):
            refuse(address)


async def test_whatever_is_an_address_of_an_engine_is_one_for_its_clients(monkeypatch: pytest.MonkeyPatch):
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror("no name is known here")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    from_settings(*external(*SOME))
    for address in [*SOME, f"http://{'a.' * 60}b.invalid:1"]:
        check_address(address)
        client = EngineClient(address)
        assert not await client.health()
        await client.close()


@pytest.mark.parametrize(
    "other",
    ["http://localhost:80/", "http://127.0.0.1", "http://[::1]:80", "http://LOCALHOST.", "http://[::ffff:127.0.0.1]"],
)
def test_a_server_that_a_config_names_twice_is_found_however_its_address_is_spelled(other: str):
    problem = the_problem("demo", *external("http://127.0.0.1:80", other))

    assert "found more than once, expected each server once" in problem.message
    assert other in problem.message


def test_names_of_servers_in_a_config_are_not_looked_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.getaddrinfo", None)
    from_settings(*external("http://one.example:1", "http://two.example:1", "http://one.example:2"))
    assert "found more than once" in the_problem("demo", *external("http://gpu:1", "http://GPU.:1/")).message


def test_an_ipv4_address_is_the_same_in_the_form_of_ipv6():
    assert places_of("http://[::ffff:10.1.2.3]:80") == places_of("http://10.1.2.3")
    assert places_of("http://[::ffff:127.0.0.1]:80") == places_of("http://localhost")
