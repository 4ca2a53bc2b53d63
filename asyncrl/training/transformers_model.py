"""A model directory that transformers alone knows: whether its weights fit, and how it takes documents."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from asyncrl.data.model_dir import ModelError, read_json, tensor_shapes
from asyncrl.training.disk_names import DiskNames, stored
from asyncrl.training.document_check import arrangement_of
from asyncrl.training.document_model import Arrangement
from asyncrl.training.transformers_config import read_transformers_config
from asyncrl.training.transformers_parts import AutoModelForCausalLM

_TEXT, _OF_TEXT = "model.", "model.language_model."
"""Beginnings of names in a language model, and in one with images."""
_LAYERS = "layers."
_COMPUTED = ".inv_freq"


def arrangement_in(directory: Path) -> Arrangement:
    """Find how the model of a directory takes documents.

    Raises:
        ModelError: as `check_transformers_model`.
    """
    return arrangement_of(read_transformers_config(directory))


def check_transformers_model(directory: Path, replaced: str = "") -> None:
    """Refuse a model that the torch trainer cannot train, without reading its weights.

    Args:
        replaced: the name of a tensor that is not read.

    Raises:
        ModelError: transformers has no such model, its weights are others, or documents leak.
    """
    config = read_transformers_config(directory)
    arrangement_of(config)
    if read_json(directory / "config.json").get("quantization_config") is not None:
        return  # the names and scales of quantised weights are checked where these are read
    build: Any = AutoModelForCausalLM  # its call has no types
    with torch.device("meta"):
        model = build.from_config(config)
    there = tensor_shapes(directory)
    expected = _as_in(there, _shapes(model))
    for name, shape in expected.items():
        if name != replaced and there.get(name) != shape:
            found = f"it is {list(there[name])}" if name in there else "it is missing"
            raise ModelError(
                f"{directory}: by config.json {name} is {list(shape)}, in the weights {found}; they are of different "
                "models"
            )
    ignored = [re.compile(one) for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    trunk = next(name.partition(_LAYERS)[0] for name in expected if _LAYERS in name) + _LAYERS
    for name in there.keys() - expected.keys():
        plain = name.replace(_OF_TEXT, _TEXT, 1)
        if name.startswith(trunk) and not name.endswith(_COMPUTED) and not any(one.search(plain) for one in ignored):
            raise ModelError(
                f"{directory}: the weights hold {name}, but by config.json the layers have no such tensor; they are "
                "of different models"
            )


def _shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's tensors by their names on disk."""
    names, found = DiskNames.of(model), dict[str, tuple[int, ...]]()
    for name, tensor in stored(model).items():
        found |= names.shapes(name, tuple(tensor.shape))
    return found


def _as_in(there: Mapping[str, Any], expected: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Give names the beginning that they have in a model with images, if the directory has one."""
    of_text = {name.replace(_TEXT, _OF_TEXT, 1): shape for name, shape in expected.items()}
    return of_text if len(of_text.keys() & there.keys()) > len(expected.keys() & there.keys()) else expected
