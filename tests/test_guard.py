"""A server that starts processes which nobody could find when it is gone: its guard does, whoever dies first."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from asyncrl.config.engine_settings import EngineGroup, EngineSettings
from asyncrl.engine.control import ServerSpec
from asyncrl.engine.sglang.control import SGLangControl
from asyncrl.guard import guarded_python
from asyncrl.process import ChildProcess, state_of
from harness.stage import DEADLINE_S, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has subreapers")

SERVER = """
import json, os, subprocess, sys, time
from pathlib import Path

lost = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
# It has a session of its own and none of the variables, and its parent has gone.
start = f"import subprocess; subprocess.Popen({lost!r}, env={{}}, start_new_session=True)"
done = subprocess.run([sys.executable, "-c", start], stdout=(pipe := os.pipe())[1])
pids = {"server": os.getpid(), "lost": int(os.read(pipe[0], 99))}
Path(sys.argv[1] + ".new").write_text(json.dumps(pids))
Path(sys.argv[1] + ".new").rename(sys.argv[1])
time.sleep(600)
"""
OWNER = """
import asyncio, sys
from asyncrl.guard import guarded_python
from asyncrl.process import ChildProcess

async def main():
    await ChildProcess.start(guarded_python(*sys.argv[1:]), apart=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


class Server(SGLangControl):
    """Another program in the place of SGLang."""

    note: Path

    def arguments(self) -> list[str]:
        return ["-c", SERVER, str(self.note)]

    async def health(self) -> bool:
        return self.note.exists()


def gone(*pids: int) -> bool:
    return all(state_of(pid) == "gone" for pid in pids)


@pytest.fixture
async def note(tmp_path: Path) -> AsyncIterator[Path]:
    """The file in which the server leaves its processes; they are ended behind the test."""
    yield tmp_path / "pids"
    if (tmp_path / "pids").exists():
        for pid in json.loads((tmp_path / "pids").read_text()).values():
            if not gone(pid):
                os.kill(pid, signal.SIGKILL)


async def read(note: Path) -> dict[str, int]:
    await until(note.exists, "the server has started others")
    return json.loads(note.read_text())


@pytest.mark.parametrize("waited", [False, True])
async def test_nothing_of_a_server_outlives_the_process_that_asked_for_it(note: Path, waited: bool):
    owner = await ChildProcess.start([sys.executable, "-c", OWNER, "-c", SERVER, str(note)])
    pids = await read(note)

    owner.kill()
    if waited:
        await owner.wait()  # kills what carries the variable of the owner, at once

    await until(lambda: gone(*pids.values()), "both have ended")
    await owner.wait()


def test_a_guard_needs_no_package_on_the_path_of_its_command(tmp_path: Path):
    """A server's PYTHONPATH may replace the one from which this package came."""
    command = guarded_python("-c", "import sys; sys.exit(7)")
    command.insert(1, "-S")  # without the folder of installed packages
    done = subprocess.run(command, check=False, env={}, cwd=tmp_path, capture_output=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (7, b"")


@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_nothing_outlives_the_server(note: Path, tmp_path: Path, how: str):
    settings = EngineSettings(groups={"large": EngineGroup(kind="sglang")})
    server = Server(ServerSpec("engine-large-1", settings, tmp_path, tmp_path / "log", None))
    server.note = note
    await server.start()
    pids = await read(note)
    assert not server.frozen
    os.kill(pids["server"], signal.SIGSTOP)
    await until(lambda: server.frozen, "it is seen that the server is stopped")
    os.kill(pids["server"], signal.SIGCONT)

    if how == "killed":
        os.kill(pids["server"], signal.SIGKILL)
    else:
        await server.close()

    expected = signal.SIGKILL if how == "killed" else signal.SIGTERM
    assert (await asyncio.wait_for(server.ended(), DEADLINE_S)).startswith(f"exit code {-expected}:")
    assert gone(*pids.values())
    await server.close()
