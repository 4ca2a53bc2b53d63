"""Check a Hugging Face model directory without loading it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.errors import Fault

SUPPORTED = ("Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM")

# The format itself allows no longer header.
_MAX_HEADER_BYTES = 100_000_000


class ModelError(Fault):
    """A directory that is no whole model of a supported architecture."""


class ModelInfo(NamedTuple):
    """What a model directory holds."""

    architecture: str
    vocab_size: int
    context: int  # largest number of tokens


def check_model_directory(path: Path) -> ModelInfo:
    """Read config and weight headers of a model directory.

    Raises:
        ModelError: when a file is missing or cut short, or the architecture is not supported.
    """
    if not path.is_dir():
        raise ModelError(f"{path} is no directory; expected a Hugging Face model directory with config.json")
    config = _read_json(path / "config.json")
    architectures = config.get("architectures") or ["none"]
    if architectures[0] not in SUPPORTED:
        raise ModelError(f"{path}: architecture {architectures[0]} is not supported; one of {', '.join(SUPPORTED)} is")
    vocab_size, context = config.get("vocab_size"), config.get("max_position_embeddings")
    if not isinstance(vocab_size, int) or not isinstance(context, int):
        raise ModelError(
            f"{path / 'config.json'}: vocab_size is {vocab_size} and max_position_embeddings {context}; "
            "both must be numbers"
        )
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} has no tokenizer.json; copy the model's tokenizer files there")
    for file in _weight_files(path):
        _check_weights(file)
    return ModelInfo(architectures[0], vocab_size, context)


def _weight_files(path: Path) -> Iterator[Path]:
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        yield path / "model.safetensors"
        return
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; fetch the model again")
    for name in sorted(set(weight_map.values())):
        yield path / name


def _check_weights(file: Path) -> None:
    """Compare the file's size with what its header promises."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            (header_bytes,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(header_bytes, _MAX_HEADER_BYTES)))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}; the weights must be there as safetensors") from error
    except (struct.error, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ModelError(f"{file} has no readable safetensors header ({error}); fetch it again") from error
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file} has {size} bytes, its header promises {expected}; fetch it again")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except OSError as error:
        raise ModelError(f"{file}: {error.strerror}; expected a Hugging Face model directory") from error
    except ValueError as error:
        raise ModelError(f"{file} is no JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} holds {type(content).__name__}, expected a JSON object; fetch it again")
    return content
