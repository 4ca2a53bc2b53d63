"""Programs of tests, forked from a process that has imported torch: importing it takes seconds of each.

`python -m harness.ranks PARENT` reads an order a line, and answers each with the exit codes of its ranks.
"""

import asyncio
import contextlib
import gc
import importlib
import json
import os
import runpy
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path

from asyncrl import crash
from asyncrl.process import die_with, log_tail
from asyncrl.run.placement import LocalProcesses

ROOT = Path(__file__).parents[2]


def run_ranks(script, ranks, *arguments):
    """Return what rank 0 of a group prints: each process runs the script with its rank, their number and these."""
    return run_group(["-c", script], ranks, ranks, *arguments)


def run_group(program, ranks, *arguments, deadline_s=300):
    """Return what rank 0 of a group prints: each process runs python's program with its rank and these."""
    with tempfile.TemporaryDirectory() as folder:
        prints = [Path(folder, f"rank{rank}") for rank in range(ranks)]
        order = {
            "program": program,
            "arguments": [[str(rank), *map(str, arguments)] for rank in range(ranks)],
            "folder": str(ROOT),
            "prints": [[str(path), f"{path}.error"] for path in prints],
        }
        codes = _ask(order, deadline_s)
        said = [path.read_text() for path in prints if path.exists()]
        errors = [path.read_text() for path in Path(folder).glob("*.error")]
    assert codes == [0] * ranks, f"exit codes {codes} of {program[:1]}: " + "\n".join(errors)
    return said[0]


async def run_command(folder, *words, deadline_s=300):
    """Return the exit code of `asyncrl WORDS` in a folder, and all it said; None where it did not end in time."""
    _server()  # which would end with another thread that started it
    with tempfile.TemporaryDirectory() as place:
        said = Path(place, "said")
        order = {
            "program": ["-m", "asyncrl.cli.main"],
            "arguments": [words],
            "folder": str(folder),
            "prints": [[str(said), str(said)]],
        }
        (code,) = await asyncio.to_thread(_ask, order, deadline_s) or [None]
        return code, said.read_text() if said.exists() else ""


class ForkedRanks(LocalProcesses):
    """A placement whose ranks are forked; other processes are started as ever."""

    async def start(self, job):
        """See `Placement`."""
        if job.module != "actors.learner.rank_process":
            return await super().start(job)
        return await self.forked(job, ["-m", job.module])

    async def forked(self, job, program):
        """Fork a rank that runs python's program."""
        server = _server()  # see `run_command`
        log = self.log(job.name)
        told = log.with_name(f"{secrets.token_hex(4)}.code")
        order = {
            "program": program,
            "arguments": [[*job.words, "--credentials", str(job.credentials)]],
            "folder": os.getcwd(),
            "prints": [[str(log), str(log)]],
            "environment": {**os.environ, **job.environment},
            "told": str(told),
        }
        logged = log.stat().st_size if log.exists() else 0
        (pid,) = await asyncio.to_thread(_ask, order, 300)
        return ForkedRank(pid, server, told, log, logged)


def with_forked_ranks(context):
    """Return the context of a learner; its ranks are forked from now on."""
    context.placement = ForkedRanks(context.files.logs)
    return context


class ForkedRank:
    """See `Placed`: a rank whose parent is another process, which ends with the server and tells its end in a file."""

    def __init__(self, pid, server, told, log, logged):
        self.pid = pid
        self.returncode = None
        self._log, self._logged = log, logged
        self._ending = asyncio.create_task(self._ended(server, told))

    async def _ended(self, server, told):
        while not told.exists() and server.poll() is None:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.02)
        self.returncode = int(told.read_text()) if told.exists() else -signal.SIGKILL

    @property
    def end_text(self):
        """See `Placed`."""
        said = f": {log_tail(self._log, self._logged)}" if self.returncode >= 0 else ""
        return f"exit code {self.returncode}{said}"

    async def wait(self):
        """See `Placed`."""
        await asyncio.shield(self._ending)
        return self.returncode

    def terminate(self):
        """See `Placed`."""
        self._signal(signal.SIGTERM)

    def kill(self):
        """See `Placed`."""
        self._signal(signal.SIGKILL)

    def _signal(self, number):
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)


def _ask(order, deadline_s):
    """Let the server run a group; returns the exit codes, none where it did not end in time."""
    server = _server()
    server.stdin.write(json.dumps(order) + "\n")
    server.stdin.flush()
    if select.select([server.stdout], [], [], deadline_s)[0]:
        return json.loads(server.stdout.readline() or "[]")
    server.kill()  # and with it the ranks
    server.wait()
    _server.cache_clear()
    return []


@cache
def _server():
    """The process that forks the ranks, which ends with this one."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    # The loopback: whatever the machine's own name resolves to, the ranks find one another.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [sys.executable, "-m", "harness.ranks", str(os.getpid())],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


# --- in the server


def serve():
    """Run groups until nobody can order one any more."""
    import actors.learner.rank  # noqa: F401 - as the next one
    import asyncrl.training.torch_trainer  # noqa: F401 - what takes most of a rank's start

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(placed(order) if "told" in order else played(order)), flush=True)


def placed(order):
    """Fork a process that forks a rank, and tells its exit code in a file; returns the rank's process id."""
    parent, (reads, writes) = os.getpid(), os.pipe()
    if os.fork():
        os.close(writes)
        with os.fdopen(reads) as numbers:
            return [int(numbers.readline())]
    die_with(parent)
    pid = forked(order, 0)
    os.write(writes, f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    written = Path(f"{order['told']}.new")
    written.write_text(str(code))
    written.rename(order["told"])
    os._exit(0)


def played(order):
    """Fork the ranks of a group and return their exit codes; the first that fails ends the others."""
    kind, what = order["program"]
    if kind == "-m":
        importlib.import_module(what)  # all that it needs is there: half of the start of a rank of Megatron
        gc.freeze()
    ranks = range(len(order["prints"]))
    pids = {forked(order, rank): rank for rank in ranks}
    codes = {}
    while len(codes) < len(pids):
        pid, status = os.wait()
        if pid not in pids:
            continue  # it had waited for a rank that was placed
        codes[pids[pid]] = os.waitstatus_to_exitcode(status)
        if codes[pids[pid]] != 0:
            for other in pids.keys() - {pid}:
                if pids[other] not in codes:
                    os.kill(other, signal.SIGKILL)
    return [codes[rank] for rank in ranks]


def forked(order, rank):
    """Fork a rank; returns its process id."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with(parent)
        os.environ.update(order.get("environment", {}))
        crash._folder = os.environ.get(crash.CRASH_FOLDER, "")  # which it has read when it was imported
        os.chdir(order["folder"])
        out, error = order["prints"][rank]
        written = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, out, written), (2, error, written)):
            os.dup2(os.open(path, flags), number)
        gc.enable()
        run(order["program"], order["arguments"][rank])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run(program, arguments):
    """Run `-c SCRIPT` or `-m MODULE` as python does."""
    kind, what = program
    sys.argv = [kind, *arguments]
    if kind == "-m":
        sys.modules.pop(what, None)  # which `played` imported: it is run anew, as the main module
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<rank>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    serve()
