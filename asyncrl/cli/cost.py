"""`asyncrl cost`: GPU hours, tokens and seconds by cause, and what to scale first."""

from __future__ import annotations

import argparse
import asyncio

from asyncrl.cli.options import add_option
from asyncrl.cli.output import add_json, show
from asyncrl.cli.target import add_run, any_run
from asyncrl.state.cost import Cost, read_cost


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run(parser)
    add_option(parser, "--rate PRICE", float, "price of one GPU hour; without it no price is shown")
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Read the logs, print the cost."""
    cost = asyncio.run(read_cost(any_run(arguments), arguments.rate))
    show(arguments, cost, lambda: cost_text(cost))
    return 0


def cost_text(cost: Cost) -> str:
    """The cost for people, one figure a line."""
    sampled = sum(cost.tokens.values()) or 1
    rows = [("wall", f"{cost.wall_h:.2f} h")]
    rows.append(("GPUs", _hours(cost.gpu_h) or "none: the run computes on CPUs"))
    rows.append(("processes", _hours(cost.process_h)))
    rows += [("tokens", f"{count:,} {cause} ({count / sampled:.0%})") for cause, count in cost.tokens.items()]
    rows += [("learner", f"{seconds:,.1f} s {cause}") for cause, seconds in cost.learner_s.items()]
    rows += [("engines", f"{seconds:,.1f} s {cause}") for cause, seconds in cost.engine_s.items()]
    if cost.price is not None:
        each = cost.price_per_million_trained_tokens
        rows.append(
            ("price", f"{cost.price:,.2f}" + ("" if each is None else f", {each:,.4f} a million trained tokens"))
        )
    rows.append(("scale first", cost.scale_first))
    width = max(len(name) for name, _ in rows)
    names = [name if name != before else "" for (name, _), (before, _) in zip(rows, [("", ""), *rows], strict=False)]
    return "\n".join(f"{name:>{width}}  {value}" for name, (_, value) in zip(names, rows, strict=True))


def _hours(by_role: dict[str, float]) -> str:
    whole = f"{sum(by_role.values()):.2f} h" if by_role else ""
    return whole + (f" ({', '.join(f'{role} {hours:.2f}' for role, hours in by_role.items())})" if by_role else "")
