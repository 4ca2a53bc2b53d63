"""The kind `docker`: a container of a Docker daemon on this machine."""

from __future__ import annotations

from asyncrl.sandboxes.containers import Containers

KIND = Containers("docker")
