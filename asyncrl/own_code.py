"""A run's copies of the user's code: each process of the run loads the copy of a file, not the file.

A loaded module keeps the path of the original as `__file__`, so that it finds the data files next to it.
"""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
from collections.abc import Sequence
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

import msgspec

from asyncrl.errors import UNREADABLE, DamagedFile

INPUTS = "inputs.json"  # file of a run directory
CODE = "code"  # folder of a run directory that holds the copies
_RUN = "ASYNCRL_RUN_DIRECTORY"  # environment variable: tells child processes whose copies count


class InputFile(msgspec.Struct, frozen=True):
    """A file that a run reads, as it was when the run began."""

    path: str  # absolute, without symbolic links
    digest: str  # xxh3_64, hex
    bytes: int
    copy: str = ""  # of code: path of the copy below the folder `CODE`


class Inputs(msgspec.Struct):
    """The content of `inputs.json`."""

    base: str  # folder that relative paths of the config start from, without symbolic links
    code: list[InputFile] = []
    data: list[InputFile] = []
    names: dict[str, str] = {}  # path of a file by its absolute path in the config, which may have symbolic links

    @property
    def digests(self) -> dict[str, str]:
        """Digest of each file by its path."""
        return {file.path: file.digest for file in (*self.code, *self.data)}


class _Copies:
    """The copies that this process knows."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}  # copies by the path of the original
        self.names: dict[str, str] = {}
        self.bases: dict[str, str] = {}  # base on the machine of the run, by its path on this host
        self.folders: list[str] = []  # from which loaded files import their neighbours

    def original(self, path: str) -> str:
        """Return the path of a file on the machine of the run."""
        path = os.path.normpath(path)
        for here, base in self.bases.items():
            if path.startswith(here + os.sep):
                path = base + path[len(here) :]
        return self.names.get(path, path)

    def of(self, path: str | Path) -> Path | None:
        return self.files.get(self.original(str(path)))


_copies = _Copies()


def read_inputs(root: Path) -> Inputs | None:
    """Return the inputs that a run directory describes; None for a run that has no such file.

    Raises:
        DamagedFile: the file cannot be read.
    """
    path = root / INPUTS
    try:
        return msgspec.json.decode(path.read_bytes(), type=Inputs)
    except FileNotFoundError:
        return None
    except UNREADABLE as error:
        raise DamagedFile(f"{path} does not describe the inputs of a run: {error}") from error


def use_copies(root: Path) -> None:
    """Load the user's files from the copies of a run, in this process and in its child processes.

    Args:
        root: run directory, or the folder of a host that was sent the copies.

    Raises:
        DamagedFile: as `read_inputs`.
    """
    inputs = read_inputs(root)
    if inputs is None:
        return
    root = root.absolute()  # user code may change the folder of the process
    os.environ[_RUN] = str(root)
    _copies.files.update({file.path: root / CODE / file.copy for file in inputs.code})
    _copies.names.update(inputs.names)
    _copies.bases[str(root / "base")] = inputs.base
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        place = next((number for number, finder in enumerate(sys.meta_path) if finder is PathFinder), 0)
        sys.meta_path.insert(place, _Finder())


@cache
def _inherit() -> None:
    if root := os.environ.get(_RUN):
        use_copies(Path(root))


def copy_of(path: Path) -> Path | None:
    """Return the run's copy of a user's file; None without a copy."""
    _inherit()
    return _copies.of(path)


def spec_of(name: str, path: Path, copy: Path | None) -> ModuleSpec | None:
    """Return how to import a file: from its copy, if there is one. The modules next to it are then copies, too."""
    if copy is None:
        return importlib.util.spec_from_file_location(name, path)
    if str(path.parent) not in _copies.folders:
        _copies.folders.append(str(path.parent))
    return _spec(name, str(path), copy)


def _spec(name: str, path: str, copy: Path) -> ModuleSpec | None:
    folders = [os.path.dirname(path)] if os.path.basename(path) == "__init__.py" else None
    loader = _CopyLoader(name, path, copy)
    return importlib.util.spec_from_file_location(name, path, loader=loader, submodule_search_locations=folders)


class _CopyLoader(SourceFileLoader):
    """Runs the copy of a file as that file."""

    def __init__(self, name: str, path: str, copy: Path) -> None:
        super().__init__(name, path)
        self._copy = copy

    def get_data(self, path: str) -> bytes:
        return self._copy.read_bytes() if path == self.path else super().get_data(path)

    def get_code(self, _name: str) -> CodeType:  # without the cache of compiled files, which has other versions
        source = self.get_data(self.path)
        lines = importlib.util.decode_source(source).splitlines(keepends=True)
        linecache.cache[self.path] = (len(source), None, lines, self.path)  # tracebacks show the code that runs
        code: CodeType = self.source_to_code(source, self.path)
        return code


class _Finder:
    """Finds the copies of local modules that user files import, unless an installed package has the name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        last = name.rpartition(".")[2]
        for folder in _copies.folders if path is None else path:
            place = os.path.join(folder, last)
            found = [(file, copy) for file in (f"{place}/__init__.py", f"{place}.py") if (copy := _copies.of(file))]
            prefix = _copies.original(place) + os.sep
            if (found or any(file.startswith(prefix) for file in _copies.files)) and not _is_elsewhere(name, path):
                return _spec(name, *found[0]) if found else _namespace(name, place)
        return None


def _is_elsewhere(name: str, path: Sequence[str] | None) -> bool:
    """Return whether a package of this name comes before the modules next to user files."""
    others = [entry for entry in sys.path if entry not in _copies.folders]
    return path is None and PathFinder.find_spec(name, others) is not None


def _namespace(name: str, folder: str) -> ModuleSpec:
    spec = ModuleSpec(name, None, is_package=True)
    spec.submodule_search_locations = [folder]
    return spec
