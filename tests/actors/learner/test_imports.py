"""What the process of a learner loads beside its ranks, which compute."""

import subprocess
import sys


def test_it_loads_no_torch():
    # That would take two seconds of each start, and 180 MB also where it only stands by.
    code = "import actors.learner.actor, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
