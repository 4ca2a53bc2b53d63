"""The kind `podman`: a container, also of a user without rights and without a daemon."""

from __future__ import annotations

from asyncrl.sandboxes.containers import Containers

KIND = Containers(
    "podman",
    *("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--read-only-tmpfs=false"),
    weak=("{{.Host.Security.Rootless}} {{.Host.CgroupsVersion}}", "true v1"),
)
