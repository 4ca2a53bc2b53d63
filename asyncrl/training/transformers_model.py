"""A model directory that transformers alone knows: whether its weights fit, and how it takes documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from asyncrl.data.model_dir import ModelError, read_json
from asyncrl.training.disk_names import DiskNames
from asyncrl.training.document_check import arrangement_of
from asyncrl.training.document_model import Arrangement
from asyncrl.training.transformers_config import read_transformers_config
from asyncrl.training.transformers_parts import AutoModelForCausalLM, logging


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
    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # it would be drawn into the report
    logging.set_verbosity_error()  # type: ignore[no-untyped-call] # and so would a table of the tensors that are refused below
    load: Any = AutoModelForCausalLM.from_pretrained
    model, found = load(
        directory,
        config=config,
        local_files_only=True,
        device_map="meta",
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    for name, there, wanted in sorted(found["mismatched_keys"]):
        if name != replaced:
            raise ModelError(
                f"{directory}: by config.json {name} is {list(wanted)}, in the weights it is {list(there)}; they are "
                "of different models"
            )
    if missing := sorted(set(found["missing_keys"]) - {replaced}):
        raise ModelError(
            f"{directory}: by config.json there is {missing[0]}, in the weights it is missing; they are of different "
            "models"
        )
    if unread := sorted(name for name in found["unexpected_keys"] if ".layers." in name):
        raise ModelError(
            f"{directory}: the weights hold {unread[0]}, but by config.json the layers have no such tensor; they are "
            "of different models"
        )
    DiskNames.of(model)
