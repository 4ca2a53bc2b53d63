"""Addresses and ports of this machine for the servers that a run starts."""

from __future__ import annotations

import errno
import ipaddress
import secrets
import socket
from typing import NamedTuple
from urllib.parse import urlsplit

from asyncrl.errors import AsyncRLError

LOOPBACK = "127.0.0.1"
_PORTS = range(20000, 32000)


class Listen(NamedTuple):
    """The address that servers listen on for clients."""

    host: str = LOOPBACK  # IP address
    port: int = 0  # of the first of several; 0 for the previous one if it is free, otherwise any free one


ANY_PORT = Listen()
"""On loopback, unless another address is wanted."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an IP address."""
    return ipaddress.ip_address(host).is_loopback


def is_ip(host: str) -> bool:
    """Return whether it is written as an IP address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _of_this_machine(addresses: set[str]) -> set[str]:
    import psutil  # actors ask for no addresses, and start sooner without it

    own = {one.address for interface in psutil.net_if_addrs().values() for one in interface}
    return {one for one in addresses if one in own or is_loopback(one)}


def places_of(url: str, *, look_up: bool = True) -> set[tuple[str, int, str]]:
    """Return IP addresses, those of this machine as one, port and path of a URL: the same for each way to write it.

    A name that cannot be resolved here keeps its spelling, and so does one of another machine with https: a proxy has
    one address for many servers, which it distinguishes by the name in the certificate.

    Args:
        url: whose host is an IP address, or a name.
        look_up: whether names are resolved; otherwise all names except `localhost` keep their spelling.
    """
    parts = urlsplit(url)
    host, path = (parts.hostname or "").rstrip("."), parts.path.rstrip("/")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if not look_up and not is_ip(host) and host != "localhost":
        return {(host, port, path)}
    try:
        found = {_plain(str(info[4][0])) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except OSError:
        return {(host, port, path)}
    own = _of_this_machine(found)
    if parts.scheme == "https" and not is_ip(host) and not own:
        return {(host, port, path)}
    here = own | {one for one in found if ipaddress.ip_address(one).is_unspecified}
    return {(LOOPBACK if one in here else one, port, path) for one in found}


def _plain(address: str) -> str:
    """Return the IPv4 address that an IPv6 address maps: `::ffff:10.0.0.5` reaches the server at `10.0.0.5`."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    return str(ip.ipv4_mapped) if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped else address


def url_host(host: str) -> str:
    """Return an IP address as a URL takes it."""
    return f"[{host}]" if ":" in host else host


def listen_problem(host: str, port: int) -> str:
    """Return the reason why no server can listen there, or ""."""
    fault = _listen_fault(host, port)
    if fault is None:
        return ""
    if fault.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is taken by another program"
    if fault.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return f"{host} is no address of this machine"
    return f"port {port} on {host} cannot be listened on: {fault.strerror}"


def _listen_fault(host: str, port: int) -> OSError | None:
    try:
        with socket.socket(_family(host)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: connections may linger
            probe.bind((host, port))
            probe.listen()
    except OSError as error:
        return error
    return None


def hold_port(host: str, port: int) -> socket.socket:
    """Take a port: other programs find it taken, though nothing listens there.

    Args:
        port: 0 for any free one below the ephemeral range.

    Raises:
        OSError: another program has it, or the host is no address of this machine.
    """
    while True:
        holder = socket.socket(_family(host))
        try:
            _bind_alone(holder, host, port or secrets.choice(_PORTS))
            return holder
        except OSError as error:
            holder.close()
            if port or error.errno != errno.EADDRINUSE:
                raise


def _bind_alone(holder: socket.socket, host: str, port: int) -> None:
    try:
        holder.bind((host, port))
    except OSError:
        if listen_problem(host, port):
            raise
        # Only connections of a server that is gone linger. The flags let it bind next to them; the flag that would let
        # others bind next to it is reset.
        options = (socket.SO_REUSEPORT, socket.SO_REUSEADDR)
        for option in options:
            holder.setsockopt(socket.SOL_SOCKET, option, 1)
        holder.bind((host, port))
        for option in options:
            holder.setsockopt(socket.SOL_SOCKET, option, 0)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def free_port(host: str = LOOPBACK) -> int:
    """A free port below the ephemeral range: a restarted server finds it free again.

    Raises:
        AsyncRLError: this machine can listen on none there.
    """
    while fault := _listen_fault(host, port := secrets.choice(_PORTS)):
        if fault.errno != errno.EADDRINUSE:
            raise AsyncRLError(f"{listen_problem(host, port)}; name another address") from fault
    return port
