"""A stand-in for torchvision, whose usual build needs CUDA libraries: every attribute of it is an empty class."""

import importlib.abc
import importlib.machinery
import sys
import types
import typing


class _Empty(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Empty(name, (), {})
        setattr(cls, name, found)
        return found


class _Package(types.ModuleType):
    __path__: typing.ClassVar[list[str]] = []
    __version__ = "0.28.0"
    __getattr__ = _Empty.__getattr__


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        return None


sys.meta_path.insert(0, _Finder())
