"""Process of `sglang-router`: `python -m asyncrl.engine.router_process KEY_FILE ARGUMENTS`.

Its key comes by a file: every account of a machine may read a command line.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Run the router until it is ended."""
    launcher = import_module("sglang_router.launch_router")  # has no types
    key_file, *arguments = sys.argv[1:]
    settings = launcher.parse_router_args(arguments)
    settings.api_key = Path(key_file).read_text()
    launcher.launch_router(settings)


if __name__ == "__main__":
    main()
