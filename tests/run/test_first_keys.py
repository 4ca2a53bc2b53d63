"""Keys that a run makes at its start."""

from pathlib import Path

from asyncrl.bus.connection import Bus
from asyncrl.live.keys import Keys
from asyncrl.run.directory import RunFiles
from asyncrl.run.first_keys import add_first_keys
from harness.audited import messages_on
from topics.keys import KEY_ADDED
from topics.topic import ACTORS


async def test_a_tenant_of_the_config_has_one_key_in_a_private_file(bus: Bus, tmp_path: Path):
    files = RunFiles(tmp_path)
    await add_first_keys(bus, ["anna"], files)
    await add_first_keys(bus, ["anna", "ben"], files)  # the run goes on, with another tenant

    keys = Keys()
    for added in (await messages_on(bus, ACTORS)).on(KEY_ADDED):
        keys.take(added)
    assert len(keys.valid) == 2
    for tenant in ("anna", "ben"):
        path = files.keys / tenant
        assert keys.tenant({"x-api-key": path.read_text()}) == tenant
        assert path.stat().st_mode & 0o077 == 0
