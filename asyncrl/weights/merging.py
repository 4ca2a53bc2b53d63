"""The sum of a model and an adapter, with the bits that the learner publishes where versions are whole models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from asyncrl.errors import UNREADABLE
from asyncrl.weights.adapters import ADAPTER, PEFT_PREFIX, read_base, read_shape
from asyncrl.weights.folders import DiskFolder
from asyncrl.weights.model_folder import describe_model
from asyncrl.weights.tensors import HostTensor, manifest_of_files, write_files
from asyncrl.weights.verify import TornVersion, write_manifest


def added(weight: torch.Tensor, high: torch.Tensor, low: torch.Tensor, scale: float) -> torch.Tensor:
    """Return a projection with its adapter: weight + scale * high @ low (LoRA, arXiv 2106.09685, eq. 3).

    Args:
        weight: [out, in].
        high: B, [out, rank].
        low: A, [rank, in].
        scale: alpha / rank.
    """
    return weight + scale * (high @ low)


def merged(base: Mapping[str, torch.Tensor], directory: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by name, with an adapter merged in; tensors without one may be views of the files.

    Args:
        base: tensors of the model by name.
        directory: of the adapter.

    Raises:
        TornVersion: the adapter cannot be read, or belongs to another model.
    """
    try:
        of, shape = read_base(directory), read_shape(directory)
        adapter = dict(_tensors(directory))
    except (OSError, SafetensorError, *UNREADABLE) as error:
        raise TornVersion(f"{directory.name}: its adapter cannot be read: {error}") from error
    dtype: torch.dtype = getattr(torch, of.dtype)
    found = {name: one if name in of.kept else one.to(dtype) for name, one in base.items()}
    for name in [name for name in adapter if name.endswith(".lora_A.weight")]:
        module = name.removesuffix("lora_A.weight")
        target = f"{module.removeprefix(PEFT_PREFIX)}weight"
        low, high, weight = adapter.pop(name), adapter.pop(f"{module}lora_B.weight", None), base.get(target)
        if weight is None or high is None or weight.shape != (len(high), low.shape[1]) or high.shape[1] != len(low):
            raise TornVersion(f"{directory.name}: {name} {list(low.shape)} fits no projection {target} of the model")
        found[target] = added(weight.float(), high.float(), low.float(), shape.lora_alpha / shape.r).to(dtype)
    if adapter:
        raise TornVersion(f"{directory.name}: {min(adapter)} belongs to no adapter of a projection")
    return found


def write_merged(model: Path, directory: Path, target: Path) -> None:
    """Fill a directory with a model and its tokenizer, with an adapter in its weights, and its manifest.

    Args:
        model: directory of the model.
        directory: of the adapter.
        target: an existing directory.

    Raises:
        TornVersion: as `merged`.
        OSError: the disk refused it.
    """
    base = {name: one for path in sorted(model.glob("*.safetensors")) for name, one in _of_file(path)}
    folder = DiskFolder(target)
    written = write_files(folder, {"model": [_on_host(name, one) for name, one in merged(base, directory).items()]})
    write_manifest(folder, manifest_of_files(written), describe_model(folder, written, model))


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(directory.glob(f"{ADAPTER}*.safetensors")):
        yield from _of_file(path)


def _of_file(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - the handle is not iterable
            yield name, file.get_tensor(name)


def _on_host(name: str, tensor: torch.Tensor) -> HostTensor:
    content = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return HostTensor(name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), content)
