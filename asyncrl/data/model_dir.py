"""A Hugging Face model directory: read its configuration, and check it without loading it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from asyncrl.errors import AsyncRLError

WEIGHT, PACKED, PACKED_COLUMNS = ".weight", ".weight_packed", 8  # of INT4, in one int32
INVERSE, SCALE, SHAPE = ".weight_scale_inv", ".weight_scale", ".weight_shape"
SCALES = (INVERSE, SCALE, SHAPE)
"""Endings of the tensors that a quantised matrix has on disk."""


_GENERATIVE = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
"""Endings of architectures that generate text; of the second kind transformers may have the language model alone."""


class ModelError(AsyncRLError):
    """A directory that is no whole model, or whose model cannot be trained."""

    fatal = True


class ModelInfo(NamedTuple):
    """The contents of a model directory."""

    architecture: str
    vocab_size: int
    context: int  # largest number of tokens
    experts: int = 0  # of a layer
    layers: int = 1
    chosen: int = 0  # experts of a token

    @property
    def route_bytes(self) -> int:
        """Bytes of the experts of a token."""
        return self.layers * self.chosen * (1 if self.experts <= 256 else 2)


class OnDisk(NamedTuple):
    """A tensor in a file, as its header has it."""

    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: "F8_E4M3"


def check_model_directory(path: Path) -> ModelInfo:
    """Read config and weight headers of a model directory.

    Raises:
        ModelError: when a file is missing or cut short, or `config.json` is of no language model.
    """
    info = model_info(path)
    for file in weight_files(path):
        _check_weights(file)
    return info


def model_info(path: Path) -> ModelInfo:
    """Read the config of a model directory, which may be without weights.

    Raises:
        ModelError: a file is missing, or `config.json` is of no language model.
    """
    if not path.is_dir():
        raise ModelError(
            f"{path} is no directory; expected a Hugging Face model directory with config.json "
            "(`asyncrl model get NAME -o DIR` fetches one)"
        )
    config = read_json(path / "config.json")
    architecture = str((config.get("architectures") or [""])[0])
    if not architecture.endswith(_GENERATIVE):
        found = architecture or "no architecture"
        raise ModelError(
            f"{path / 'config.json'}: found {found}, expected a causal language model (a name that ends in "
            "ForCausalLM); name a model that generates text"
        )
    config = text_of(config)
    vocab_size, context = config.get("vocab_size"), config.get("max_position_embeddings")
    if not isinstance(vocab_size, int) or not isinstance(context, int):
        raise ModelError(
            f"{path / 'config.json'}: vocab_size is {vocab_size} and max_position_embeddings {context}; "
            "both must be numbers"
        )
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} has no tokenizer.json; copy the model's tokenizer files there")
    try:
        experts, chosen = expert_count(config), int(config.get("num_experts_per_tok") or 0)
        layers = int(config.get("num_hidden_layers", 1))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{path / 'config.json'} has no number of layers or experts ({error}); fetch it again"
        ) from error
    return ModelInfo(architecture, vocab_size, context, experts, layers, chosen)


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of `config.json` that is of the language model: a model with images has several parts."""
    text = config.get("text_config")
    return text if isinstance(text, dict) else config


def expert_count(config: Mapping[str, Any]) -> int:
    """Return the number of experts, which has three names, of which transformers 5 writes `num_local_experts`; or 0."""
    return int(config.get("num_experts") or config.get("n_routed_experts") or config.get("num_local_experts") or 0)


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the weights of a model directory by name, from the headers of its files; for quantised ones the
    dequantised names and shapes.

    Raises:
        ModelError: a file is missing or cut short.
    """
    return logical_shapes({name: found.shape for name, found in stored_tensors(path).items()})


def stored_tensors(path: Path) -> dict[str, OnDisk]:
    """As `tensor_shapes`, as they lie on disk."""
    return {name: found for file in weight_files(path) for name, found in _check_weights(file).items()}


def logical_shapes(stored: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """From the tensors on disk to the dequantised ones: scales belong to a matrix, packed columns are eight."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in stored.items():
        if name.endswith(PACKED):
            found[name.removesuffix(PACKED) + WEIGHT] = (shape[0], shape[1] * PACKED_COLUMNS)
        elif not name.endswith(SCALES):
            found[name] = shape
    return found


def count_parameters(path: Path) -> int:
    """Parameters of a model directory, by the headers of its weights.

    Raises:
        ModelError: it holds no whole weights.
    """
    return sum(math.prod(shape) for shape in tensor_shapes(path).values())


def weight_files(path: Path) -> Iterator[Path]:
    """Yield the files of a model's weights, as its index names them if there are several."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        yield path / "model.safetensors"
        return
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map; fetch the model again")
    for name in sorted(set(weight_map.values())):
        yield path / name


def _check_weights(file: Path) -> dict[str, OnDisk]:
    """Return the tensors of a file; refuse one whose header is broken, or promises another number of bytes."""
    try:
        with safe_open(file, framework="np") as weights:
            slices = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 - no dict
            return {name: OnDisk(tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        if not file.exists() and (pickled := sorted(one.name for one in file.parent.glob("pytorch_model*.bin"))):
            raise ModelError(
                f"{file.parent} has its weights in {pickled[0]}, expected *.safetensors; write them with "
                "AutoModelForCausalLM.from_pretrained(...).save_pretrained(...) of transformers"
            ) from error
        raise ModelError(f"{file} holds no whole weights as safetensors ({error}); fetch it again") from error


def read_json(file: Path, fault: type[Exception] = ModelError) -> dict[str, Any]:
    """One JSON object from a file of a model directory.

    Args:
        fault: raised where the file is missing, unreadable or holds something else.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise fault(
            f"model {file.parent}: cannot read {file.name} ({error.strerror}); "
            "give a directory in Hugging Face format: config.json and *.safetensors"
        ) from error
    except ValueError as error:
        raise fault(f"model {file.parent}: {file.name} is not a JSON object ({error}); fetch it again") from error


def named_eos_ids(path: Path, fault: type[Exception]) -> list[int] | None:
    """Token ids that end a text, as generation_config.json names them, else config.json; None where neither does."""
    for file in (path / "generation_config.json", path / "config.json"):
        found = read_json(file, fault).get("eos_token_id") if file.exists() else None
        if found is not None:
            return found if isinstance(found, list) else [found]
    return None
