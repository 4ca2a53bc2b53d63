"""Ranks of tests that are no actors, forked from a process that has imported torch: importing it takes seconds of each.

`python -m harness.ranks PARENT` reads an order a line, and answers each with the exit codes of its ranks.
"""

import gc
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import cache
from pathlib import Path

from asyncrl.process import die_with

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
    import asyncrl.training.torch.trainer  # noqa: F401 - what takes most of a rank's start

    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(json.dumps(played(json.loads(line))), flush=True)


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
