"""The result of an evaluation as text."""

from __future__ import annotations

from topics.evals import EvalScored


def evaluation_text(scored: EvalScored) -> str:
    """Return its version and accuracy, with the prompts without a grade and what other versions answered."""
    text = f"evaluation of version {scored.version}: {scored.accuracy:.3f} on {scored.prompts} prompts"
    if scored.failed:
        text += f", {scored.failed} without a grade"
    others = {version: tokens for version, tokens in scored.versions.items() if version != scored.version and tokens}
    if others:
        percent = 100 * sum(others.values()) / sum(scored.versions.values())
        numbers = " and ".join(map(str, sorted(others)))
        text += f", {percent:.0f} % of it by version{'s' if len(others) > 1 else ''} {numbers}"
    return text
