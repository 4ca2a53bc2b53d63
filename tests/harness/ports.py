"""Ports that a test names before somebody listens there: nothing else on this machine chooses them meanwhile."""

import itertools
import os
import secrets

from asyncrl.ports import LOOPBACK, listen_problem

# Below those that runs, servers and Ray choose among. Each process of pytest has a part of its own, and gives none
# twice before it has given all.
_FIRST, _PART, _PARTS = 7000, 180, 16
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _PARTS
_ONE_AFTER_ANOTHER = itertools.count(secrets.randbelow(_PART))  # other runs of the tests begin elsewhere


def own_port() -> int:
    """A port for a server that the test starts later, or that the test wants nobody to listen on."""
    while listen_problem(LOOPBACK, port := _FIRST + _WORKER * _PART + next(_ONE_AFTER_ANOTHER) % _PART):
        pass
    return port
