"""The classes of transformers that the trainer uses, imported without the compiler of torch.

transformers imports the compiler to mark functions for it, which takes as long as to import torch. Where torch knows
GPUs, the compiler is imported: only GPUs run compiled models.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])
COMPILER = "torch._dynamo"


class _Marks(ModuleType):
    """Takes the place of the compiler while functions are marked for it; any other use loads the compiler."""

    def disable(self, function: Function | None = None, _recursive: bool = True, **_options: Any) -> Any:
        return self.allow_in_graph if function is None else function

    def assume_constant_result(self, function: Function) -> Function:
        return function

    def allow_in_graph(self, function: Function) -> Function:
        return function

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of each module by `inspect`
            raise AttributeError(name)
        sys.modules.pop(COMPILER, None)
        return getattr(import_module(COMPILER), name)


@contextmanager
def _compiler_unloaded() -> Iterator[None]:
    if COMPILER in sys.modules or torch.version.cuda or torch.version.hip:
        yield
        return
    marks = sys.modules[COMPILER] = _Marks(COMPILER)
    try:
        yield
    finally:
        if sys.modules.get(COMPILER) is marks:
            del sys.modules[COMPILER]


@contextmanager
def _models_listed_once() -> Iterator[None]:
    """Let transformers read its 3,000 files of models once: it would once more for another spelling of their folder."""
    from transformers.utils import import_utils

    module: Any = import_utils
    listed = import_utils.create_import_structure_from_path
    module.create_import_structure_from_path = lambda path: listed(str(path).removesuffix("/__init__.py"))
    try:
        yield
    finally:
        module.create_import_structure_from_path = listed


with _compiler_unloaded(), _models_listed_once():
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils import logging

__all__ = ["ALL_ATTENTION_FUNCTIONS", "AutoConfig", "AutoModelForCausalLM", "logging"]
