"""Starts a container, and gives its first process the socket of the worker: a script for the machine of the worker.

Standard input is that socket. The command lines of containers pass no open files on, so the first process of the
container fetches the socket through a named one. It ends when the connection to this process ends.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys

_CONTROL = 0


def _main(path: str, *command: str) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(path)
        os.chmod(path, 0o777)  # the user of the container is another one; the name of the folder is no secret, this is
        listening.listen(1)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        ended = os.pidfd_open(process.pid)
        ready, _, _ = select.select([listening.fileno(), ended], [], [])
        connection = listening.accept()[0] if listening.fileno() in ready else None
    os.unlink(path)
    os.rmdir(os.path.dirname(path))
    if connection is not None:
        socket.send_fds(connection, [b"control"], [_CONTROL])
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), _CONTROL)  # the worker learns of the end of the container
    return process.wait()


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
