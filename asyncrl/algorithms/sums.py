"""Figures of a step, from sums over its tokens.

A loss returns sums by the name of the figure: a sum over tokens is shown as their mean, a name that ends in `_max` as
the largest value, and one that begins with `_` only helps to compute others.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

Sums: TypeAlias = dict[str, torch.Tensor]


def merge_sums(parts: list[Sums]) -> Sums:
    """Add the sums of micro-batches or ranks; `*_max` takes the largest."""
    if len(parts) == 1:
        return {name: value.float() for name, value in parts[0].items()}
    merged: Sums = {}
    for name in parts[0] if parts else ():
        values = torch.stack([part[name].float() for part in parts])
        merged[name] = values.max() if name.endswith("_max") else values.sum()
    return merged


def metrics(sums: Sums) -> dict[str, float]:
    """Turn sums into the numbers of a step; empty if no token was trained.

    Args:
        sums: merged, and so of one type, with `tokens`, their number. `NAME/PART` is a sum over a part of them, of
            `tokens/PART` tokens.

    Returns:
        Each figure, per token; of a part per token of that part, and `token_share/PART`, but nothing of parts without
        tokens; and, of a loss that gives `ratio_mean` and `_ratio_squared`, `ess`: the effective sample share
        (sum r)^2 / (N sum r^2), Kish's, by which PipelineRL, arXiv 2509.19128, compares runs.
    """
    parts: dict[str, dict[str, float]] = {}
    totals = torch.stack(list(sums.values())).tolist() if sums else []  # waits for a GPU once
    for name, total in zip(sums, totals, strict=True):
        figure, _, part = name.partition("/")
        parts.setdefault(part, {})[figure] = total
    tokens = parts.get("", {}).get("tokens", 0.0)
    found = _figures(parts.pop("", {}))
    for part, values in parts.items():
        if tokens and values.setdefault("tokens", tokens):
            found[f"token_share/{part}"] = values["tokens"] / tokens
            found |= {f"{name}/{part}": value for name, value in _figures(values).items()}
    return found


def _figures(value: dict[str, float]) -> dict[str, float]:
    tokens = value.pop("tokens", 0.0)
    if not tokens:
        return {}
    shown = {name: total for name, total in value.items() if not name.startswith("_")}
    found = {name: total if name.endswith("_max") else total / tokens for name, total in shown.items()}
    if "_ratio_squared" in value:
        found["ess"] = value["ratio_mean"] ** 2 / (tokens * value["_ratio_squared"])
    return found
