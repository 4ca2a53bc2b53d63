"""A machine that cannot start a sandbox is told why, before the run starts."""

import os
import shutil
import subprocess
import sys

import pytest

from asyncrl.config.sandbox_settings import SandboxSettings, sandbox_kind
from harness.sandboxes import settings_of, skeleton

PROBLEM = """
from asyncrl.config.sandbox_settings import SandboxSettings, sandbox_kind
print(sandbox_kind("bubblewrap").problem(SandboxSettings()))
"""


def test_a_kernel_without_user_namespaces_is_named():
    if shutil.which("bwrap") is None or shutil.which("unshare") is None:
        pytest.skip("there is no program bwrap or unshare")
    off = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", off, "sh", sys.executable, "-c", PROBLEM]

    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    if "unshare" in done.stderr:
        pytest.skip(f"this machine has no user namespaces: {done.stderr}")
    assert done.stdout.startswith("bubblewrap does not start: "), done
    assert "namespace" in done.stdout.lower() or "setpriv" in done.stdout


def test_docker_without_a_daemon_is_named(monkeypatch):
    if shutil.which("docker") is None:
        pytest.skip("there is no program docker")
    monkeypatch.setenv("DOCKER_HOST", "unix:///no/such/socket")

    assert "docker does not work: " in sandbox_kind("docker").problem(SandboxSettings(kind="docker", image="absent:1"))


def test_an_image_that_is_not_on_the_machine_is_named_with_the_command_that_gets_it():
    if shutil.which("podman") is None:
        pytest.skip("there is no program podman")

    problem = sandbox_kind("podman").problem(SandboxSettings(kind="podman", image="absent:1"))

    assert problem == 'the image "absent:1" is not on this machine; run: podman pull absent:1'


def test_an_image_without_python_and_a_config_without_image_are_named():
    settings = settings_of("podman")
    bare = SandboxSettings(kind="podman", image=settings.image)

    assert "does not start Python: " in sandbox_kind("podman").problem(bare)
    [finding] = sandbox_kind("podman").checks(SandboxSettings(kind="podman"))
    assert "needs an image" in finding.message


def test_containers_of_killed_workers_are_removed():
    settings_of("podman")
    name = "asyncrl-sandbox-{}-4000000-1-0"
    mine, other = name.format(namespace()), name.format(1)
    for one in (mine, other):
        command = ["podman", "create", "--label", "asyncrl.sandbox", "--name", one, skeleton("podman"), "true"]
        subprocess.run(command, check=True, capture_output=True)
    try:
        assert sandbox_kind("podman").end_leftovers() == [mine]
    finally:
        subprocess.run(["podman", "rm", "--force", "--ignore", mine, other], check=True, capture_output=True)


def namespace() -> str:
    return "".join(filter(str.isdigit, os.readlink("/proc/self/ns/pid")))
