"""What SGLang 0.5.17 asks of a machine with a GPU, for one without.

A stand-in for torchvision, whose usual build needs CUDA libraries: every attribute of it is an empty class. And memory
that is not page-locked, where its adapters ask torch for page-locked memory, which needs a GPU.
"""

import functools
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
        if name == "sglang.srt.lora":
            _leave_unlocked()
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Package(spec.name)

    def exec_module(self, module):
        return None


def _leave_unlocked():
    import torch

    def without(make):
        @functools.wraps(make)
        def made(*arguments, pin_memory=False, **options):
            return make(*arguments, **options)

        return made

    for name in ("tensor", "empty", "zeros", "full", "arange"):
        setattr(torch, name, without(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


sys.meta_path.insert(0, _Finder())
