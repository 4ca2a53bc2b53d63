"""Ports that no other process chooses: one that is free when a test chooses it is free when its server listens."""

import itertools
import socket
from collections.abc import Sequence

from asyncrl import ports

_FIRST, _EACH, _RANGES = 10_000, 250, 40  # below those that programs under test choose from


class _InTurn(Sequence[int]):
    """Gives the ports of a range one after another: none is given twice before all others were."""

    def __init__(self, numbers: range) -> None:
        self._numbers = itertools.cycle(numbers)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _index: object) -> int:
        return next(self._numbers)


def take_own_ports() -> socket.socket | None:
    """Have `free_port` of this process choose from a range of its own, for as long as the returned socket is held.

    Every process that runs tests on this machine holds the name of its range. Where all are held, nothing changes.
    """
    for number in range(_RANGES):
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0asyncrl tests, ports {number}")
        except OSError:
            holder.close()
            continue
        first = _FIRST + number * _EACH
        ports._PORTS = _InTurn(range(first, first + _EACH))
        return holder
    return None
