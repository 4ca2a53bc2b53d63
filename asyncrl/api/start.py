"""Starting a run in the background."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from asyncrl.api.overrides import as_words, toml_document
from asyncrl.api.run import Run, attach
from asyncrl.errors import LaunchError
from asyncrl.process import python


def up(
    config: str | PathLike[str] | Mapping[str, Any] = "demo",
    overrides: Mapping[str, Any] | Sequence[str] = (),
    *,
    resume: str = "",
) -> Run:
    """Start a run on this machine as `asyncrl up --detach` does, and return once it has started.

    The run continues after this program ends. `Run.stop` stops it.

    Args:
        config: a TOML file, the name of a shipped config, or the settings as nested dictionaries.
        overrides: values by dotted key, such as `{"learner.steps": 50}`, or texts `learner.steps=50`.
        resume: id or directory of a stopped or crashed run to continue, instead of a config.

    Raises:
        LaunchError: every problem of the config, or why the run did not start.
    """
    words, document = ["--resume", resume] if resume else [str(config)], ""
    if not resume and isinstance(config, Mapping):
        words, document = ["-"], toml_document(config)
    words += [word for override in as_words(overrides) for word in ("--set", override)]
    last = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as faults:
        command = python("-m", "asyncrl.cli.main", "up", *words, "--detach", "--json")
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=faults, text=True
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(document)
            process.stdin.close()
            for line in process.stdout:  # hints, and the progress of a download
                if last:
                    print(last, end="", flush=True)
                last = line
        if process.returncode:
            faults.seek(0)
            raise LaunchError(faults.read().strip() or last.strip())
    root = Path(json.loads(last)["directory"])
    return attach(root.name, root.parent)
