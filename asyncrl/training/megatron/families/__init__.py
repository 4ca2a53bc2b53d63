"""Families of models, one file each, by the architecture that `config.json` names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl.data.model_dir import ModelError, read_json, tensor_shapes
from asyncrl.engine.embedded.config import ModelConfig, read_shape, rope_of
from asyncrl.training.megatron.families import deepseek_v3, glm4, glm4_moe, llama, qwen2, qwen3, qwen3_5, qwen3_moe
from asyncrl.training.megatron.weight_map import Family

_ALL = (
    qwen3.FAMILY,
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3_5.FAMILY,
    qwen3_moe.FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    deepseek_v3.FAMILY,
)
FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL}
"""Another family is added here."""


def packs(architecture: str) -> bool:
    """Return whether models are known to keep the documents of a row apart, in every trainer, without a test."""
    family = FAMILIES.get(architecture)
    return family is not None and not family.carries_state


def family_of(directory: Path) -> tuple[Family, ModelConfig]:
    """Family and shape of a model directory with any features.

    Raises:
        ModelError: the family is not known here, or `config.json` lacks a field of it.
        EngineError: `config.json` is torn, or lacks a field.
    """
    raw, shape = read_json(directory / "config.json"), read_shape(directory)
    family = FAMILIES.get(shape.architecture)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ModelError(f'{directory}: the trainer "megatron" has no family {shape.architecture}; it has {known}')
    if missing := [key for key in family.needed if key not in raw]:
        raise ModelError(f"{directory}: config.json of a {family.architecture} lacks {missing[0]!r}; fetch it again")
    return family, family.read(raw, shape)


def read_family(directory: Path) -> tuple[Family, ModelConfig]:
    """Family and shape of a model directory that can be trained here.

    Raises:
        ModelError: the family, its rotary embedding or some feature of it is not known here.
        EngineError: `config.json` is torn, or lacks a field.
    """
    family, shape = family_of(directory)
    if shape.rope.kind not in family.ropes:
        raise ModelError(
            f"{directory}: found rope type {shape.rope.kind!r}, expected {' or '.join(family.ropes)}; "
            'set learner.trainer = "torch"'
        )
    raw = read_json(directory / "config.json")
    for key, value in family.fixed.items():
        if raw.get(key, value) != value:
            raise ModelError(
                f'{directory}: found {key} = {raw[key]!r}, expected {value!r}; set learner.trainer = "torch"'
            )
    if problem := _rotation(family, shape, rope_of(raw)) or _grouping(shape):
        raise ModelError(f'{directory}: {problem}; set learner.trainer = "torch"')
    return family, shape


def ahead_problem(directory: Path, shape: ModelConfig) -> str:
    """Return why the layer that predicts the token after the next one cannot be trained; empty if it can."""
    name = f"model.layers.{shape.layers}.eh_proj.weight"
    if shape.further_layers > 1:
        return f"config.json has {shape.further_layers} layers that predict ahead, one is known here"
    if not shape.further_layers or name not in tensor_shapes(directory):
        return f"there is no layer that predicts ahead: num_nextn_predict_layers in config.json, and {name}"
    return ""


def _rotation(family: Family, shape: ModelConfig, rope: Mapping[str, Any]) -> str:
    """Return why heads cannot be rotated as in transformers; empty if they can."""
    if shape.rope.share != 1.0 and not family.rotates_part:
        return f"found partial_rotary_factor = {shape.rope.share:g}, expected 1"
    if shape.rope.kind == "yarn" and rope.get("attention_factor") is not None:
        return f"found attention_factor = {rope['attention_factor']} of yarn, expected mscale and mscale_all_dim"
    given = [key for key in ("mscale", "mscale_all_dim") if rope.get(key)]
    if shape.rope.kind == "yarn" and len(given) == 1:
        return f"found {given[0]} of yarn alone, expected mscale and mscale_all_dim, or none"
    return ""


def _grouping(shape: ModelConfig) -> str:
    """Return why the library cannot choose experts by groups; empty if it can."""
    experts = shape.experts
    if experts is None or experts.groups == 1:
        return ""
    if experts.count % experts.groups or experts.groups_chosen > experts.groups:
        return (
            f"found n_group = {experts.groups} and topk_group = {experts.groups_chosen} with {experts.count} experts, "
            "expected n_group to divide the experts, and topk_group of at most n_group"
        )
    if experts.chosen == 2 * experts.groups_chosen:
        return ""
    return (
        f"found num_experts_per_tok = {experts.chosen} in topk_group = {experts.groups_chosen} groups of experts, "
        "expected two of each: a group is chosen by the sum of its two highest scores"
    )
