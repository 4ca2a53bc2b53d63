"""Quantised models: the matrices of a Hugging Face directory that have fewer bits, and the names they have on disk.

Two forms: FP8 in blocks, as DeepSeek-V3 and Qwen3 publish it, and INT4 in groups, as Kimi K2 has it
(compressed-tensors, `pack-quantized`). The numbers themselves are those of `asyncrl.weights.quantised`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from asyncrl.data.model_dir import (
    INVERSE,
    PACKED,
    PACKED_COLUMNS,
    SCALE,
    WEIGHT,
    ModelError,
    OnDisk,
    read_json,
    stored_tensors,
    tensor_shapes,
)

Form: TypeAlias = Literal["fp8-blocks", "fp8-blocks-ue8m0", "int4-groups"]
"""The scales of the second form are powers of two, as DeepSeek-V3.1 has them: `scale_fmt` in `quantization_config`."""

BLOCK = 128  # rows and columns that share a scale in FP8
GROUP = 32  # columns of a row that share a scale in INT4
_CONFIG = "quantization_config"
_PLAIN = re.compile(r"\.(mlp\.gate|eh_proj|embed_tokens|shared_head\.head)\.weight\Z")
"""Matrices of layers that engines compute unquantised: routers, and those of layers that predict ahead."""


class Quantisation(msgspec.Struct, frozen=True):
    """The form of a model, and the matrices that have it."""

    form: Form
    names: frozenset[str]  # "model.layers.0.mlp.up_proj.weight"
    config: dict[str, Any]  # `quantization_config` of `config.json`


def read_quantisation(directory: Path) -> Quantisation | None:
    """The form of a model directory; None where its weights are not quantised.

    Raises:
        ModelError: it is another one, or a file is torn.
    """
    config = read_json(directory / "config.json").get(_CONFIG)
    if config is None:
        return None
    if problem := _unknown(config):
        raise ModelError(
            f"{directory}: found quantised weights ({_CONFIG}: {problem}), expected FP8 in blocks of "
            f"{BLOCK} x {BLOCK}, or INT4 in symmetric groups of {GROUP} columns (compressed-tensors, pack-quantized); "
            f"convert the model to bfloat16, and take {_CONFIG} out of its config.json"
        )
    form: Form = "int4-groups"
    if config["quant_method"] == "fp8":
        form = "fp8-blocks" if config.get("scale_fmt") is None else "fp8-blocks-ue8m0"
    ending = PACKED if form == "int4-groups" else INVERSE
    stored = stored_tensors(directory)
    if problem := _apart(form, stored):
        raise ModelError(f"{directory}: {problem}; its files are of several models, or torn: fetch it again")
    names = frozenset(name.removesuffix(ending) + WEIGHT for name in stored if name.endswith(ending))
    return Quantisation(form, names, config)


def _apart(form: Form, stored: Mapping[str, OnDisk]) -> str:
    """Return which matrix has missing or wrong scales, and would be misread; empty if there is none."""
    eights = form != "int4-groups"
    of_values, of_scales = (WEIGHT, INVERSE) if eights else (PACKED, SCALE)
    modules = {name.removesuffix(of_scales) for name in stored if name.endswith(of_scales)}
    modules |= {
        name.removesuffix(of_values)
        for name, found in stored.items()
        if name.endswith(of_values) and (not eights or found.dtype == "F8_E4M3")
    }
    for module in sorted(modules):
        values, scales = stored.get(module + of_values), stored.get(module + of_scales)
        if values is None or scales is None:
            there, missing = (of_scales, of_values) if values is None else (of_values, of_scales)
            return f"found {module + there}, and no {module + missing}"
        if len(values.shape) != 2:
            return f"{module + of_values} has shape {values.shape}, which is no matrix"
        rows, columns = values.shape
        wanted = (-(-rows // BLOCK), -(-columns // BLOCK)) if eights else (rows, columns * PACKED_COLUMNS // GROUP)
        if scales.shape != wanted:
            return f"{module + of_scales} has shape {scales.shape}, that of {values.shape} values is {wanted}"
    return ""


def _unknown(config: Any) -> str:
    """Return what of a `quantization_config` is not read here; empty where all is."""
    if not isinstance(config, dict):
        return repr(config)
    method = config.get("quant_method")
    if method == "fp8":
        known: dict[str, tuple[Any, ...]] = {
            "weight_block_size": ([BLOCK, BLOCK],),
            "activation_scheme": ("dynamic",),
            "fmt": (None, "e4m3", "float8_e4m3fn"),
            "scale_fmt": (None, "ue8m0"),
        }
        return ", ".join(f"{key} = {config.get(key)!r}" for key in known if config.get(key) not in known[key])
    groups = config.get("config_groups")
    if method != "compressed-tensors" or config.get("format") != "pack-quantized" or not isinstance(groups, dict):
        return f"quant_method = {method!r}, format = {config.get('format')!r}"
    wanted: dict[str, Any] = {"num_bits": 4, "group_size": GROUP, "symmetric": True, "strategy": "group", "type": "int"}
    for group in groups.values():
        weights = group.get("weights") or {}
        wrong = [f"{key} = {weights.get(key)!r}" for key in wanted if weights.get(key) != wanted[key]]
        wrong += [f"{key} = {weights[key]!r}" for key in ("actorder",) if weights.get(key)]
        if wrong:
            return ", ".join(wrong)
    return ""


def quantised_as(directory: Path, form: str) -> Quantisation | None:
    """The published form of versions of a model; None for the weights in trained form.

    Args:
        directory: that the run begins from.
        form: of the setting `weights.format`.

    Raises:
        ModelError: the directory is torn, or the model cannot have this form.
    """
    own = read_quantisation(directory)
    if form == "model" or (own is not None and own.form == form):
        return own
    if form == "plain":
        return None
    shapes = tensor_shapes(directory)
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name]
    chosen = [name for name in matrices if not _PLAIN.search(name)]
    fp8 = form == "fp8-blocks"
    chosen = chosen if fp8 else _grouped(directory, shapes, chosen)
    rest = ["lm_head", *(name.removesuffix(WEIGHT) for name in matrices if name not in set(chosen))]
    config = _fp8_config(rest) if fp8 else _int4_config(rest)
    return Quantisation("fp8-blocks" if fp8 else "int4-groups", frozenset(chosen), config)


def _grouped(directory: Path, shapes: Mapping[str, Sequence[int]], names: list[str]) -> list[str]:
    """Return the matrices that are published in INT4 groups."""
    # Kimi K2 keeps attention and shared experts in trained form.
    chosen = [name for name in names if ".mlp.experts." in name] or names
    if uneven := [name for name in chosen if shapes[name][1] % GROUP]:
        raise ModelError(
            f"{directory}: {uneven[0]} has {shapes[uneven[0]][1]} columns, which are no groups of {GROUP}; "
            'set weights.format = "fp8-blocks" or "plain"'
        )
    return chosen


def _fp8_config(rest: list[str]) -> dict[str, Any]:
    blocks = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    return {**blocks, "modules_to_not_convert": rest}


def _int4_config(rest: list[str]) -> dict[str, Any]:
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": rest,
        "kv_cache_scheme": None,
    }


def config_of(directory: Path, published: Quantisation | None) -> bytes | None:
    """`config.json` of versions in a form; None if that of the directory is right.

    Raises:
        ModelError: the directory has none.
    """
    config = read_json(directory / "config.json")
    if config.get(_CONFIG) == (published.config if published is not None else None):
        return None
    config.pop(_CONFIG, None)
    if published is not None:
        config[_CONFIG] = published.config
    return msgspec.json.format(msgspec.json.encode(config), indent=2)


def served_otherwise(directory: Path, form: str) -> str:
    """Return `quantization_config` of versions as JSON, if that of the directory differs; empty otherwise.

    Raises:
        ModelError: as `quantised_as`.
    """
    published = quantised_as(directory, form)
    if config_of(directory, published) is None:
        return ""
    return msgspec.json.encode({_CONFIG: published.config if published is not None else None}).decode()
