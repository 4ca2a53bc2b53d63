"""Finds the user's functions: `path/to/file.py:function` or `package.module:function`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import xxhash

from asyncrl.environment_names import KINDS
from asyncrl.errors import FunctionError, last_lines
from asyncrl.own_code import copy_of, spec_of

IMPORT_LIMIT_S = 60.0  # of a user's file, which may load PyTorch


FORMS = ("FILE.py:FUNCTION", "MODULE:FUNCTION")
"""How messages name a function of the user."""


def is_function(spec: str) -> bool:
    """Return whether a source or reward names a user's function, and neither a server nor an environment."""
    where, _, name = spec.rpartition(":")
    return bool(where) and name.isidentifier() and where.partition(":")[0] not in ("http", "https", *KINDS)


def load_function(spec: str, *, base: Path) -> Callable[..., Any]:
    """Import the function that `spec` names; a process of a run loads the run's copy of a file.

    A file is run once per process, however many functions are taken from it, also where another file imports it. Its
    folder joins the end of `sys.path`: its sibling modules can be imported, but shadow none of Python or of a package.

    Args:
        spec: `path/to/file.py:function` or `package.module:function`.

    Raises:
        FunctionError: names the missing function and the existing ones.
    """
    where, colon, name = spec.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise FunctionError(f"{spec!r} names no function; write path/to/file.py:function or package.module:function")
    module = load_module(where, base=base, spec=spec)
    function = getattr(module, name, None)
    if function is None:
        names = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        shown = difflib.get_close_matches(name, names, n=1) or names
        raise FunctionError(f"{spec}: {where} has no function {name!r}; it has {', '.join(shown) or 'none'}")
    if not callable(function):
        raise FunctionError(f"{spec}: {name!r} is no function but {type(function).__name__}")
    return function  # type: ignore[no-any-return]


def load_module(where: str, *, base: Path, spec: str = "") -> ModuleType:
    """Import a user's file or module, as `load_function` does.

    Args:
        spec: what errors call it, if not `where`.

    Raises:
        FunctionError: it is not there, or does not import, or not in time.
    """
    spec = spec or where
    late = "its import had reached {}; every process that uses it imports it: put slow work into a function"
    with deadline(IMPORT_LIMIT_S, lambda frame: frame.f_code.co_name == "<module>", late):
        return _load_file(base / where, spec) if where.endswith(".py") else _load_module(where, spec)


class Hangs(SystemExit):
    """A user's code has not ended in time. It passes by what catches every `Exception`."""


@contextmanager
def deadline(limit_s: float, is_of_user: Callable[[FrameType], bool], late: str) -> Iterator[Callable[[], None]]:
    """Interrupt a user's code that hangs within the block by `Hangs`; the yielded function resets the time.

    Only the main thread can be interrupted, in which commands, actors and child processes load user code; other
    threads have no limit.

    Args:
        limit_s: seconds that it may take.
        is_of_user: whether a frame is of that code; the innermost one has the line that the error names.
        late: text of the error after the seconds, with `{}` for that line.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return

    def interrupt(_signal: int, frame: FrameType | None) -> None:
        while frame is not None and not is_of_user(frame):
            frame = frame.f_back
        where = f"line {frame.f_lineno} of {frame.f_code.co_filename}" if frame is not None else "its beginning"
        raise Hangs(f"after {limit_s:g} s {late.format(where)}")

    def begin() -> None:
        # Repeatedly: an exception raised inside a callback of C, or a bare `except`, is lost.
        signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)

    before, timer = signal.signal(signal.SIGALRM, interrupt), signal.getitimer(signal.ITIMER_REAL)
    begin()
    try:
        yield begin
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # of the program that loads this


def load_plain_function(spec: str, *, base: Path, argument: str) -> Callable[..., Any]:
    """Import a function that is called and not awaited.

    Args:
        argument: its argument, for the error.

    Raises:
        FunctionError: as `load_function`, or it is async.
    """
    function = load_function(spec, base=base)
    if is_async(function):
        raise FunctionError(f"{spec}: it is an async function; write def {spec.rpartition(':')[2]}({argument})")
    return function


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether a call answers an awaitable; an object may have an async `__call__`."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def load_rollout(spec: str, *, base: Path) -> Callable[..., Any]:
    """Import the rollout function that `spec` names, as `load_function` does.

    Raises:
        FunctionError: also when it is no `async def rollout(row, context)`.
    """
    function = load_function(spec, base=base)
    if not is_async(inspect.unwrap(function)):
        raise FunctionError(f"{spec}: it is no async function; write async def {spec.rpartition(':')[2]}(row, context)")
    try:
        inspect.signature(function).bind("row", "context")
    except (TypeError, ValueError) as error:
        raise FunctionError(f"{spec}: it is called with a row and a context, and {error}") from error
    return function


def _load_file(path: Path, spec: str) -> ModuleType:
    copy = copy_of(path)
    path = path.resolve()
    if copy is None and not path.is_file():
        beside = ", ".join(sorted(file.name for file in path.parent.glob("*.py"))[:10])
        raise FunctionError(f"{spec}: no file {path}; Python files in its folder: {beside or 'none'}")
    name = f"asyncrl_user_{path.stem}_{xxhash.xxh3_64_hexdigest(str(path).encode())}"
    if name in sys.modules:
        return sys.modules[name]
    if _is_file(getattr(sys.modules.get(path.stem), "__spec__", None), path):  # a sibling file has imported it
        return sys.modules.setdefault(name, sys.modules[path.stem])
    loader = spec_of(name, path, copy)
    if loader is None or loader.loader is None:
        raise FunctionError(f"{spec}: {path} is no Python file")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    names = [name, path.stem] if _is_imported_as(path.stem, path) else [name]
    module = importlib.util.module_from_spec(loader)
    sys.modules.update(dict.fromkeys(names, module))
    try:
        loader.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # anything may happen in a user's file
        for known in names:
            del sys.modules[known]
        hidden = _hidden_module(path.parent, str(error))
        raise FunctionError(f"{spec}: {path.name} does not import{_fault(error)}{hidden}") from error
    return module


def _is_imported_as(name: str, path: Path) -> bool:
    """Return whether `import name` would run a file again, and make its classes a second time."""
    if not name.isidentifier() or name in sys.modules:
        return False
    return _is_file(importlib.util.find_spec(name), path)


def _is_file(found: ModuleSpec | None, path: Path) -> bool:
    return found is not None and found.origin is not None and Path(found.origin).resolve() == path


def _fault(error: BaseException) -> str:
    return f": {error}" if isinstance(error, Hangs) else f"\n{last_lines(error)}"


def _hidden_module(folder: Path, text: str) -> str:
    """A remark, where `text` names a module of the folder that another of the same name comes before."""
    for path in sorted([*folder.glob("*.py"), *(init.parent for init in folder.glob("*/__init__.py"))]):
        module = sys.modules.get(path.stem)
        origin = getattr(module, "__file__", None) or "Python's own"
        if module and folder not in Path(origin).parents and re.search(rf"\b{re.escape(path.stem)}\b", text):
            return f"\n`import {path.stem}` finds {origin}, not {path.name} in the folder of the file; rename it"
    return ""


def _load_module(name: str, spec: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # anything may happen in a user's module
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise FunctionError(
                f"{spec}: no module {error.name!r} among the installed packages and on PYTHONPATH; "
                "a file is named with its path and .py"
            ) from error
        raise FunctionError(f"{spec}: {name} does not import{_fault(error)}") from error
