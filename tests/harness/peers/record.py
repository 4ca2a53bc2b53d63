"""Runs the functions of peers on the batch of inputs.py and prints what they gave, for tests/algorithms/peers.json.

`scripts/peers` installs them and calls this with the folder.
"""

import importlib
import importlib.metadata
import json
import sys

from harness.peers import inputs, stand_ins

PEERS = ("verl", "areal", "skyrl", "openrlhf", "trl")


def recorded(folder: str) -> dict:
    """Versions of the peers in a folder, the batch, and what they gave, by peer and case."""
    sys.path.insert(1, folder)
    stand_ins.install()
    made = inputs.batch()
    found = {peer: importlib.import_module(f"harness.peers.of_{peer}").cases(made) for peer in PEERS}
    return {
        "versions": {peer: importlib.metadata.version(peer) for peer in PEERS},
        "batch": {name: value.tolist() for name, value in made.items()},
        "cases": found,
    }


if __name__ == "__main__":
    print(json.dumps(recorded(sys.argv[1])))
