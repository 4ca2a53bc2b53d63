"""Stand-ins for packages that the peers' modules import at their head, and that no function compared here uses.

verl, AReaL and the others import Ray, HTTP servers, loggers and GPU kernels on the way to their formulas. Without a
stand-in each would have to be installed, several gigabytes in all.
"""

import importlib.abc
import importlib.machinery
import sys
import types
import typing

import typing_extensions

ABSENT = {
    *("aiofiles", "codetiming", "datasets", "deepspeed", "einops", "fastapi", "flash_attn", "flask", "httpx", "hydra"),
    *("lark", "numba", "openai", "pandas", "pybase64", "pylatexenc", "ray", "requests", "skyrl_gym", "swanlab"),
    *(
        "tenacity",
        "tensorboardX",
        "torch_memory_saver",
        "torchdata",
        "trackio",
        "urllib3",
        "uvicorn",
        "wandb",
        "werkzeug",
    ),
}


class Anything:
    """A value that may be called, read, subscripted, decorated with and derived from; nothing comes of it."""

    def __init__(self, *args, **options):
        pass

    def __call__(self, *args, **options):
        return Anything()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key):
        return Anything()

    def __iter__(self):
        return iter(())

    def __contains__(self, value):
        return False

    def __lt__(self, other):
        return False

    def __or__(self, other):
        return typing.Any

    __ror__ = __or__

    def __mro_entries__(self, bases):
        return (object,)


class Empty(types.ModuleType):
    """A module with any name in it."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages of `ABSENT` after all others have failed to."""

    def find_spec(self, fullname, path=None, target=None):
        known = fullname.split(".")[0] in ABSENT
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if known else None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


def install() -> None:
    """Let this process import the peers."""
    sys.meta_path.append(StandIns())
    typing.TypedDict = typing_extensions.TypedDict  # which pydantic asks for before Python 3.12
