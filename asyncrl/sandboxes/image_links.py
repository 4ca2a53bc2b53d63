"""Makes links in an image: a script for a container of the image, whose user is root.

A folder that the image has at the path of a link is kept: workspaces begin with its files.
"""

from __future__ import annotations

import json
import os
import shutil
import sys


def _main(workspace: str, kept: str, links: str) -> None:
    """
    Args:
        kept: folder for what the image has at the paths.
        links: folders of the workspace by absolute paths, as JSON.
    """
    os.makedirs(kept)
    for path, folder in json.loads(links).items():
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.copytree(path, os.path.join(kept, folder), symlinks=True, dirs_exist_ok=True)
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(os.path.normpath(os.path.join(workspace, folder)), path)
    for folder, _, names in os.walk(kept):  # for the user of programs, who is not root
        os.chmod(folder, 0o755)
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path):
                os.chmod(path, os.stat(path).st_mode | 0o444)


if __name__ == "__main__":
    _main(*sys.argv[1:])
