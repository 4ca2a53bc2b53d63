"""Adapters in the table of a family: their rows, with the names that the torch trainer gives them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator

from asyncrl.config.learner_settings import EXPERTS
from asyncrl.engine.embedded.config import ModelConfig
from asyncrl.training.megatron.weight_map import NUMBERED, Family, Row, Rule, Size

_ADAPTABLE = re.compile(r"(self_attention\.(linear_(qkv|proj)|in_proj_\w+|out_proj)|mlp\.linear_fc[12])\.weight")
"""Parameters of products that modules of asyncrl compute; the library computes the others."""


def target_of(name: str) -> str:
    """Return the item of `learner.lora.targets` that a tensor on disk belongs to; empty for a vector."""
    if NUMBERED.search(name):
        return EXPERTS
    return name.split(".")[-2] if name.endswith(".weight") else ""


def is_adaptable(row: Row, shape: ModelConfig) -> bool:
    """Return whether a product of a layer, or experts, can have an adapter."""
    if not row.inside or NUMBERED.search(row.name):
        return row.inside
    attends = row.rule.parameter.startswith("self_attention.")
    return not (attends and shape.latent) and _ADAPTABLE.fullmatch(row.rule.parameter) is not None


def adaptable(family: Family, shape: ModelConfig) -> list[str]:
    """Return the items of `learner.lora.targets` that a model can have."""
    rows = (row for row in family.rows(shape) if len(row.size) == 2)
    return sorted({target_of(row.name) for row in rows if is_adaptable(row, shape)})


def adapter_problem(family: Family, shape: ModelConfig, targets: Collection[str]) -> str:
    """Return why a model cannot have adapters of these targets; empty if it can."""
    there = adaptable(family, shape)
    for row in family.rows(shape):
        target = target_of(row.name) if row.inside else ""
        if target in targets and not is_adaptable(row, shape):
            return (
                f"the megatron trainer adapts no {target} of {row.name}, expected some of {', '.join(there) or 'none'}"
            )
    if missing := [target for target in targets if target not in there]:
        return f"the layers have no {', '.join(missing)}, expected some of {', '.join(there) or 'none'}"
    return ""


def adapted_rows(rows: Iterable[Row], shape: ModelConfig, targets: Collection[str], rank: int) -> Iterator[Row]:
    """Yield the rows of a model, which are frozen, each followed by those of its adapter.

    Args:
        rows: of `Family.rows`.
        targets: what has adapters.
        rank: of these.
    """
    for row in rows:
        yield row._replace(rule=row.rule._replace(frozen=True))
        target = target_of(row.name) if row.inside else ""
        if target in targets:
            yield from _of_experts(row, shape, rank) if target == EXPERTS else _of_projection(row, target, rank)


def _fixed(size: tuple[int, ...]) -> Size:
    return lambda _: size


def _of_projection(row: Row, target: str, rank: int) -> Iterator[Row]:
    rule, (rows, columns) = row.rule, row.size
    stem, parameter = row.name.removesuffix("weight"), rule.parameter.removesuffix("weight")
    low = Rule(f"{parameter}adapter.{target}.lora_A", _fixed((rank, columns)), 1 if rule.split == 1 else None)
    high = Rule(f"{parameter}adapter.{target}.lora_B", _fixed((rows, rank)), 0 if rule.split == 0 else None)
    high = high._replace(sections=rule.sections if rule.split == 0 else None)
    yield row._replace(name=f"{stem}lora_A", rule=low._replace(adapter=True), size=(rank, columns))
    yield row._replace(name=f"{stem}lora_B", rule=high._replace(adapter=True), size=(rows, rank))


def _of_experts(row: Row, shape: ModelConfig, rank: int) -> Iterator[Row]:
    """Yield the adapters of all experts of a layer with the row of the first one."""
    number, last = NUMBERED.search(row.name), row.name.split(".")[-2]
    if number is None or int(number[0]) or last == "up_proj" or shape.experts is None:
        return
    prefix, count, (rows, columns) = row.name[: number.start()], shape.experts.count, row.size
    rows, name = (2 * rows, "gate_up_proj") if last == "gate_proj" else (rows, last)
    for letter, size in (("A", (count, rank, columns)), ("B", (count, rows, rank))):
        rule = Rule(f"{row.rule.parameter}_lora_{letter}", _fixed(size), 0, adapter=True, stacks=True)
        yield row._replace(name=f"{prefix}{name}_lora_{letter}", rule=rule, size=size)
