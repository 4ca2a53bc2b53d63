"""Sandboxes of E2B and Daytona, through their SDKs on fakes of the services. The SDK of Modal takes no such fake."""

import os
from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest

from asyncrl.config.load import load_config
from asyncrl.config.sandbox_settings import SandboxSettings, sandbox_kind
from asyncrl.run.preflight_harness import check_harnesses
from asyncrl.sandboxes.pool import SandboxPool
from asyncrl.sandboxes.remote import sandbox_of
from asyncrl.sandboxes.sandbox import ExecResult, FileRefused, Sandbox, SandboxError
from harness import sandbox_services
from harness.sandbox_services import Services, served
from harness.sandboxes import output_of, script

KEYS = {"e2b": {"E2B_API_KEY": "e2b_" + "0" * 40}, "daytona": {"DAYTONA_API_KEY": "key"}}
ADDRESSES = {"e2b": ("E2B_API_URL", "E2B_SANDBOX_URL"), "daytona": ("DAYTONA_API_URL",)}


@pytest.fixture
def services() -> Services:
    return Services()


@pytest.fixture(params=[*KEYS])
async def settings(
    request: pytest.FixtureRequest, services: Services, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SandboxSettings]:
    kind = request.param
    if find_spec(kind) is None:
        pytest.skip(f'the package {kind} is not installed: pip install "asyncrl[{kind}]"')
    async with served(getattr(sandbox_services, kind)(services)) as address:
        for name, value in (*KEYS[kind].items(), *((name, address) for name in ADDRESSES[kind])):
            monkeypatch.setenv(name, value)
        yield SandboxSettings(kind=kind, image="made", ttl_s=120.0)


@pytest.fixture
async def sandbox(settings: SandboxSettings) -> AsyncIterator[Sandbox]:
    opened = sandbox_of(settings)
    await opened.start()
    yield opened
    await opened.destroy()


async def test_a_program_gets_its_input_and_environment_and_its_streams_are_kept_apart(sandbox):
    found: dict[str, bytes] = {}

    result = await sandbox.exec(
        ["sh", "-c", 'cat; echo "$NAME" >&2; pwd | grep -c workspace; exit 3'],
        on_output=found.__setitem__,
        stdin=b"text\n",
        environment={"NAME": "a b"},
    )

    assert (result, found) == (ExecResult(3), {"stdout": b"text\n1\n", "stderr": b"a b\n"})


async def test_exit_codes_and_limits_are_those_of_other_sandboxes(sandbox):
    missing, text = await output_of(sandbox, ["no-such-program"])
    killed, _ = await script(sandbox, "kill -9 $$")
    late, _ = await script(sandbox, "sleep 60", wall_s=0.3)
    loud, printed = await output_of(sandbox, ["yes"])

    assert (missing.code, killed.code, late) == (127, -9, ExecResult(-9, "wall_s"))
    assert "no-such-program" in text
    assert (loud.limit, len(printed)) == ("output_mb", 1_000_000)


async def test_files_are_written_and_read_and_links_are_not_followed(sandbox):
    large = os.urandom(300_000)
    await sandbox.put("a/b/program", b"#!/bin/sh\necho here\n", executable=True)
    await sandbox.put("large", large)
    await script(sandbox, "ln -s /etc/passwd link; ln -s / root; mkfifo pipe; mkdir folder")

    assert await output_of(sandbox, ["a/b/program"]) == (ExecResult(0), "here\n")
    assert await sandbox.get("large", most_bytes=300_000) == large
    for path in ("link", "root/etc/passwd", "pipe", "folder", "absent", "large", "../x", "/etc/passwd"):
        with pytest.raises(FileRefused):
            await sandbox.get(path, most_bytes=1000)
    with pytest.raises(FileRefused):
        await sandbox.put("root/tmp/file", b"")
    await sandbox.put("link", b"own")
    assert await sandbox.get("link", most_bytes=10) == b"own"


async def test_a_sandbox_is_asked_for_again_has_an_owner_and_an_end_and_is_ended(settings, services):
    services.refuses = 2
    pool = SandboxPool(settings)

    async with pool.open() as sandbox:
        assert await script(sandbox, "true") == (ExecResult(0), "")

    asked = services.created[-1]
    assert "asyncrl-sandbox-" in str(asked)
    assert asked.get("timeout", asked.get("autoStopInterval")) == {"e2b": 120, "daytona": 2}[settings.kind]
    assert not services.open
    with pytest.raises(SandboxError, match="was destroyed"):
        await script(sandbox, "true")


async def test_a_service_that_gives_no_sandbox_is_a_fault_of_the_sandbox(settings, services):
    services.refuses = 100

    with pytest.raises(SandboxError, match=f"a sandbox of kind {settings.kind} does not start: "):
        await sandbox_of(settings).start()


@pytest.mark.parametrize("kind", ["daytona", "e2b", "modal"])
def test_a_missing_sdk_or_key_and_a_program_that_cannot_reach_the_policy_are_found_before_the_start(kind, monkeypatch):
    for name in ("E2B_API_KEY", "DAYTONA_API_KEY", "MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nonexistent")
    overrides = [f"sandbox.kind={kind}", "task.rollout=harness:codex"]
    config = load_config("coder", overrides=overrides)

    found = [one.message for one in check_harnesses(config.config, config.base)]
    problem = sandbox_kind(kind).problem(SandboxSettings(kind=kind))

    assert problem in found
    assert (
        f'pip install "asyncrl[{kind}]"' in problem if find_spec(kind) is None else "the environment has no" in problem
    )
    assert f"programs of sandbox.kind = {kind} cannot reach the policy; take mini or python" in found
